"""Models of transformers as their users have them: with masks, tied weights, and outputs in classes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from torchtitan.models.spec import ModelSpec

SAMPLES, LENGTH, WORDS = 48, 12, 50
SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


def _model(kind: str, config: str, **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, kind)(getattr(transformers, config)(**more))  # type: ignore[no-any-return]

    return build


class Samples(Dataset):
    """Words with a mask, or other inputs, and a class or the next words."""

    def __init__(self, split: str, *, inputs: str = "input_ids", masked: bool = False, size: tuple[int, ...] = ()):
        self.first, self.inputs, self.masked, self.size = 0 if split == "train" else SAMPLES, inputs, masked, size

    def __len__(self) -> int:
        return SAMPLES if self.first == 0 else 11

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        words = torch.randint(0, WORDS, (LENGTH,), generator=draw)
        inputs = {self.inputs: torch.randn(self.size, generator=draw) if self.size else words}
        if self.masked:
            inputs["attention_mask"] = (torch.arange(LENGTH) < 6 + index % 6).long()
        return inputs, words


def samples(**more: Any) -> Callable[[str], Dataset]:
    return lambda split: Samples(split, **more)


def classes(output: Any, words: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, words[:, 0] % 2)


def next_words(output: Any, words: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def near(output: Any, words: Tensor) -> Tensor:
    state: Tensor = output.last_hidden_state
    return (state.mean(1) - (words[:, :1] % 2)).square().mean()


def right(output: Any, words: Tensor) -> Tensor:
    return (output.logits.argmax(-1) == words[:, 0] % 2).float().mean()


BERT = ModelSpec(
    build=_model(
        "BertForSequenceClassification",
        "BertConfig",
        vocab_size=WORDS,
        **SMALL,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    data=samples(masked=True),
    loss=classes,
    metrics={"right": right},
    layers="bert.encoder.layer",
)
GPT2 = ModelSpec(
    build=_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=WORDS,
        n_embd=16,
        n_layer=4,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    data=samples(masked=True),
    loss=next_words,
    layers="transformer.h",
)
VIT = ModelSpec(
    build=_model(
        "ViTForImageClassification",
        "ViTConfig",
        **SMALL,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    data=samples(inputs="pixel_values", size=(3, 16, 16)),
    loss=classes,
    layers="vit.layers",
)
T5 = ModelSpec(
    build=_model(
        "T5EncoderModel",
        "T5Config",
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=4,
        num_heads=2,
        dropout_rate=0.0,
    ),
    data=samples(masked=True),
    loss=near,
    layers="encoder.block",
)


def whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        WhisperConfig(
            d_model=16,
            encoder_layers=4,
            encoder_attention_heads=2,
            encoder_ffn_dim=32,
            num_mel_bins=8,
            max_source_positions=10,
            dropout=0.0,
        )
    )


WHISPER = ModelSpec(build=whisper, data=samples(inputs="input_features", size=(8, 20)), loss=near, layers="layers")
LLAMA = ModelSpec(
    build=_model("LlamaForCausalLM", "LlamaConfig", vocab_size=WORDS, **SMALL, num_key_value_heads=1),
    data=samples(masked=True),
    loss=next_words,
    layers="model.layers",
)
QWEN3 = ModelSpec(  # its configuration brings a plan of tensor parallelism
    build=_model("Qwen3ForCausalLM", "Qwen3Config", vocab_size=WORDS, **SMALL, num_key_value_heads=2, head_dim=8),
    data=samples(masked=True),
    loss=next_words,
    layers="model.layers",
)
MIXTRAL = ModelSpec(
    build=_model(
        "MixtralForCausalLM", "MixtralConfig", vocab_size=WORDS, **SMALL, num_key_value_heads=1, num_local_experts=4
    ),
    data=samples(masked=True),
    loss=next_words,
    layers="model.layers",
)


def only_a_head() -> nn.Module:
    model: nn.Module = BERT.build()
    model.requires_grad_(False)
    model.classifier.requires_grad_()  # type: ignore[union-attr]
    return model


HEAD = replace(BERT, build=only_a_head)
TIED_SGD = replace(
    GPT2,
    optimizer=lambda named, section: torch.optim.SGD([p for _, p in named], lr=section.lr, momentum=0.9),
)
