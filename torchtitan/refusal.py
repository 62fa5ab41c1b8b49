"""How this recipe says no, and how a program ends on Ctrl-C: in a line, without a stack trace."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Refusal(ValueError):
    """A program ends with this message, which gives the value, the rule and the fix, and shows no stack trace."""


class PeerError(Refusal):
    """This rank ends because another one lags, failed or is gone; the message about that was already shown."""


@contextmanager
def ends_in_a_line(said: str) -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt. Whatever error this becomes on its way, the program says only `said`."""
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except BaseException as error:
        if not asked or isinstance(error, SystemExit):  # that is the program's own end
            raise
        print(said, file=sys.stderr, flush=True)
        os._exit(130)  # a half-imported torch may not be taken apart
    finally:
        signal.signal(signal.SIGINT, before)
