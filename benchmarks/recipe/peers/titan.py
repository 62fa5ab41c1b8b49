"""Runs torchtitan 0.2.2's Trainer on random tokens: `titan.py JSON`. The last line printed is JSON.

It runs in the peer's environment. torchtitan has no option for moments in bfloat16. If its float32 states would fill
the GPU, it trains in bfloat16 throughout. If it does not fit without recomputation, it recomputes as little as it can.
The JSON says which settings it took.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

RECOMPUTE = ("none", "selective", "full")  # fastest first
STATE_BYTES = 16  # a parameter in float32, its gradient and AdamW's two moments


def main() -> None:
    asked = json.loads(sys.argv[1])
    if "recompute" in asked:
        print(json.dumps(train(asked)))
        return
    for recompute in RECOMPUTE:  # each in its own process: after a failure not all memory is returned
        command = [sys.executable, __file__, json.dumps(asked | {"recompute": recompute})]
        env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ  # as in torchtitan's run_train.sh
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if "OutOfMemoryError" not in done.stderr:
            break
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    raise SystemExit(done.returncode)


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Train. Return the seconds of each step but the first, the memory, and the settings.

    Steps between two logged ones share their mean.
    """
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    from torchtitan.config import ConfigManager
    from torchtitan.models import llama3

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    shape, recompute = asked["model"], asked["recompute"]
    room = torch.cuda.get_device_properties(0).total_memory
    dtype = "float32" if STATE_BYTES * asked["parameters"] < 0.8 * room else "bfloat16"

    class Model(Transformer):
        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            if shape["tied_embeddings"]:  # torchtitan's Llama has no option for it
                self.output.weight = self.tok_embeddings.weight
            super().init_weights(buffer_device)

    class Timed(Trainer):
        def train_step(self, data_iterator: Iterator[Any]) -> None:
            super().train_step(data_iterator)
            if self.metrics_processor.should_log(self.step):  # logging has waited for the GPU
                ends.append((self.step, time.perf_counter()))

    class Tokens:
        def __init__(self, **_: Any) -> None:
            self.generator = torch.Generator().manual_seed(0)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                size = asked["batch"], asked["seq_len"] + 1
                tokens = torch.randint(shape["vocab_size"], size, generator=self.generator)
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    arguments = TransformerModelArgs(
        dim=shape["dim"],
        n_layers=shape["n_layers"],
        n_heads=shape["n_heads"],
        n_kv_heads=shape["n_kv_heads"],
        vocab_size=shape["vocab_size"],
        rope_theta=shape["rope_theta"],
        ffn_dim_multiplier=0.1,  # rounded up to the multiple below, which is the hidden size itself
        multiple_of=shape["hidden_dim"],
    )
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        model_cls=Model,
        model_args={"peer": arguments},
        build_tokenizer_fn=None,
        build_dataloader_fn=Tokens,
    )
    register_train_spec("peer", spec)
    ends: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "job.dump_folder": folder,
            "model.name": "peer",
            "model.flavor": "peer",
            "optimizer.lr": asked["lr"],
            "lr_scheduler.warmup_steps": 2,
            "training.local_batch_size": asked["batch"],
            "training.seq_len": asked["seq_len"],
            "training.steps": asked["steps"],
            "training.dtype": dtype,
            "activation_checkpoint.mode": recompute,
            "activation_checkpoint.selective_ac_option": "op",
            "metrics.log_freq": asked["log_freq"],
        }
        flags = ["--compile.enable"]
        if asked["float8"]:
            options["model.converters"] = "quantize.linear.float8"
            options["quantize.linear.float8.filter_fqns"] = ",".join(asked["float8"]["filter_fqns"])
            if asked["float8"]["recipe_name"]:
                options["quantize.linear.float8.recipe_name"] = asked["float8"]["recipe_name"]
            flags += [f"--quantize.linear.float8.{name}" for name, value in asked["float8"].items() if value is True]
        given = [f"--{name}={value}" for name, value in options.items()]
        trainer = Timed(ConfigManager().parse_args([*given, *flags]))
        trainer.train()
        trainer.close()
        torch.distributed.destroy_process_group()
    return {
        "step_seconds": [(b - a) / (n - m) for (m, a), (n, b) in pairwise(ends) for _ in range(n - m)],
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "dtype": dtype,
        "setting": f"states in {dtype}, activation_checkpoint.mode {recompute}",
    }


if __name__ == "__main__":
    main()
