"""What a launcher has told this node, as one torchrun command; refuses what is contradictory or half said.

    python -m torchtitan.launch.node [options of train.py]

is how run_llama_train.sh ends, once there is a Python. Nothing else in the code starts a run of several nodes.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan import hardware
from torchtitan.config.schema import Config
from torchtitan.models.families import load_run_or_exit
from torchtitan.preflight.network import way_to_head
from torchtitan.refusal import Refusal

# Names of one thing: ours, torchrun's own (which PyTorchJob, Kubeflow Trainer and Run:ai set), Slurm's, SkyPilot's.
_NUM_NODES = ("NNODES", "PET_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SKYPILOT_NUM_NODES")
_NODE_RANK = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "SKYPILOT_NODE_RANK")
_HEAD = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_PROCESSES = ("NGPU", "PET_NPROC_PER_NODE")
_DEVICES = ("RUNAI_NUM_OF_GPUS", "SLURM_GPUS_ON_NODE", "SKYPILOT_NUM_GPUS_PER_NODE")
_RESTARTS = ("MAX_RESTARTS", "PET_MAX_RESTARTS")
_OTHERS = ("PET_RDZV_ENDPOINT", "RDZV_TIMEOUT")
_ALL = (*_NUM_NODES, *_NODE_RANK, *_HEAD, *_PORT, *_PROCESSES, *_DEVICES, *_RESTARTS, *_OTHERS)

_SMI_SECONDS = 60  # for a machine's first call


def torchrun_here(num_processes: int) -> list[str]:
    """The arguments of Python that start a tool's run of so many ranks on this machine alone."""
    # Without an address torchrun goes by the machine's own name, and waits where a container cannot resolve it.
    here = ("--standalone", "--local_addr=127.0.0.1")
    return ["-m", "torch.distributed.run", *here, f"--nproc_per_node={num_processes}"]


