"""This machine among those of a run, and the torchrun command that starts its ranks."""

import os
import re
import subprocess
from dataclasses import dataclass

from torchtitan import hardware
from torchtitan.refusal import Refusal

_SMI_SECONDS = 60  # the first call on a machine may be slow


def torchrun_here(num_processes: int) -> list[str]:
    """The arguments of Python with which a tool starts `num_processes` ranks on this machine alone."""
    # Without an address torchrun uses the machine's own name, and hangs in a container that cannot resolve it.
    here = ("--standalone", "--local_addr=127.0.0.1")
    return ["-m", "torch.distributed.run", *here, f"--nproc_per_node={num_processes}"]


def environment_here(num_processes: int) -> dict[str, str]:
    """The environment of such a run: ranks share the cores, and the variables of a platform's own run are removed."""
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rest = {name: value for name, value in os.environ.items() if name not in place and not name.startswith("PET_")}
    return {"OMP_NUM_THREADS": str(max(1, hardware.num_cores() // num_processes)), **rest}


@dataclass(frozen=True)
class Node:
    """This machine among those of the run."""

    num_nodes: int
    rank: int | None  # None: one node needs no rank, or torchrun assigns it (PET_RDZV_ENDPOINT)
    num_processes: int
    head: str  # host:port where the nodes meet; "" for one node
    run_id: str
    restarts: int
    timeout_seconds: int  # how long a node waits for the others
    read: tuple[str, ...]  # names of the variables that were read

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    def torchrun(self, shown_ranks: str, own_address: str | None = None) -> list[str]:
        """The arguments of Python that start this node's ranks, up to train.py's own.

        These options override the PET_* variables that torchrun reads. Several nodes use the static rendezvous: each
        node keeps the rank of its launcher, so rank 0 with its log and its TensorBoard is on the head node, and
        torchrun names a missing node by number. A static rendezvous happens only once. A run with restarts needs the
        dynamic one (c10d), which drops dead nodes, waits for all, and renumbers the nodes in the order of their names.
        Where other nodes cannot resolve a name, `own_address` replaces it.
        """
        rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.1"]
        if self.num_nodes > 1:
            common = [f"--rdzv_endpoint={self.head}", f"--rdzv_id={self.run_id}"]
            if self.rank is not None and not self.restarts:
                wait = f"timeout={self.timeout_seconds}"
                rendezvous = ["--rdzv_backend=static", f"--node_rank={self.rank}", *common, f"--rdzv_conf={wait}"]
            else:  # is_host: torchrun itself compares names, and is wrong if the head has an alias
                wait = f"join_timeout={self.timeout_seconds},read_timeout={self.timeout_seconds}"
                host = "" if self.rank is None else f"is_host={int(self.rank == 0)},"
                rendezvous = ["--rdzv_backend=c10d", *common, f"--rdzv_conf={host}{wait}"]
                rendezvous += [f"--local_addr={own_address}"] if own_address else []
        return [
            *("-m", "torch.distributed.run", f"--nnodes={self.num_nodes}", f"--nproc_per_node={self.num_processes}"),
            *(f"--max_restarts={self.restarts}", *rendezvous),
            "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # Slurm sends USR1 to torchrun and the ranks
            *(f"--local_ranks_filter={shown_ranks}", "--role=rank", "--tee=3"),
        ]


def count_gpus(visible: str | None) -> int:
    """How many NVIDIA GPUs this machine has; `visible` is CUDA_VISIBLE_DEVICES, which may hide some."""
    try:
        smi = subprocess.Popen(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return 0
    try:
        listed = smi.communicate(timeout=_SMI_SECONDS)[0]
    except subprocess.TimeoutExpired:
        smi.kill()  # without wait(): a process that hangs in the driver never ends
        raise Refusal(
            f"nvidia-smi does not answer within {_SMI_SECONDS} s: a GPU or its driver hangs; "
            f"restart this node, or leave it out"
        ) from None
    gpus = len(re.findall("^GPU ", listed, re.MULTILINE))
    if gpus and visible is not None:
        return len(re.findall("(?:^|,) *[0-9GM]", visible))  # indices, GPU-... or MIG-... names
    return gpus
