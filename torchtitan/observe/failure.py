"""Ends a program on an error: shows a refusal without a stack trace, and any other error with it."""

import atexit
import os
import sys
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from torchtitan.refusal import PeerError, Refusal


def leave(error: Exception) -> NoReturn:
    """End this process at once: taken apart while process groups are alive, torch may wait for ever for a thread.

    Call this inside the `except` block: torchrun's handler, whose summary of failed ranks gets it, reads it from there.
    """
    if isinstance(error, Refusal):
        error.__traceback__ = None
        get_error_handler().record_exception(error)
        if not isinstance(error, PeerError):
            print(f"error: {error}", file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()  # those of wandb, and of processes that read data
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
