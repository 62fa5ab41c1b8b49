"""Brings the ranks of a run together over gloo, or says why they cannot meet. A run of one process does not load it."""

import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_ADVICE = (
    "gloo uses the address that the node's own host name resolves to, or the interface in GLOO_SOCKET_IFNAME; "
    "run PREFLIGHT=1 ./run_llama_train.sh on each node to see which interface reaches the other nodes"
)


def meet(backend: str, rank: int, world_size: int, timeout_seconds: int) -> None:
    """Join the other ranks, or end the process 5 s after the timeout: gloo waits five times as long as it is told."""
    alarm = threading.Timer(timeout_seconds + 5, _leave_unconnected, (timeout_seconds + 5,))
    alarm.daemon = True
    alarm.start()
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        reason = str(error).rpartition("] ")[2].strip()
        raise Refusal(f"this rank cannot connect to another rank over gloo ({reason}); {_ADVICE}") from None
    finally:
        alarm.cancel()


def _leave_unconnected(seconds: int) -> None:
    """End the process. This runs in a timer's thread while gloo blocks the main thread, so no caller could catch."""
    logger.error(f"another rank has not connected to this rank over gloo within {seconds} s; {_ADVICE}")
    sys.stderr.flush()
    os._exit(1)
