"""How this recipe says no, and how a program ends on Ctrl-C: in a line, without a stack trace."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Refusal(ValueError):
    """A program ends with this message, which gives the value, the rule and the fix, and shows no stack trace."""


class PeerError(Refusal):
    """This rank ends because another one lags, failed or is gone; the message about that was already shown."""


class NotThereError(Refusal):
    """The file or module of a model is not where Python looks for it; a run looks beside its TOML, too."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what, self.fix = what, fix


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Inside runs code of the user's: its error becomes a refusal that gives the file and the line."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise Refusal(f"{what} fails{place_of(error)}: {type(error).__name__}: {said}") from None


def place_of(error: BaseException) -> str:
    """The deepest line that is neither Python's, nor torch's, nor this package's."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    ours, python = os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<", ours))
    ]
    known = f"{os.sep}site-packages{os.sep}"
    own = [f for f in frames if not f.filename.startswith(python) or known in f.filename]
    own = [f for f in own if f"{known}torch{os.sep}" not in f.filename]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


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