def environment_here(num_processes: int) -> dict[str, str]:
    """What such a run is started with: cores are shared, and nothing is left of what a platform says of its own run."""
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rest = {name: value for name, value in os.environ.items() if name not in place and not name.startswith("PET_")}
    return {"OMP_NUM_THREADS": str(max(1, hardware.num_cores() // num_processes)), **rest}


@dataclass(frozen=True)
class Node:
    """This machine among those of the run."""

    num_nodes: int
    rank: int | None  # None: of no importance (one node), or given by torchrun (PET_RDZV_ENDPOINT)
    num_processes: int
    head: str  # host:port where the nodes meet; "" on one node
    run_id: str
    restarts: int
    timeout_seconds: int  # how long a node waits for the others
    read: tuple[str, ...]  # the variables that say so

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    def torchrun(self, shown_ranks: str, own_address: str | None = None) -> list[str]:
        """The arguments of Python that start this node's ranks, up to train.py's own.

        What is given here wins over torchrun's reading of PET_*. Several nodes meet statically: each has the rank its
        launcher gave it, so rank 0, its log and its TensorBoard are on the head node, and a node that does not come is
        said by number. A static meeting happens once, though. A run that is to be brought back needs torchrun's
        dynamic one (c10d), which drops the dead, waits for all and numbers the nodes anew, in the order of their names
        (or, where a name says nothing to other nodes, of their own addresses).
        """
        rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.1"]
        if self.num_nodes > 1:
            common = [f"--rdzv_endpoint={self.head}", f"--rdzv_id={self.run_id}"]
            if self.rank is not None and not self.restarts:
                wait = f"timeout={self.timeout_seconds}"
                rendezvous = ["--rdzv_backend=static", f"--node_rank={self.rank}", *common, f"--rdzv_conf={wait}"]
            else:  # is_host: torchrun's own guess compares names, and fails where the head has an alias
                wait = f"join_timeout={self.timeout_seconds},read_timeout={self.timeout_seconds}"
                host = "" if self.rank is None else f"is_host={int(self.rank == 0)},"
                rendezvous = ["--rdzv_backend=c10d", *common, f"--rdzv_conf={host}{wait}"]
                rendezvous += [f"--local_addr={own_address}"] if own_address else []
        return [
            *("-m", "torch.distributed.run", f"--nnodes={self.num_nodes}", f"--nproc_per_node={self.num_processes}"),
            *(f"--max_restarts={self.restarts}", *rendezvous),
            "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # Slurm sends USR1 to torchrun and ranks alike
            *(f"--local_ranks_filter={shown_ranks}", "--role=rank", "--tee=3"),
        ]


def read_node(given: Mapping[str, str], gpus: int | None, alone: bool = False) -> Node:
    """The node that variables describe. `gpus`: how many are here (None: unknown). `alone`: one process plays all."""
    env = {name: value.strip() for name, value in given.items() if value.strip()}
    _take_slurm_at_its_word(env)
    num_nodes, rank = _num_nodes(env), _number(env, _NODE_RANK, "node rank", 0)
    node = Node(
        num_nodes=num_nodes,
        rank=rank,
        num_processes=_processes(env, gpus),
        head="",
        run_id=env.get("PET_RDZV_ID") or env.get("SLURM_JOB_ID") or "run",
        restarts=_number(env, _RESTARTS, "number of restarts", 0) or 0,
        timeout_seconds=_number(env, ("RDZV_TIMEOUT",), "number of seconds", 1) or 900,
        read=tuple(name for name in _ALL if name in env),
    )
    if node.num_nodes == 1 or alone:
        return replace(node, rank=None)
    of_nodes = next(f"{name} = {env[name]}" for name in _NUM_NODES if name in env)
    if (backend := env.get("PET_RDZV_BACKEND", "c10d")) not in ("c10d", "static"):
        raise Refusal(f"PET_RDZV_BACKEND = {backend} is not supported here; use c10d, or unset it")
    if rank is not None and rank >= node.num_nodes:
        name = next(name for name in _NODE_RANK if name in env)
        raise Refusal(f"{name} = {rank}, but {of_nodes}; node ranks go from 0 to {node.num_nodes - 1}")
    if endpoint := env.get("PET_RDZV_ENDPOINT"):
        if not re.search(":[0-9]+$", endpoint):
            raise Refusal(f"PET_RDZV_ENDPOINT = {endpoint} names no port; use {endpoint}:29400")
        return replace(node, head=endpoint)
    if rank is None:
        raise Refusal(f"{of_nodes}, but no node rank is set; set NODE_RANK on each node: 0 to {node.num_nodes - 1}")
    return replace(node, head=_head(env, of_nodes))


def _num_nodes(env: dict[str, str]) -> int:
    if ":" in (elastic := env.get("PET_NNODES", "")):  # least and most nodes
        least, _, most = elastic.partition(":")
        if least != most:
            raise Refusal(
                f"PET_NNODES = {elastic} lets the number of nodes change, which a run's layout cannot follow; "
                f"use {most} (elasticPolicy: minReplicas = maxReplicas)"
            )
        env["PET_NNODES"] = most
    if num_nodes := _number(env, _NUM_NODES, "number of nodes", 1):
        return num_nodes
    for name in (*_NODE_RANK, *_HEAD, *_PORT):
        if name in env:
            hint = " (NNODES=$WORLD_SIZE NODE_RANK=$RANK, if these count nodes here)" if "WORLD_SIZE" in env else ""
            raise Refusal(
                f"{name} = {env[name]}, but how many nodes there are is not said; set NNODES and NODE_RANK on each"
                f"{hint}, or unset {name} for a run on this node alone"
            )
    return 1


def _head(env: Mapping[str, str], of_nodes: str) -> str:
    """Where node 0 is asked; a list of nodes counts where no address is given."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    first = (first_host(nodes) if nodes else "") or next(iter(env.get("SKYPILOT_NODE_IPS", "").split()), "")
    head = _agreed(env, _HEAD) or first
    if not head:
        raise Refusal(
            f"{of_nodes}, but no head node is set; set MASTER_ADDR to an address of node 0 that all nodes reach"
        )
    port = _number(env, _PORT, "port", 1)
    if port is None:  # two jobs of Slurm may share a node
        port = 20000 + int(env["SLURM_JOB_ID"]) % 10000 if env.get("SLURM_JOB_ID", "").isdigit() else 29500
    return f"[{head}]:{port}" if head.count(":") > 1 and head[0] != "[" else f"{head}:{port}"


def first_host(nodes: str) -> str:
    """The first of Slurm's short list: node01 of node[01-03,07],gpu5. A container has no scontrol to ask."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _take_slurm_at_its_word(env: dict[str, str]) -> None:
    """Inside srun a step says how many nodes there are; outside, only that they are reserved."""
    if "SLURM_STEP_ID" in env:
        nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES", "1")
        env["SLURM_NNODES"] = nodes  # of the job before, which may have more
        tasks = env.get("SLURM_STEP_NUM_TASKS", nodes)
        if tasks != nodes:
            raise Refusal(
                f"SLURM_STEP_NUM_TASKS = {tasks} on {nodes} nodes, but each node needs one task, which starts its "
                f"ranks; use srun --ntasks-per-node=1 and NGPU for the ranks of a node"
            )
        return
    if env.get("SLURM_NNODES", "1") != "1" and "NNODES" not in env:
        raise Refusal(
            f"SLURM_NNODES = {env['SLURM_NNODES']}, but this is not under srun (SLURM_STEP_ID is not set): the others "
            f"would not start; use srun --ntasks-per-node=1 ./run_llama_train.sh, or NNODES=1 for this node alone"
        )
    for name in ("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_NODELIST"):
        env.pop(name, None)


def _agreed(env: Mapping[str, str], names: Sequence[str]) -> str | None:
    """What the names say that are set; they must all say the same."""
    said = [(name, env[name]) for name in names if name in env]
    for name, value in said[1:]:
        if value != said[0][1]:
            raise Refusal(
                f"{said[0][0]} = {said[0][1]}, but {name} = {value}: both set the same thing; unset one of them"
            )
    return said[0][1] if said else None


def _number(env: Mapping[str, str], names: Sequence[str], what: str, least: int) -> int | None:
    for name in names:
        if name in env and not (re.fullmatch("[0-9]+", env[name]) and int(env[name]) >= least):
            raise Refusal(f"{name} = {env[name]} is no {what}; use {least} or more")
    value = _agreed(env, names)
    return None if value is None else int(value)


def _processes(env: Mapping[str, str], gpus: int | None) -> int:
    """One a GPU, unless NGPU or PET_NPROC_PER_NODE says otherwise; without any, 1 on the CPU."""
    orders = {name: env[name] for name in _PROCESSES if name in env and env[name] != "auto"}
    wants_gpus = orders.get("PET_NPROC_PER_NODE") == "gpu"
    if wants_gpus:
        del orders["PET_NPROC_PER_NODE"]
    order = _number(orders, _PROCESSES, "number of processes", 1)
    devices_said = {name: re.sub(r"\.0+$", "", env[name]) for name in _DEVICES if name in env}
    whole = {name: re.sub(r"^0?\.[0-9]+$", "1", said) for name, said in devices_said.items() if said != "0"}  # a part
    devices = _number(whole, _DEVICES, "number of GPUs", 1)
    given = next((f"{name} = {env[name]}" for name in (*orders, *whole)), "PET_NPROC_PER_NODE = gpu")
    if order and devices and order > devices:
        limit = next(iter(whole))
        raise Refusal(f"{given} is more than {limit} = {env[limit]}; use {devices} or fewer, or ask for more GPUs")
    if gpus and (order or devices or 0) > gpus:
        raise Refusal(f"{given} is more than the {gpus} GPUs here; use {gpus} or fewer")
    if gpus == 0 and not order and (devices or wants_gpus):
        raise Refusal(f"{given}, but nvidia-smi shows no GPU here; mend that, or set NGPU to train without nvidia-smi")
    return order or devices or gpus or 1


def count_gpus(visible: str | None) -> int:
    """NVIDIA GPUs here, or those of them that CUDA_VISIBLE_DEVICES leaves."""
    try:
        smi = subprocess.Popen(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return 0
    try:
        listed = smi.communicate(timeout=_SMI_SECONDS)[0]
    except subprocess.TimeoutExpired:
        smi.kill()  # and no waiting: what hangs in the driver does not end
        raise Refusal(
            f"nvidia-smi does not answer within {_SMI_SECONDS} s: a GPU or its driver hangs; "
            f"restart this node, or leave it out"
        ) from None
    gpus = len(re.findall("^GPU ", listed, re.MULTILINE))
    if gpus and visible is not None:
        return len(re.findall("(?:^|,) *[0-9GM]", visible))  # indices, GPU-... or MIG-... names
    return gpus


@dataclass(frozen=True)
class Start:
    """What to start here: a line that says what was understood, variables to set, arguments of Python."""

    understood: str
    settings: dict[str, str]
    arguments: list[str]
    node: Node | None = None  # None: nothing that others are met for
    config: Config | None = None


def plan_start(env: Mapping[str, str], options: list[str], gpus: int) -> Start:
    """torchrun, or train.py itself where one process is all there is; the configuration is checked first."""
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

    # Without torch and before any rank exists, so that a mistake is shown at once and once a node.
    checked, _ = load_run_or_exit(train[1:], node.world_size, rank=0)

    settings = {} if fake else _allocator_and_threads(env, node) if gpus == 0 else _gpu_allocator(env)
    if fake or (node.world_size == 1 and node.restarts == 0):
        if fake or {"WORLD_SIZE", "RANK"} & set(env):  # a platform may have numbered its containers so
            settings |= {"WORLD_SIZE": str(node.world_size), "RANK": "0"}
        return Start(_understood(node, config, gpus), settings, train, None if fake else node, checked)
    own_address = None
    if node.num_nodes > 1:
        if (way := way_to_head(node.head)) is not None:
            own_address, interface = way
            settings |= {} if env.get("GLOO_SOCKET_IFNAME") else {"GLOO_SOCKET_IFNAME": interface}
        # Else each node's lines say they are of rank 0.
        settings["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    if node.restarts:
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store for each try: pytorch issue 135712
    if "PET_STANDALONE" in env:
        settings["PET_STANDALONE"] = "0"  # an option that no other can undo
    return Start(
        _understood(node, config, gpus), settings, [*node.torchrun(shown_ranks, own_address), *train], node, checked
    )


def _allocator_and_threads(env: Mapping[str, str], node: Node) -> dict[str, str]:
    """For a CPU: freed memory is kept (fresh pages cost a tenth of a step, docs/performance.md), cores are shared."""
    kept = {"MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_TOP_PAD_": 2**26}
    if node.num_processes > 1:  # else every rank takes every core
        kept["OMP_NUM_THREADS"] = max(1, hardware.num_cores() // node.num_processes)
    return {name: str(value) for name, value in kept.items() if not env.get(name)}


def _gpu_allocator(env: Mapping[str, str]) -> dict[str, str]:
    """Memory that grows in place leaves fewer holes; whoever sets the allocator otherwise is left alone."""
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


def preflight(options: list[str], start: Start | None = None) -> bool:
    """Whether all that training needs of the nodes is there; says what is not. A dry run needs nothing."""
    from torchtitan.preflight import meet as preflight

    gpus = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    start = start or plan_start(os.environ, options, gpus)
    if start.node is None or start.config is None:
        return True
    return preflight.run(start.node, start.config, {**os.environ, **start.settings}, gpus)


def main(options: list[str]) -> None:
    start = plan_start(os.environ, options, count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    if start.understood:
        settings = [f"{name}={shlex.quote(value)}" for name, value in start.settings.items()]
        print(start.understood)
        print(" ".join([*settings, shlex.join([python, *start.arguments])]), flush=True)
    if only_prints(os.environ):
        return
    if (os.environ.get("PREFLIGHT") or "0") != "0" and not preflight(options, start):
        raise SystemExit(1)
    os.execve(python, [python, *start.arguments], {**os.environ, **start.settings})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as error:
        print(f"run_llama_train.sh: {error}", file=sys.stderr)
        raise SystemExit(2) from None
