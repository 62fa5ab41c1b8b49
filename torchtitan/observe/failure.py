"""How a program ends on what it refuses: with the sentence that says why, and no stack of calls around it."""

from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def leave(error: BaseException, shown: bool = False) -> NoReturn:
    """End this process with the message; torchrun's summary of failed ranks gets it, too. Call where it was caught."""
    error.__traceback__ = None
    get_error_handler().record_exception(error)
    raise SystemExit(1 if shown else f"error: {error}")
