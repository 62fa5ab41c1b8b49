"""Reads a node from a launcher's variables; refuses variables that contradict each other or are incomplete."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchtitan.launch.node import Node
from torchtitan.refusal import Refusal

# Each tuple holds the names of one setting: ours, torchrun's (which PyTorchJob, Kubeflow Trainer and Run:ai set),
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

    `gpus` is the number of GPUs here (None: unknown). With `alone`, one process plays all ranks (fake_backend).
    """
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
    if ":" in (elastic := env.get("PET_NNODES", "")):  # least:most nodes
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
    """host:port of node 0; without an address, the first of the launcher's list of nodes."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    first = (first_host(nodes) if nodes else "") or next(iter(env.get("SKYPILOT_NODE_IPS", "").split()), "")
    head = _agreed(env, _HEAD) or first
    if not head:
        raise Refusal(
            f"{of_nodes}, but no head node is set; set MASTER_ADDR to an address of node 0 that all nodes reach"
        )
    port = _number(env, _PORT, "port", 1)
    if port is None:  # two Slurm jobs may share a node, so each gets its own port
        port = 20000 + int(env["SLURM_JOB_ID"]) % 10000 if env.get("SLURM_JOB_ID", "").isdigit() else 29500
    return f"[{head}]:{port}" if head.count(":") > 1 and head[0] != "[" else f"{head}:{port}"


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: node01 for node[01-03,07],gpu5. Containers lack scontrol."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _take_slurm_at_its_word(env: dict[str, str]) -> None:
    """Use Slurm's variables only inside srun: outside, they describe the reserved nodes, not those of this run."""
    if "SLURM_STEP_ID" in env:
        nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES", "1")
        env["SLURM_NNODES"] = nodes  # SLURM_NNODES counted the nodes of the job, which may have more than this step
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
    """The value of those names that are set; raise Refusal if two values differ."""
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
    """One process per GPU unless NGPU or PET_NPROC_PER_NODE sets another number; without a GPU, one on the CPU."""
    orders = {name: env[name] for name in _PROCESSES if name in env and env[name] != "auto"}
    wants_gpus = orders.get("PET_NPROC_PER_NODE") == "gpu"
    if wants_gpus:
        del orders["PET_NPROC_PER_NODE"]
    order = _number(orders, _PROCESSES, "number of processes", 1)
    devices_said = {name: re.sub(r"\.0+$", "", env[name]) for name in _DEVICES if name in env}
    whole = {
        name: re.sub(r"^0?\.[0-9]+$", "1", said) for name, said in devices_said.items() if said != "0"
    }  # 0.5 GPUs: 1
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
