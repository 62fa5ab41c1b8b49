"""Compiles the update of moments in bfloat16 for an H100, on a machine without a GPU: errors show, speed does not.

Inductor writes Triton code for a CPU's tensors as it does for a GPU's. A driver that launches nothing stands in for
CUDA's, so the update's numbers mean nothing.
"""

import sys
from types import SimpleNamespace

import torch
import torch._inductor.config as inductor
import triton
from torch import nn
from torch._dynamo.utils import counters
from triton.backends.compiler import GPUTarget

from torchtitan.config.schema import Compile, Optimizer
from torchtitan.training.optimizer.apply import apply_update
from torchtitan.training.optimizer.build import build_optimizer

H100 = GPUTarget("cuda", 90, 32)
SHAPES = [(64, 32), (96, 32), (32,), (48,), (40, 24), (8, 6, 3), (1, 32), (7, 5), (1,), (33, 1), (3000, 64)]
compiled = []


def use_a_driver_that_launches_nothing() -> None:
    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    utils = SimpleNamespace(load_binary=lambda *_: (None, None, 0, 0, 1024), get_device_properties=lambda _: properties)
    driver = SimpleNamespace(
        utils=utils,
        launcher_cls=lambda *_: lambda *_values, **_options: None,
        get_current_target=lambda: H100,
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cpu,
    )
    triton.runtime.driver.set_active(driver)
    real = triton.compile

    def for_h100(src: object, target: object = None, options: dict[str, object] | None = None, **_: object) -> object:
        known = {key: value for key, value in (options or {}).items() if key in ("num_warps", "num_stages", "num_ctas")}
        made = real(src, target=H100, options=known)
        compiled.append(made.asm["ptx"])
        return made

    triton.compile = for_h100
    inductor.cpu_backend = "triton"
    inductor.compile_threads = 1
    inductor.force_disable_caches = True


def main() -> None:
    use_a_driver_that_launches_nothing()
    gradients = getattr(torch, sys.argv[1])
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    named = [(str(number), weight) for number, weight in enumerate(weights)]
    optimizer = build_optimizer(named, Optimizer(moments_dtype="bfloat16"), Compile(enable=True))
    for _ in range(2):
        for number, weight in enumerate(weights):
            weight.grad_dtype, weight.grad = None, torch.zeros_like(weight, dtype=gradients)  # type: ignore[attr-defined]
            if number % 4 == 0 and weight.ndim == 2:  # as a shard of columns, it does not become one dim
                weight.grad = weight.grad.T.contiguous().T
        apply_update(optimizer, 1e-3, torch.tensor(1.0))
    print("kernels", len(compiled), "graphs", counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
