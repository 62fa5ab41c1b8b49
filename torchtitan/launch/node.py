"""A node of a run, and the one torchrun command that starts its ranks."""

import os
from dataclasses import dataclass

from torchtitan import hardware

SECONDS_TO_SAVE = 290  # between the warning and the end of a job; Kubernetes adds ten
SECONDS_TO_END = 40  # of the other nodes after one has failed; torchrun itself waits 30 s for its ranks
# On a CPU, malloc keeps freed memory, for fresh pages cost a tenth of a step (docs/recipe/figures.md).
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
# libgomp's threads wait for each other awake, 300,000 turns. If another program has the core of one of them, each of
# many small products costs a time slice; after 2,000 turns they sleep, and leave their cores to whom they wait for.
# On idle cores that costs a mixture of experts 3 %, so only a start beside other programs sets it.
SLEEP_SOON = {"GOMP_SPINCOUNT": "2000"}


def torchrun_here(num_processes: int) -> list[str]:
    """Arguments of Python that start a tool's own run of `num_processes` ranks on this machine alone."""
    return ["-m", "torchtitan.launch.ranks", *_meeting_here(), f"--nproc_per_node={num_processes}"]


def _meeting_here() -> list[str]:
    # Without an address torchrun uses the machine's host name, and hangs where a container cannot resolve that name.
    own = hardware.loopback()
    endpoint = "localhost" if own == "127.0.0.1" else f"[{own}]"
    return ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}:0", f"--local_addr={own}"]


def loopback_settings() -> dict[str, str]:
    """What gloo has to be told where loopback is IPv6 alone: it would look for 127.0.0.1."""
    return {} if hardware.loopback() == "127.0.0.1" else {"GLOO_SOCKET_IFNAME": "lo"}


def environment_here(num_processes: int) -> dict[str, str]:
    """The environment of such a run: ranks share the cores, and a platform's variables about its own run are gone."""
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rest = {name: value for name, value in os.environ.items() if name not in place and not name.startswith("PET_")}
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // num_processes)), **loopback_settings(), **rest}


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_shared() -> bool:
    """Whether other programs kept half a core or more busy in the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= 0.5


@dataclass(frozen=True)
class Node:
    """This machine's place in the run."""

    num_nodes: int
    rank: int | None  # None: there is only one node, or torchrun numbers the nodes (PET_RDZV_ENDPOINT)
    num_processes: int
    head: str  # host:port where the nodes meet; "" on one node
    run_id: str
    restarts: int
    timeout_seconds: int  # how long a node waits for the others
    read: tuple[str, ...]  # the variables that were read

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    def torchrun(self, shown_ranks: str, own_address: str | None = None, on_terminal: bool = False) -> list[str]:
        """Arguments of Python that start this node's ranks, up to train.py.

        These arguments win over the PET_* variables, which torchrun also reads. Several nodes meet by torchrun's
        static rendezvous: each node keeps the rank that its launcher gave it, so rank 0, its log and its TensorBoard
        are on the head node, and torchrun names a missing node by its number. A static rendezvous happens only once.
        A run with restarts therefore needs the dynamic rendezvous (c10d), which drops dead nodes, waits until all
        nodes are back and numbers them anew, sorted by host name, or by own address where the host name means loopback.

        torchrun copies what it shows through a pipe, with the rank before each line. On a terminal one shown rank gets
        the terminal itself, so that its live line works; the output of the others goes to files alone.
        """
        rendezvous = _meeting_here()
        if self.num_nodes > 1:
            common = [f"--rdzv_endpoint={self.head}", f"--rdzv_id={self.run_id}"]
            if self.rank is not None and not self.restarts:
                wait = f"timeout={self.timeout_seconds}"
                rendezvous = ["--rdzv_backend=static", f"--node_rank={self.rank}", *common, f"--rdzv_conf={wait}"]
            else:  # without is_host torchrun compares host names, which fails where the head has an alias
                wait = f"join_timeout={self.timeout_seconds},read_timeout={self.timeout_seconds}"
                host = "" if self.rank is None else f"is_host={int(self.rank == 0)},"
                rendezvous = ["--rdzv_backend=c10d", *common, f"--rdzv_conf={host}{wait}"]
                rendezvous += [f"--local_addr={own_address}"] if own_address else []
        shown = "--tee=3"
        if on_terminal and shown_ranks.isdecimal():
            shown = "--redirects=" + ",".join(f"{r}:{3 * (str(r) != shown_ranks)}" for r in range(self.num_processes))
        return [
            *("-m", "torchtitan.launch.ranks", f"--nnodes={self.num_nodes}", f"--nproc_per_node={self.num_processes}"),
            *(f"--max_restarts={self.restarts}", *rendezvous),
            "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # Slurm sends USR1 to torchrun and ranks
            *(f"--local_ranks_filter={shown_ranks}", "--role=rank", shown),
        ]
