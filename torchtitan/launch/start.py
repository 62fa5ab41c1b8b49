"""Starts this node's part of a run: reads what the launcher set, prints the command, and becomes that command.

Nothing else here starts a run of several nodes. run_llama_train.sh comes here through tools/start.py.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.config.load import ConfigError, load_config
from torchtitan.config.schema import Config
from torchtitan.launch.addresses import is_tunnel, way_to_head
from torchtitan.launch.bounded import nvidia_smi
from torchtitan.launch.node import KEEP_FREED_MEMORY, SLEEP_SOON, Node, is_shared, loopback_settings, num_cores
from torchtitan.launch.variables import read_node
from torchtitan.models.families import load_run_or_exit, other_program
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

_SMI_SECONDS = 60  # the first call on a machine is slow


@dataclass(frozen=True)
class NodeStart:
    """What this node will start."""

    understood: str  # one line for the user: what the launcher's variables were taken to mean
    settings: dict[str, str]  # environment variables to add
    arguments: list[str]  # of Python
    node: Node | None = None  # None: the run needs no other node and no device (--help, a dry run)
    config: Config | None = None


def plan_start(env: Mapping[str, str], options: list[str], gpus: int, on_terminal: bool = False) -> NodeStart:
    """Check the configuration, then plan torchrun, or the program itself where one process is enough.

    `on_terminal`: a person is watching.
    """
    config = env.get("CONFIG_FILE") or "train_configs/debug_model.toml"
    if mode := env.get("COMM_MODE"):
        options = ["--comm.mode", mode, *options]
    train_py = "train.py" if Path.cwd() == ROOT else str(ROOT / "train.py")
    train = [train_py, "--job.config_file", config, *options]
    if {"--help", "-h"} & set(options):
        return NodeStart("", {}, train)
    if second := next((option for option in options if re.match("--job.config[_-]file", option)), None):
        raise Refusal(f"{second} is given, but this script reads the file from CONFIG_FILE; use CONFIG_FILE=FILE.toml")
    shown_ranks = _shown_ranks(env)
    fake = "fake_backend" in options or "--comm.mode=fake_backend" in options  # one process plays all ranks
    node = read_node(env, None if fake or only_prints(env) else gpus, alone=fake)

    # Checked without torch and before any rank exists, so that each node shows a mistake once and at once.
    is_alone = node.world_size == 1 and node.restarts == 0
    if is_alone and not only_prints(env):  # train.py checks the model: a file of the user's own would load torch twice
        try:
            checked = load_config(train[1:], 1)
        except ConfigError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None
    else:
        checked, _ = load_run_or_exit(train[1:], node.world_size, rank=0)
    if verb := other_program(checked):
        train = ["-m", "torchtitan", verb, "--", *train[1:]]

    settings = {} if fake else _allocator_and_threads(env, node) if gpus == 0 else _gpu_allocator(env)
    understood = _understood(node, f"training {config}", gpus)
    if fake or is_alone:
        if fake or {"WORLD_SIZE", "RANK"} & set(env):  # some platforms number their containers with these names
            settings |= {"WORLD_SIZE": str(node.world_size), "RANK": "0"}
        return NodeStart(understood, settings, train, None if fake else node, checked)
    meeting, own_address = _settings_to_meet(env, node)
    arguments = [*node.torchrun(shown_ranks, own_address, on_terminal), *train]
    return NodeStart(understood, settings | meeting, arguments, node, checked)


def plan_program(env: Mapping[str, str], what: str, program: list[str], gpus: int) -> NodeStart:
    """Plan the ranks of a program other than train.py, on the nodes of a training run."""
    node = replace(read_node(env, gpus), restarts=0)
    settings = _allocator_and_threads(env, node) if gpus == 0 else _gpu_allocator(env)
    if node.world_size > 1:
        meeting, own_address = _settings_to_meet(env, node)
        settings, program = settings | meeting, [*node.torchrun(_shown_ranks(env), own_address), *program]
    return NodeStart(_understood(node, what, gpus), settings, program, node)


def _shown_ranks(env: Mapping[str, str]) -> str:
    ranks = env.get("LOG_RANK") or "0"
    if not re.fullmatch("[0-9]+(,[0-9]+)*", ranks):
        raise Refusal(f"LOG_RANK = {ranks} is not a list of ranks; use numbers separated by commas, such as 0,1")
    return ranks


def _settings_to_meet(env: Mapping[str, str], node: Node) -> tuple[dict[str, str], str | None]:
    """Variables for torchrun and gloo, and this node's own address if others could not find it by its host name."""
    settings: dict[str, str] = {}
    own_address = None
    if node.num_nodes > 1:
        if (way := way_to_head(node.head)) is not None:
            own_address, interface = way
            libraries = ("GLOO", "NCCL") if is_tunnel(interface) else ("GLOO",)  # NCCL finds other interfaces itself
            names = [f"{library}_SOCKET_IFNAME" for library in libraries]
            settings |= {name: interface for name in names if not env.get(name)}
        # By default torchrun prefixes lines with a number that begins at 0 on each node.
        settings["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    elif not env.get("GLOO_SOCKET_IFNAME"):
        settings |= loopback_settings()
    if node.restarts:
        # Each attempt needs a store of its own: https://github.com/pytorch/pytorch/issues/135712
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if "PET_STANDALONE" in env:
        settings["PET_STANDALONE"] = "0"  # no command-line option could override it
    return settings, own_address


def _allocator_and_threads(env: Mapping[str, str], node: Node) -> dict[str, str]:
    kept = KEEP_FREED_MEMORY | (SLEEP_SOON if is_shared() and not env.get("OMP_WAIT_POLICY") else {})
    if node.num_processes > 1:  # otherwise every rank would take every core
        kept["OMP_NUM_THREADS"] = str(max(1, num_cores() // node.num_processes))
    return {name: value for name, value in kept.items() if not env.get(name)}


def _gpu_allocator(env: Mapping[str, str]) -> dict[str, str]:
    """Segments that grow in place fragment less. A setting of the user's own stays."""
    if env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF"):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _understood(node: Node, what: str, gpus: int) -> str:
    nodes = ""
    if node.num_nodes > 1:
        rank = "" if node.rank is None else f"NODE_RANK={node.rank}, "
        nodes = f"NNODES={node.num_nodes}, {rank}" + (f"head {node.head}, " if node.head else "")
    read = f"; read {', '.join(node.read)}" if node.read else ""
    return f"{what}, {nodes}NGPU={node.num_processes} (NVIDIA GPUs here: {gpus}){read}"


def only_prints(env: Mapping[str, str]) -> bool:
    return (env.get("PRINT_ONLY") or env.get("DRY_RUN") or "0") != "0"


def count_gpus(visible: str | None) -> int:
    """NVIDIA GPUs of this machine, limited to `visible` (CUDA_VISIBLE_DEVICES) where it is set."""
    try:
        listed = nvidia_smi("-L", seconds=_SMI_SECONDS).stdout
    except OSError:
        return 0
    gpus = len(re.findall("^GPU ", listed, re.MULTILINE))
    if gpus and visible is not None:
        return len(re.findall("(?:^|,) *[0-9GM]", visible))  # an index, GPU-... or MIG-...
    return gpus


def become(
    plan: Callable[[int], NodeStart], is_ready: Callable[[NodeStart, int], bool] = lambda start, gpus: True
) -> None:
    """Print the command that is planned for so many GPUs, and become it if this node is ready."""
    try:
        gpus = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        start = plan(gpus)
        python = os.path.relpath(sys.executable)
        python = sys.executable if python.startswith("..") else python
        if start.understood:
            settings = [f"{name}={shlex.quote(value)}" for name, value in start.settings.items()]
            print(start.understood)
            print(" ".join([*settings, shlex.join([python, *start.arguments])]), flush=True)
        if only_prints(os.environ):
            return
        if not is_ready(start, gpus):
            raise SystemExit(1)
    except Refusal as error:
        print(f"run_llama_train.sh: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.execve(python, [python, *start.arguments], {**os.environ, **start.settings})
