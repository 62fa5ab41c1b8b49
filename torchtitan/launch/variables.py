"""Reads the variables that launchers set on a node, and refuses those that contradict each other or are incomplete."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchtitan.launch.node import Node
from torchtitan.refusal import Refusal

# Each row holds names for the same thing: ours, torchrun's own (PyTorchJob, Kubeflow Trainer and Run:ai set these),
# Slurm's and SkyPilot's.
_NUM_NODES = ("NNODES", "PET_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SKYPILOT_NUM_NODES")
_NODE_RANK = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "SKYPILOT_NODE_RANK")
_HEAD = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_PROCESSES = ("NGPU", "PET_NPROC_PER_NODE")
_DEVICES = ("RUNAI_NUM_OF_GPUS", "SLURM_GPUS_ON_NODE", "SKYPILOT_NUM_GPUS_PER_NODE")
_RESTARTS = ("MAX_RESTARTS", "PET_MAX_RESTARTS")
_OTHERS = ("PET_RDZV_ENDPOINT", "RDZV_TIMEOUT")
_ALL = (*_NUM_NODES, *_NODE_RANK, *_HEAD, *_PORT, *_PROCESSES, *_DEVICES, *_RESTARTS, *_OTHERS)


def read_node(given: Mapping[str, str], gpus: int | None, alone: bool = False) -> Node:
    """The node that the variables describe.

    `gpus` is the number of GPUs on this machine, None if unknown. With `alone`, one process plays all ranks.
    """
    env = {name: value.strip() for name, value in given.items() if value.strip()}
    _keep_slurms_step(env)
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
        raise Refusal(f"{name} = {rank}, but {of_nodes}; use a node rank from 0 to {node.num_nodes - 1}")
    if endpoint := env.get("PET_RDZV_ENDPOINT"):
        if not re.search(":[0-9]+$", endpoint):
            raise Refusal(f"PET_RDZV_ENDPOINT = {endpoint} has no port; use {endpoint}:29400")
        return replace(node, head=endpoint)
    if rank is None:
        raise Refusal(f"{of_nodes}, but no node rank is set; set NODE_RANK on each node: 0 to {node.num_nodes - 1}")
    return replace(node, head=_head(env, of_nodes))


def _num_nodes(env: dict[str, str]) -> int:
    if ":" in (elastic := env.get("PET_NNODES", "")):  # minimum:maximum
        least, _, most = elastic.partition(":")
        if least != most:
            raise Refusal(
                f"PET_NNODES = {elastic} lets the number of nodes change, but a run keeps its layout; "
                f"use {most} (elasticPolicy: minReplicas = maxReplicas)"
            )
        env["PET_NNODES"] = most
    if num_nodes := _number(env, _NUM_NODES, "number of nodes", 1):
        return num_nodes
    for name in (*_NODE_RANK, *_HEAD, *_PORT):
        if name in env:
            hint = " (if they count nodes here: NNODES=$WORLD_SIZE NODE_RANK=$RANK)" if "WORLD_SIZE" in env else ""
            raise Refusal(
                f"{name} = {env[name]}, but the number of nodes is not set; set NNODES and NODE_RANK on each node"
                f"{hint}, or unset {name} for a run on this node alone"
            )
    return 1


def _head(env: Mapping[str, str], of_nodes: str) -> str:
    """host:port of node 0. Without an address, the first entry of the launcher's list of nodes is used."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    first = (first_host(nodes) if nodes else "") or next(iter(env.get("SKYPILOT_NODE_IPS", "").split()), "")
    head = _agreed(env, _HEAD) or first
    if not head:
        raise Refusal(
            f"{of_nodes}, but no head node is set; set MASTER_ADDR to an address of node 0 that all nodes reach"
        )
    port = _number(env, _PORT, "port", 1)
    if port is None:  # by job under Slurm, where two jobs may share a node
        port = 20000 + int(env["SLURM_JOB_ID"]) % 10000 if env.get("SLURM_JOB_ID", "").isdigit() else 29500
    return f"[{head}]:{port}" if head.count(":") > 1 and head[0] != "[" else f"{head}:{port}"


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list, such as node[01-03,07],gpu5; a container has no scontrol to ask."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _keep_slurms_step(env: dict[str, str]) -> None:
    """Inside srun, keep the step's variables. Outside, Slurm's variables describe a reservation, not a run."""
    if "SLURM_STEP_ID" in env:
        nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES", "1")
        env["SLURM_NNODES"] = nodes  # the job's own number may be larger than the step's
        tasks = env.get("SLURM_STEP_NUM_TASKS", nodes)
        if tasks != nodes:
            raise Refusal(
                f"SLURM_STEP_NUM_TASKS = {tasks} on {nodes} nodes, but each node needs exactly one task, which starts "
                f"all ranks of the node; use srun --ntasks-per-node=1, and NGPU for the number of ranks a node"
            )
        return
    if env.get("SLURM_NNODES", "1") != "1" and "NNODES" not in env:
        raise Refusal(
            f"SLURM_NNODES = {env['SLURM_NNODES']}, but srun did not start this script (SLURM_STEP_ID is not set), so "
            f"the other nodes would not start; use srun --ntasks-per-node=1 ./run_llama_train.sh, or NNODES=1 to "
            f"train on this node alone"
        )
    for name in ("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_NODELIST"):
        env.pop(name, None)


def _agreed(env: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The value that the names share, None if none is set. Two different values are an error."""
    found = [(name, env[name]) for name in names if name in env]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise Refusal(
                f"{found[0][0]} = {found[0][1]}, but {name} = {value}: both set the same thing; unset one of them"
            )
    return found[0][1] if found else None


def _number(env: Mapping[str, str], names: Sequence[str], what: str, least: int) -> int | None:
    for name in names:
        if name in env and not (re.fullmatch("[0-9]+", env[name]) and int(env[name]) >= least):
            raise Refusal(f"{name} = {env[name]} is not a {what}; use {least} or more")
    value = _agreed(env, names)
    return None if value is None else int(value)


def _processes(env: Mapping[str, str], gpus: int | None) -> int:
    """NGPU or PET_NPROC_PER_NODE if set, else one process a GPU, else 1 on the CPU."""
    orders = {name: env[name] for name in _PROCESSES if name in env and env[name] != "auto"}
    wants_gpus = orders.get("PET_NPROC_PER_NODE") == "gpu"
    if wants_gpus:
        del orders["PET_NPROC_PER_NODE"]
    order = _number(orders, _PROCESSES, "number of processes", 1)
    granted = {name: re.sub(r"\.0+$", "", env[name]) for name in _DEVICES if name in env}
    # Run:ai may grant a part of one GPU, such as 0.5, which counts as one.
    whole = {name: re.sub(r"^0?\.[0-9]+$", "1", count) for name, count in granted.items() if count != "0"}
    devices = _number(whole, _DEVICES, "number of GPUs", 1)
    given = next((f"{name} = {env[name]}" for name in (*orders, *whole)), "PET_NPROC_PER_NODE = gpu")
    if order and devices and order > devices:
        limit = next(iter(whole))
        raise Refusal(f"{given} is more than {limit} = {env[limit]}; use {devices} or fewer, or ask for more GPUs")
    if gpus and (order or devices or 0) > gpus:
        raise Refusal(f"{given} is more than the {gpus} GPUs here; use {gpus} or fewer")
    if gpus == 0 and not order and (devices or wants_gpus):
        raise Refusal(
            f"{given}, but nvidia-smi shows no GPU here; make nvidia-smi work, or set NGPU to start without it"
        )
    return order or devices or gpus or 1
