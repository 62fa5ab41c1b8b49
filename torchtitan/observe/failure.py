"""Ends a program on a refusal: shows the message without a stack trace."""

from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def leave(error: BaseException, shown: bool = False) -> NoReturn:
    """End this process with the message, unless it was shown; torchrun's summary of failed ranks gets it too.

    Call this inside the `except` block: torchrun's handler reads the error from there.
    """
    error.__traceback__ = None
    get_error_handler().record_exception(error)
    raise SystemExit(1 if shown else f"error: {error}")
