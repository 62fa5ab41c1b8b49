"""Plans what a node starts: torchrun, or train.py itself where one process is enough."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan import hardware
from torchtitan.config.schema import Config
from torchtitan.launch.addresses import way_to_head
from torchtitan.launch.node import Node, count_gpus
from torchtitan.launch.read_node import read_node
from torchtitan.models.families import load_run_or_exit
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class Start:
    """What to start here: a line for the user that sums it up, variables to set, arguments of Python."""

    understood: str
    settings: dict[str, str]
    arguments: list[str]
    node: Node | None = None  # None: --help or fake_backend, which need no other node
    config: Config | None = None


def plan_start(env: Mapping[str, str], options: list[str], gpus: int) -> Start:
    """Check the configuration and plan torchrun, or train.py itself if the run has a single process."""
    config = env.get("CONFIG_FILE") or "train_configs/debug_model.toml"
    if mode := env.get("COMM_MODE"):
        options = ["--comm.mode", mode, *options]
    train = ["train.py", "--job.config_file", config, *options]
    if {"--help", "-h"} & set(options):
        return Start("", {}, train)
    if second := next((option for option in options if re.match("--job.config[_-]file", option)), None):
        raise Refusal(f"{second}: the file is named by CONFIG_FILE=... here")
    shown_ranks = env.get("LOG_RANK") or "0"
    if not re.fullmatch("[0-9]+(,[0-9]+)*", shown_ranks):
        raise Refusal(f"LOG_RANK = {shown_ranks} is no list of ranks; use numbers with commas, as 0,1")
    fake = "fake_backend" in options or "--comm.mode=fake_backend" in options  # one process plays all ranks
    node = read_node(env, None if fake or only_prints(env) else gpus, alone=fake)

    # Checked without torch and before any rank exists, so each node shows a mistake at once, and only once.
    checked, _ = load_run_or_exit(train[1:], node.world_size, rank=0)

    settings = {} if fake else _allocator_and_threads(env, node) if gpus == 0 else _gpu_allocator(env)
    if fake or (node.world_size == 1 and node.restarts == 0):
        if fake or {"WORLD_SIZE", "RANK"} & set(env):  # a platform may have set these to count its containers
            settings |= {"WORLD_SIZE": str(node.world_size), "RANK": "0"}
        return Start(_understood(node, config, gpus), settings, train, None if fake else node, checked)
    own_address = None
    if node.num_nodes > 1:
        if (way := way_to_head(node.head)) is not None:
            own_address, interface = way
            settings |= {} if env.get("GLOO_SOCKET_IFNAME") else {"GLOO_SOCKET_IFNAME": interface}
        # torchrun's default prefix is the local rank: every node's lines would begin with rank 0.
        settings["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    if node.restarts:
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a new store for each restart: pytorch issue 135712
    if "PET_STANDALONE" in env:
        settings["PET_STANDALONE"] = "0"  # no option of torchrun overrides this variable
    return Start(
        _understood(node, config, gpus), settings, [*node.torchrun(shown_ranks, own_address), *train], node, checked
    )


def _allocator_and_threads(env: Mapping[str, str], node: Node) -> dict[str, str]:
    """On a CPU, malloc keeps freed memory (new pages cost 10% of a step, docs/performance.md); ranks share cores."""
    kept = {"MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_TOP_PAD_": 2**26}
    if node.num_processes > 1:  # otherwise every rank uses every core
        kept["OMP_NUM_THREADS"] = max(1, hardware.num_cores() // node.num_processes)
    return {name: str(value) for name, value in kept.items() if not env.get(name)}


def _gpu_allocator(env: Mapping[str, str]) -> dict[str, str]:
    """Expandable segments reduce fragmentation; a setting of the user's own stays."""
    if env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF"):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _understood(node: Node, config: str, gpus: int) -> str:
    nodes = ""
    if node.num_nodes > 1:
        rank = "" if node.rank is None else f"NODE_RANK={node.rank}, "
        nodes = f"NNODES={node.num_nodes}, {rank}" + (f"head {node.head}, " if node.head else "")
    read = f"; read {', '.join(node.read)}" if node.read else ""
    return f"training {config}, {nodes}NGPU={node.num_processes} (NVIDIA GPUs here: {gpus}){read}"


def only_prints(env: Mapping[str, str]) -> bool:
    return (env.get("DRY_RUN") or "0") != "0"


def gpus_here() -> int:
    return count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def python_here() -> str:
    """This Python, by a short path where it lies inside the current folder."""
    python = os.path.relpath(sys.executable)
    return sys.executable if python.startswith("..") else python


def begin_training(start: Start) -> None:
    """Replace this process by the planned command."""
    python = python_here()
    os.execve(python, [python, *start.arguments], {**os.environ, **start.settings})
