"""Trains LitGPT's model with its loss and optimizer on random tokens: `lit.py JSON`. The last line printed is JSON.

It runs in the peer's environment. The loop is LitGPT's pretraining loop without data module and checkpoints.
"""

import json
import resource
import sys
import time

import torch


def main() -> None:
    import lightning
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer

    asked = json.loads(sys.argv[1])
    shape = asked["model"]
    fabric = lightning.Fabric(devices=1, precision="bf16-mixed")
    fabric.seed_everything(0)
    with fabric.init_module():
        model = GPT(
            Config(
                block_size=asked["seq_len"],
                vocab_size=shape["vocab_size"],
                padded_vocab_size=shape["vocab_size"],
                n_layer=shape["n_layers"],
                n_head=shape["n_heads"],
                n_query_groups=shape["n_kv_heads"],
                n_embd=shape["dim"],
                intermediate_size=shape["hidden_dim"],
                rotary_percentage=1.0,
                rope_base=int(shape["rope_theta"]),
                parallel_residual=False,
                bias=False,
                norm_class_name="RMSNorm",
                mlp_class_name="LLaMAMLP",
            )
        )
    if shape["tied_embeddings"]:
        model.transformer.wte.weight = model.lm_head.weight
    model = fabric.setup(torch.compile(model) if asked["compile"] else model)
    optimizer = fabric.setup_optimizers(
        instantiate_torch_optimizer(
            "AdamW", model.parameters(), lr=asked["lr"], weight_decay=0.1, betas=(0.9, 0.95), fused=True
        )
    )
    ends = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(asked["steps"]):
        size = asked["batch"], asked["seq_len"] + 1
        tokens = fabric.to_device(torch.randint(shape["vocab_size"], size, generator=generator))
        loss = chunked_cross_entropy(model(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as LitGPT's loop reads it for the log
        ends.append(time.perf_counter())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_reserved() / 2**30
    seconds = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    print(json.dumps({"step_seconds": seconds, "memory_gib": memory}))


if __name__ == "__main__":
    main()
