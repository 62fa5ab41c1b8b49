"""Runs Hugging Face's Trainer on random tokens, with peft if that is asked for: `trainer.py JSON`.

The last line printed is JSON. It runs in the peer's environment.
"""

import json
import resource
import sys
import tempfile
import time
from typing import Any

import torch


class Tokens(torch.utils.data.Dataset):
    """As many random sequences as the run needs."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked

    def __len__(self) -> int:
        return self.asked["batch"] * self.asked["steps"]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.asked["model"]["vocab_size"], (self.asked["seq_len"],), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Times(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    asked = json.loads(sys.argv[1])
    shape = asked["model"]
    torch.manual_seed(0)
    family, experts = "Llama", {}
    if "num_experts" in shape:
        family, experts = "Mixtral", {"experts_implementation": asked["experts"], "output_router_logits": True}
        experts |= {"num_local_experts": shape["num_experts"], "num_experts_per_tok": shape["experts_per_token"]}
        experts |= {"router_aux_loss_coef": shape["balance_rate"]}
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=shape["vocab_size"],
            hidden_size=shape["dim"],
            intermediate_size=shape["hidden_dim"],
            num_hidden_layers=shape["n_layers"],
            num_attention_heads=shape["n_heads"],
            num_key_value_heads=shape["n_kv_heads"],
            max_position_embeddings=asked["seq_len"],
            rope_theta=shape["rope_theta"],
            tie_word_embeddings=shape["tied_embeddings"],
            use_cache=False,
            attn_implementation="sdpa",
            **experts,
        )
    )
    if asked["lora"]:
        from peft import LoraConfig, get_peft_model

        linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=asked["lora"], lora_alpha=16, target_modules=linear))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=asked["batch"],
            max_steps=asked["steps"],
            learning_rate=asked["lr"],
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused",
            weight_decay=0.1,
            max_grad_norm=1.0,
            torch_compile=asked["compile"],
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=Tokens(asked), callbacks=[Times()]).train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_reserved() / 2**30
    seconds = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    print(json.dumps({"step_seconds": seconds, "memory_gib": memory}))


if __name__ == "__main__":
    main()
