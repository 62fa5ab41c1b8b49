"""torchrun, without a trace where it was only asked to end.

    python -m torchtitan.launch.ranks OPTIONS SCRIPT ...        as python -m torch.distributed.run OPTIONS SCRIPT ...

On a signal, torchrun passes it on, waits for its ranks and raises an error of its own. Here that error becomes the
ranks' own exit code for "try again".
"""

import logging
import signal

if __name__ == "__main__":  # Ctrl-C during the imports ends Python without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torchtitan.hardware import EXIT_UNFINISHED

_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def main() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    for name in ("agent.server.api", "multiprocessing.api"):  # they tell of each signal that they pass on
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    try:
        torchrun()
    except SignalException as asked:
        raise SystemExit(EXIT_UNFINISHED if asked.sigval in _PASSED_ON else 128 + asked.sigval) from None


if __name__ == "__main__":
    main()
