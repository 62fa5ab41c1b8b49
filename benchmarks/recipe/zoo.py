"""Trains models that others wrote for two steps, as a pipeline and with FSDP, and compares the loss with one process.

    python -m benchmarks.recipe.zoo                        all; needs transformers and, for the images, torchvision
    python -m benchmarks.recipe.zoo bert resnet18

Models are small and without dropout. A layout that is refused is shown with the reason.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from torchtitan.models.spec import ModelSpec

ROOT = Path(__file__).parents[2]
ENCODER = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
GROUPED = ENCODER | {"num_key_value_heads": 1}
BOTH = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
DISTIL = {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "use_cache": False}
CLIP = {"text_config": ENCODER | {"vocab_size": 50, "eos_token_id": 2},
        "vision_config": ENCODER | {"image_size": 16, "patch_size": 4}}  # fmt: skip
# name -> its class and configuration in transformers, its sizes, what it reads, and the list of its layers
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", ENCODER, "words", "bert.encoder.layer"),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", ENCODER, "words", "roberta.encoder.layer"),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL, "words",
                   "distilbert.transformer.layer"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "words", "transformer.h"),
    "opt": ("OPTForCausalLM", "OPTConfig", {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
            "ffn_dim": 32, "word_embed_proj_dim": 16}, "words", "model.decoder.layers"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER, "words", "gpt_neox.layers"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", ENCODER, "words", "model.layers"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}, "words", "model.layers"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8}, "words", "model.layers"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}, "words", "model.layers"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "words to words", "encoder.block"),
    "bart": ("BartForConditionalGeneration", "BartConfig", BOTH, "words to words", "model.encoder.layers"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                BOTH | {"num_mel_bins": 8, "max_source_positions": 10}, "sound to words", "model.encoder.layers"),
    "vit": ("ViTForImageClassification", "ViTConfig", ENCODER | {"image_size": 16, "patch_size": 4}, "images",
            "vit.layers"),
    "clip": ("CLIPModel", "CLIPConfig", CLIP, "words and images", "vision_model.encoder.layers"),
}  # fmt: skip
TORCHVISION = ("alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t "
               "mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 "
               "squeezenet1_0 swin_t swin_v2_t vgg11 vit_b_16 wide_resnet50_2").split()  # fmt: skip
WIDTHS = {"inception_v3": 299, "maxvit_t": 224, "alexnet": 96, "squeezenet1_0": 96}  # others take 64


class Samples(Dataset):
    """Random ones, with twelve words as target."""

    def __init__(self, reads: str, width: int = 16) -> None:
        self.reads, self.width = reads, width

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(index)
        words, sample = torch.randint(5, 50, (12,), generator=draw), {}
        if self.reads.startswith("words"):
            sample |= {"input_ids": words, "attention_mask": (torch.arange(12) < 8 + index % 4).long()}
        if "images" in self.reads:
            sample["pixel_values"] = torch.randn(3, self.width, self.width, generator=draw)
        if "sound" in self.reads:
            sample["input_features"] = torch.randn(8, 20, generator=draw)
        if "to words" in self.reads:
            sample["decoder_input_ids"] = words.roll(1)
        return sample, words


def loss(output: Any, words: Tensor) -> Tensor:
    if hasattr(output, "text_embeds"):
        return (output.text_embeds * output.image_embeds).sum(-1).mean()
    if output.logits.dim() == 3:
        return F.cross_entropy(output.logits.flatten(0, 1), words.flatten())
    return F.cross_entropy(output.logits, words[:, 0] % 2)


def loss_of_images(output: Any, words: Tensor) -> Tensor:
    """Of all heads, where training has several."""
    heads = [output] if isinstance(output, Tensor) else [head for head in output if head is not None]
    return torch.stack([F.cross_entropy(head, words[:, 0] % 10) for head in heads]).sum()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if "Dropout" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


def __getattr__(name: str) -> ModelSpec:
    if name in TRANSFORMERS:
        import transformers

        kind, config, sizes, reads, layers = TRANSFORMERS[name]
        made = getattr(transformers, config)(**({} if name in ("vit", "clip") else {"vocab_size": 50}), **sizes)

        def build() -> nn.Module:
            return without_dropout(getattr(transformers, kind)(made))

        return ModelSpec(build=build, data=lambda: Samples(reads), loss=loss, layers=layers)
    if name not in TORCHVISION:
        raise AttributeError(name)
    import torchvision  # type: ignore[import-not-found]

    options: dict[str, Any] = {"image_size": 64} if name == "vit_b_16" else {}
    options |= {"init_weights": False, "aux_logits": True} if name in ("googlenet", "inception_v3") else {}

    def build_images() -> nn.Module:
        return without_dropout(getattr(torchvision.models, name)(num_classes=10, **options))

    def images() -> Dataset:
        whole = Samples("images", WIDTHS.get(name, 64))
        return [(sample["pixel_values"], words) for sample, words in (whole[i] for i in range(len(whole)))]  # type: ignore[return-value]

    return ModelSpec(build=build_images, data=images, loss=loss_of_images)


def train(name: str, num_ranks: int, batch: int, options: list[str]) -> list[float] | str:
    """The two losses, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"model.name": f"benchmarks.recipe.zoo:{name}", "job.dump_folder": folder, "training.steps": 2,
                  "training.local_batch_size": batch, "training.global_batch_size": 4, "optimizer.lr": 1e-4,
                  "lr_scheduler.warmup_steps": 1, "training.mixed_precision_param": "float32", "debug.seed": 0,
                  "activation_checkpoint.mode": "none", "metrics.log_freq": 1}  # fmt: skip
        command = ["env", f"NGPU={num_ranks}", "OMP_NUM_THREADS=1", str(ROOT / "run_llama_train.sh"), *options]
        command += [part for key, value in values.items() for part in (f"--{key}", str(value))]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            found = re.search(r"error: (.*)", done.stderr)
            return found[1] if found else f"fails: {done.stderr.strip().splitlines()[-1]}"
        return [json.loads(line)["loss"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    print("| model | PP 2 | FSDP 2 |\n| --- | --- | --- |")
    for name in sys.argv[1:] or [*TRANSFORMERS, *TORCHVISION]:
        one = train(name, 1, 4, [])
        microbatch = "2" if name in TRANSFORMERS else "4"
        pipeline = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "GPipe",
                    "--parallelism.pipeline_parallel_microbatch_size", microbatch]  # fmt: skip
        cells = [one if isinstance(one, str) else ""] * 2
        for place, (batch, options) in enumerate(((4, pipeline), (2, []))):
            found = train(name, 2, batch, options)
            if not isinstance(one, str):
                cells[place] = found if isinstance(found, str) else f"{max(map(_apart, one, found)):.0e}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(one)


if __name__ == "__main__":
    main()
