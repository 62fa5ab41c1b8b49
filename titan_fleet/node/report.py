"""What a machine is and has, without torch: devices by nvidia-smi, memory and load by the system."""

import os
import platform
import shutil
import socket
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from titan_fleet.node.messages import PROTOCOL, Device, ReportAnswer
from torchtitan.launch.addresses import own_addresses
from torchtitan.launch.bounded import query_gpus
from torchtitan.launch.node import num_cores
from torchtitan.refusal import Refusal
from torchtitan.root import VERSION

_SMI_SECONDS = 20
_ASKED = "name,memory.total,memory.used,utilization.gpu"


def report(id: int, home: Path, git: list[str]) -> ReportAnswer:
    total, used = _memory()
    try:
        torch: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return ReportAnswer(
        id=id,
        node=socket.gethostname(),
        version=VERSION,
        protocol=PROTOCOL,
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch,
        devices=devices(),
        cores=num_cores(),
        load=os.getloadavg()[0],
        memory_bytes=total,
        used_bytes=used,
        free_bytes=shutil.disk_usage(home).free,
        addresses=own_addresses(),
        git=git,
        home=str(home),
    )


def devices() -> list[Device]:
    """NVIDIA's GPUs. A driver that hangs shows none; starting a run then says so."""
    try:
        smi = query_gpus(_ASKED, _SMI_SECONDS)
    except (OSError, Refusal):
        return []
    return parse_devices(smi.stdout) if smi.returncode == 0 else []


def parse_devices(csv: str) -> list[Device]:
    """nvidia-smi's lines: name, MiB, MiB, percent. A slice of a GPU has no utilisation."""
    found = []
    for line in csv.splitlines():
        with suppress(ValueError):
            name, total, used, percent = (cell.strip() for cell in line.rsplit(",", 3))
            share = min(1.0, int(percent) / 100) if percent.isdecimal() else None
            sizes = {"memory_bytes": int(total) * 2**20, "used_bytes": int(used) * 2**20}
            found.append(Device(name=name, kind="cuda", utilisation=share, **sizes))
    return found


def _memory() -> tuple[int, int | None]:
    """All memory, and what is in use where the system tells."""
    with suppress(OSError, KeyError):
        lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {name: int(value.split()[0]) for name, _, value in lines}
        return kib["MemTotal"] * 1024, (kib["MemTotal"] - kib["MemAvailable"]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
