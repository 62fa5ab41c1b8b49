"""What a node says of itself before training, and what must not differ between the nodes of a run; without torch."""

import hashlib
import json
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan import hardware
from torchtitan.config.load import flat
from torchtitan.config.schema import Config
from torchtitan.preflight import network

ROOT = Path(__file__).resolve().parents[2]
CLOCK_SECONDS = 5  # torchrun's c10d rendezvous takes a node for dead when its heartbeat, sent every 5 s, looks 15 s old
_SLOW = 0.7  # of the median
_TAKEN_MIB = 2048  # more than drivers and displays take
_MOST_LINES = 6  # of one kind of difference
_GPU_FIELDS = ("uuid", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "driver_version")

Facts = dict[str, Any]


def gather(launch: Mapping[str, Any], config: Config, env: Mapping[str, str], toward: str | None, gpus: int) -> Facts:
    """`launch`: what all nodes must have been told alike; `toward`: this node's address on the way to the head."""
    addresses = network.own_addresses()
    problems = []
    gloo = toward or "127.0.0.1"
    for look in (network.nccl_interfaces, network.gloo_address):
        try:
            gloo = look(env, addresses) or gloo
        except ValueError as error:
            problems.append(str(error))
    devices = check_gpus() if gpus else []
    problems += [problem for device in devices for problem in device.pop("problems")]
    shm = Path("/dev/shm")
    return {
        "host": socket.gethostname(),
        "launch": dict(launch),
        "code": code_digests(ROOT),
        # Where the same file lies may differ.
        "config": {k: json.dumps(v) for k, v in flat(config.model_dump(exclude={"job": {"config_file"}})).items()},
        "versions": versions(devices),
        "addresses": addresses,
        "address": gloo,
        "toward_head": toward,
        "devices": devices,
        "cores": hardware.num_cores(),
        "shm_gib": shutil.disk_usage(shm).total / 2**30 if shm.is_dir() else None,
        "problems": problems,
    }


def code_digests(root: Path) -> dict[str, str]:
    """A digest of each Python file that training may run; an image has no git to ask."""
    files = sorted([*root.glob("*.py"), *root.glob("torchtitan/**/*.py")])
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def versions(devices: Sequence[Facts]) -> dict[str, str]:
    """Versions of Python, of the packages that requirements.txt pins, of NCCL, and of the driver."""
    names = re.findall(r"^[\w.-]+", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    distributions = [(d.metadata["Name"], d.version) for d in metadata.distributions()]
    installed = {re.sub("[-_.]+", "-", name).lower(): version for name, version in distributions if name}
    found = {name: version for name, version in installed.items() if name in names or name.startswith("nvidia-nccl")}
    driver = {device["driver_version"] for device in devices if "driver_version" in device}
    return {"Python": platform.python_version(), **found, **({"NVIDIA driver": driver.pop()} if driver else {})}


def check_gpus() -> list[Facts]:
    """The GPUs of this node as nvidia-smi and a short computation find them, each with its problems."""
    smi = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    program = [sys.executable, "-c", "from torchtitan import hardware; hardware.print_device_checks()"]
    try:
        listed = subprocess.run(smi, capture_output=True, text=True, timeout=60, check=True).stdout
        computed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
        if computed.returncode:
            raise OSError((computed.stderr.strip().splitlines() or ["its computation was killed"])[-1])
        checks = json.loads(computed.stdout)
        if not checks:
            raise OSError("torch sees none; install a CUDA build of torch that fits the driver")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [{"problems": [f"nvidia-smi shows GPUs, but they cannot be used: {error}"]}]
    return judge_gpus([dict(zip(_GPU_FIELDS, line.split(", "), strict=True)) for line in listed.splitlines()], checks)


def judge_gpus(listed: Sequence[Facts], checks: Sequence[Facts]) -> list[Facts]:
    """What nvidia-smi lists and what torch has computed, of the GPUs that torch sees, as one."""
    by_uuid = {device["uuid"].removeprefix("GPU-"): device for device in listed}
    judged = []
    for i, check in enumerate(checks):
        device, problems = by_uuid.get(check["uuid"], {}), []
        # A field that a GPU does not have is [N/A] or [Not Supported].
        errors = device.get("ecc.errors.uncorrected.volatile.total", "0")
        if errors.isdecimal() and errors != "0":
            problems.append(f"GPU {i} has {errors} uncorrected memory errors; reset it or leave it out")
        if not check["exact"]:
            problems.append(f"GPU {i} multiplies matrices wrongly; leave it out")
        judged.append(device | check | {"problems": problems})
    return judged


def differences(nodes: Sequence[Facts]) -> list[str]:
    """Each node's own problems, then what must be alike on all nodes and is not: who has what, and what to do."""
    found = [f"{name_of(nodes, i)}: {problem}" for i, facts in enumerate(nodes) for problem in facts["problems"]]
    found += _differing(nodes, "launch", "tell all nodes the same")
    found += _differing(nodes, "code", "give all nodes the same checkout or image", shows_values=False)
    found += _differing(nodes, "config", "start all nodes with the same file and options")
    return found + _differing(nodes, "versions", "install the same on all nodes")


def gpu_notes(nodes: Sequence[Facts]) -> list[str]:
    """GPUs at less than 0.7 of the median of their kind, which hold up all others, and those with memory taken."""
    speeds, lines = defaultdict(list), []
    for rank, facts in enumerate(nodes):
        for i, device in enumerate(facts["devices"]):
            if "tflops" in device:
                speeds[device.get("name")].append((device["tflops"], rank, i))
            used = device.get("memory.used", "")
            if used.isdecimal() and int(used) > _TAKEN_MIB:
                lines.append(f"{name_of(nodes, rank)}: GPU {i} has {used} MiB in use by something else")
    for kind, of_kind in speeds.items():
        median = statistics.median(tflops for tflops, _, _ in of_kind)
        lines += [
            f"{name_of(nodes, rank)}: GPU {i} computes at {tflops:.0f} TFLOP/s, the median {kind} here at {median:.0f}"
            for tflops, rank, i in of_kind
            if tflops < _SLOW * median
        ]
    return lines


def _differing(nodes: Sequence[Facts], kind: str, fix: str, shows_values: bool = True) -> list[str]:
    lines = []
    for key in sorted({key for facts in nodes for key in facts[kind]}):
        holders = defaultdict(list)
        for i, facts in enumerate(nodes):
            holders[facts[kind].get(key)].append(i)
        if len(holders) == 1:
            continue
        words = list(holders) if shows_values else ["one", *["another"] * (len(holders) - 1)]
        shown = [
            f"{word or 'absent'} on {_holders(nodes, of)}" for word, of in zip(words, holders.values(), strict=True)
        ]
        lines.append(f"{key}: {', '.join(shown)}; {fix}")
    more = [f"and {len(lines) - _MOST_LINES} more of this kind"] if len(lines) > _MOST_LINES else []
    return lines[:_MOST_LINES] + more


def _holders(nodes: Sequence[Facts], ranks: Sequence[int]) -> str:
    return name_of(nodes, ranks[0]) if len(ranks) == 1 else in_short(ranks)


def in_short(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def name_of(nodes: Sequence[Facts], rank: int) -> str:
    return f"node {rank} ({nodes[rank]['host']})"
