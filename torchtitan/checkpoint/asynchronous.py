"""A save beside the training: a copy of all tensors in host memory, and a thread that writes it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Tensors = dict[str, Tensor]


def copy_to_host(tensors: Tensors, kept: Tensors, pinned: bool) -> Tensors:
    """Copy into the tensors `kept` from an earlier save where they fit, and keep the others that this save makes."""
    copied = {name: _copy(name, tensor, kept, pinned) for name, tensor in tensors.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copied


def _copy(name: str, tensor: Tensor, kept: Tensors, pinned: bool) -> Tensor:
    """torch has a stager for this, but the one of torch 2.11 works only once."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    copy = kept.get(name)
    if copy is None or (copy.shape, copy.dtype) != (local.shape, local.dtype):
        copy = kept[name] = torch.empty_like(local, device="cpu", pin_memory=pinned)
    copy.copy_(local, non_blocking=True)
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def start_thread(write: Callable[[], None]) -> Future[None]:
    """Write in a daemon thread: it may wait for a rank that is gone, and must not keep this process alive."""
    done: Future[None] = Future()
    # A new thread's current device is GPU 0, where torch's writer would allocate memory for every rank.
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1 is none

    def run() -> None:
        try:
            with torch.cuda.device(device):
                write()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done
