"""Gathers what a node reports about itself: code, configuration, versions, addresses, GPUs. Does not load torch."""

import hashlib
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan import hardware
from torchtitan.config.names import flat
from torchtitan.config.schema import Config
from torchtitan.launch.addresses import gloo_address, nccl_interfaces, own_addresses
from torchtitan.launch.bounded import query_gpus
from torchtitan.launch.node import num_cores
from torchtitan.root import PACKAGE, PACKAGES, ROOT

_GPU_FIELDS = ("uuid", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "driver_version")

Facts = dict[str, Any]


def gather(launch: Mapping[str, Any], config: Config, env: Mapping[str, str], toward: str | None, gpus: int) -> Facts:
    """`launch`: settings that all nodes must share. `toward`: this node's own address on the route to the head."""
    addresses = own_addresses()
    problems = []
    gloo = toward or hardware.loopback()
    for look in (nccl_interfaces, gloo_address):
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
        "code": code_digests(),
        # The path of the TOML file may differ between nodes; its values may not.
        "config": {k: json.dumps(v) for k, v in flat(config.model_dump(exclude={"job": {"config_file"}})).items()},
        "versions": versions(devices),
        "addresses": addresses,
        "address": gloo,
        "toward_head": toward,
        "devices": devices,
        "cores": num_cores(),
        "shm_gib": shutil.disk_usage(shm).total / 2**30 if shm.is_dir() else None,
        "problems": problems,
    }


def code_digests() -> dict[str, str]:
    """A digest of each Python file that training may run. Git cannot tell, for an image has none."""
    paths = (path for package in PACKAGES for path in sorted(package.rglob("*.py")))
    files = {str(path.relative_to(PACKAGE.parent)): path for path in paths}
    files["train.py"] = ROOT / "train.py"
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}


def digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def versions(devices: Sequence[Facts]) -> dict[str, str]:
    """Versions of Python, of the packages in requirements.txt, of NCCL and of the NVIDIA driver."""
    names = re.findall(r"^[\w.-]+", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    distributions = [(d.metadata["Name"], d.version) for d in metadata.distributions()]
    installed = {re.sub("[-_.]+", "-", name).lower(): version for name, version in distributions if name}
    found = {name: version for name, version in installed.items() if name in names or name.startswith("nvidia-nccl")}
    driver = {device["driver_version"] for device in devices if "driver_version" in device}
    return {"Python": platform.python_version(), **found, **({"NVIDIA driver": driver.pop()} if driver else {})}


def check_gpus() -> list[Facts]:
    """Test this node's GPUs by nvidia-smi and a short computation; each GPU comes with a list of its problems."""
    program = [sys.executable, "-m", "torchtitan.launch.preflight.devices"]
    try:
        (asked := query_gpus(",".join(_GPU_FIELDS), 60)).check_returncode()
        listed = asked.stdout.splitlines()
        computed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
        if computed.returncode:
            raise OSError((computed.stderr.strip().splitlines() or ["the computation that tests them was killed"])[-1])
        checks = json.loads(computed.stdout)
        if not checks:
            raise OSError("torch sees none; install a CUDA build of torch that fits the driver")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [{"problems": [f"nvidia-smi shows GPUs, but they cannot be used: {error}"]}]
    return judge_gpus([dict(zip(_GPU_FIELDS, line.split(", "), strict=True)) for line in listed], checks)


def judge_gpus(listed: Sequence[Facts], checks: Sequence[Facts]) -> list[Facts]:
    """Merge what nvidia-smi lists with what torch computed, for each GPU that torch sees."""
    by_uuid = {device["uuid"].removeprefix("GPU-"): device for device in listed}
    judged = []
    for i, check in enumerate(checks):
        device, problems = by_uuid.get(check["uuid"], {}), []
        # nvidia-smi prints [N/A] or [Not Supported] where a GPU lacks a field.
        errors = device.get("ecc.errors.uncorrected.volatile.total", "0")
        if errors.isdecimal() and errors != "0":
            problems.append(f"GPU {i} has {errors} uncorrected memory errors; reset it or leave it out")
        if not check["exact"]:
            problems.append(f"GPU {i} multiplies matrices wrongly; leave it out")
        judged.append(device | check | {"problems": problems})
    return judged
