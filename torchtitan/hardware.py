"""Describes the machine: this process's rank, its device, and the device's peak speed. Only functions import torch.

Peaks are NVIDIA's figures for dense bf16, in TFLOP/s. A device that is not in the table is measured, never guessed.
"""

import ctypes
import functools
import os
import re
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    import torch

# The key must occur in the device's name as whole words. The first match wins, so "H100 NVL" stands before "H100".
PEAK_BF16_TFLOPS: dict[str, float] = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}
_DEVICE_FILES = Path("/dev")


@dataclass(frozen=True)
class Place:
    """This process's rank in the run, from torchrun's variables. A process started alone is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int


EXIT_UNFINISHED = 75  # "try again" in sysexits.h: the run is unfinished, and the same command resumes it
_PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def read_place() -> Place:
    given = {name: os.environ.get(name, default) for name, default in _PLACE.items()}
    for name, value in given.items():
        if not value.isdecimal():
            raise SystemExit(f"error: {name} = {value!r} is no number; unset it, or start the run with torchrun")
    return Place(*map(int, given.values()))


def has_launcher() -> bool:
    """Whether torchrun started this rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Let Linux end this rank when the torchrun that started it is gone: nobody would watch the ranks."""
    if sys.platform == "linux" and has_launcher():
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_restarts(world_size: int) -> None:
    """Refuse `--max_restarts` if torchrun's settings would make every restart fail."""
    restarts, is_shared = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "USE_AGENT_STORE"))
    # A shared store keeps the addresses of dead ranks: https://github.com/pytorch/pytorch/issues/135712
    if world_size > 1 and int(restarts or 0) > 0 and is_shared == "True":
        raise Refusal(
            f"torchrun's --max_restarts = {restarts} could not bring this run back: after a restart the store in which "
            f"ranks find each other would still hold the addresses of dead ranks; set "
            f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv_backend=c10d, or start the run with "
            f"MAX_RESTARTS={restarts} ./run_llama_train.sh, which sets both"
        )


def pick_device(local_rank: int) -> "torch.device":
    """Return this rank's GPU, or the CPU if the machine has none. Refuse a GPU that torch cannot use."""
    import torch

    if not torch.cuda.is_available():
        names_one = re.match(" *[0-9GM]", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))  # not empty, -1 or NoDevFiles
        if list(_DEVICE_FILES.glob("nvidia[0-9]*")) and names_one:
            raise Refusal(
                f"this machine has NVIDIA GPUs, but torch {torch.__version__} cannot use them; install a CUDA build of "
                f"torch that fits the driver, or set CUDA_VISIBLE_DEVICES to an empty value to train on the CPU"
            )
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise Refusal(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
            f"start at most that many ranks on this machine (NGPU={torch.cuda.device_count()})"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def loopback() -> str:
    """This machine's address for itself, which is IPv6 where it has no other."""
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def keep_to_own_cores(place: Place, device: "torch.device") -> None:
    """Pin each rank to its own cores if ranks share a CPU. A process that somebody else has pinned stays as it is."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type != "cpu" or ranks == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if each and os.sched_getaffinity(os.getppid()) == set(cores):
        os.sched_setaffinity(0, cores[place.local_rank * each : (place.local_rank + 1) * each])


@dataclass(frozen=True)
class Peak:
    """The FLOP/s that MFU divides by, and where the figure comes from."""

    flops: float
    origin: str  # "data sheet" or "measured"
    spread: float = 0.0  # by how much the two best rounds of the measurement differ


def find_peak(device: "torch.device", dtype: "torch.dtype") -> Peak:
    """Return the table's figure for bf16 on a known GPU. Measure a large matrix product on anything else."""
    import torch

    is_listed = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if is_listed and (tflops := tflops_by_name(torch.cuda.get_device_name(device))):
        return Peak(tflops * 1e12, "data sheet")
    return _measure_peak(device, dtype)


def tflops_by_name(name: str) -> float | None:
    """What the table says of a GPU, by whole words: an L40 is no L4. Of a MIG slice it says nothing."""
    words = name.replace("-", " ")
    return next((tf for known, tf in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{known}\b(?!.* MIG )", words)), None)


@functools.cache
def _measure_peak(device: "torch.device", dtype: "torch.dtype") -> Peak:
    """Measure until two rounds agree within 5 %, for on a busy machine one round may miss the full speed.

    A CPU without instructions for the type takes seconds for a large product, and is no faster at it.
    """
    rounds: list[float] = []
    size = 256 if device.type == "cpu" and measure_matmul_flops(device, dtype, 0.0, 256) < 1e10 else None
    while len(rounds) < 2 or (rounds[1] < 0.95 * rounds[0] and len(rounds) < 8):
        rounds = sorted([*rounds, measure_matmul_flops(device, dtype, size=size)], reverse=True)
    return Peak(rounds[0], "measured", 1 - rounds[1] / rounds[0])


def measure_matmul_flops(
    device: "torch.device", dtype: "torch.dtype", seconds: float = 0.1, size: int | None = None
) -> float:
    """Multiply square matrices for about `seconds`, and return the FLOP/s of the fastest product.

    On a CPU, time is what this process had of its cores, so that other programs do not lower the result.
    """
    import torch

    n = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def timed() -> float:
        on_gpu = device.type == "cuda"
        start = time.perf_counter() if on_gpu else time.process_time() / torch.get_num_threads()
        torch.mm(a, b, out=out)
        if on_gpu:
            torch.cuda.synchronize(device)
        return (time.perf_counter() if on_gpu else time.process_time() / torch.get_num_threads()) - start

    timed()
    best, end = timed(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, timed())
    return 2 * n**3 / best


@functools.cache
def advise_type(device: "torch.device", used: str) -> str:
    """Return advice for a GPU that only emulates bfloat16, and a CPU that multiplies the other dtype faster, or "".

    The ratio of the two speeds differs tenfold between CPUs. The measurement uses small products, because on a CPU
    without bfloat16 instructions one product of 1024 rows takes over a second.
    """
    import torch

    if device.type == "cuda" and used == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU only emulates bfloat16: --training.mixed_precision_param float16"
    if device.type != "cpu" or used == "float16":
        return ""
    other = "float32" if used == "bfloat16" else "bfloat16"
    speed, others = (measure_matmul_flops(device, getattr(torch, t), seconds=0.05, size=256) for t in (used, other))
    gain = others / speed
    return f"{other} multiplies {gain:.1f} times as fast here: --training.mixed_precision_param {other}" * (gain >= 1.5)


def describe_device(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{torch.cuda.get_device_name(device)} ({gib:.0f} GiB)"
    return f"CPU ({torch.get_num_threads()} threads)"


def peak_memory_gib(device: "torch.device") -> float:
    """Return the most memory held so far: reserved by the allocator on a GPU, resident in the process on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS gives ru_maxrss in bytes, other systems in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def use_deterministic_kernels(warn_only: bool) -> None:
    """Have torch refuse (or warn of) kernels whose result depends on timing. Call before the first matrix product."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False
