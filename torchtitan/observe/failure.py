"""How a program ends on what it refuses: with the sentence that says why, and no stack of calls around it."""

import traceback
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_PACKAGE = Path(__file__).parents[1]


def is_refusal(error: BaseException) -> bool:
    """Whether the error was raised by a `raise` statement of ours, so that its message says all there is to say."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Path(place.filename).is_relative_to(_PACKAGE) and (place.line or "").startswith("raise ")


def leave(error: BaseException, shown: bool = False) -> NoReturn:
    """End this process with the message; torchrun's summary of failed ranks gets it, too. Call where it was caught."""
    error.__traceback__ = None
    get_error_handler().record_exception(error)
    raise SystemExit(1 if shown else f"error: {error}")
