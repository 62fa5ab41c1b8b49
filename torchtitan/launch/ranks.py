"""torchrun, without a trace where it was only asked to end.

    python -m torchtitan.launch.ranks OPTIONS SCRIPT ...        as python -m torch.distributed.run OPTIONS SCRIPT ...

On a signal, torchrun passes it on, waits for its ranks and raises an error of its own. Here that error becomes the
ranks' own exit code for "try again". Where a rank has refused, torchrun's summary would only repeat its message, and is
left out.
"""

import logging
import re
import signal
import sys
from typing import Any

if __name__ == "__main__":  # Ctrl-C during the imports ends Python without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torchtitan.hardware import EXIT_UNFINISHED

_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def main() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # They tell of each signal that they pass on, and of each exit code, which the summary has.
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except SignalException as asked:
        raise SystemExit(EXIT_UNFINISHED if asked.sigval in _PASSED_ON else 128 + asked.sigval) from None
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if not _is_refusal(first):
            raise
        given = re.search(r"--local_ranks_filter=([\d,]+)", " ".join(sys.argv))
        shown = given[1].split(",") if given else []
        was_shown = any(_is_refusal(one) and str(one.local_rank) in shown for one in failed.failures.values())
        kind, _, message = first.error_file_data["message"]["message"].partition(": ")
        if not was_shown and kind != "PeerError":  # that a peer failed is in the log
            print(f"rank {rank}: error: {message}", file=sys.stderr)
        raise SystemExit(1) from None


def _is_refusal(failure: Any) -> bool:
    """observe/failure.py takes the traceback away from an error whose message is all that its reader needs."""
    message = failure.error_file_data["message"]
    return isinstance(message, dict) and "Traceback" not in message["extraInfo"]["py_callstack"]


if __name__ == "__main__":
    main()
