"""train.py where one rank fails: `FAULT="KIND RANK STEP" python -m tests.recipe.distributed.faulty_train ...`.

KIND is `raise`, `pause` (for some seconds two steps before, then `raise`), `sleep`, `preemption` or `ctrl-c` (torchrun
and the rank are both told to end) or the name of a signal that the rank sends itself. STEP may be `save`: the rank
fails in the first save. Started again, a rank does not fail.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.storage import Storage
from torchtitan.training.step import ForwardBackward

kind, faulty_rank, faulty_step = os.environ["FAULT"].split()
healthy_step = ForwardBackward.__call__
calls = 0


def step_with_a_fault(self: ForwardBackward, batch: Any) -> Any:
    global calls
    calls += 1
    if kind == "pause" and (os.environ["RANK"], str(calls + 2)) == (faulty_rank, faulty_step):
        time.sleep(5)
    is_first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_try and (os.environ["RANK"], str(calls)) == (faulty_rank, faulty_step):
        print(f"fault at {time.time()}", flush=True)
        if kind in ("raise", "pause"):
            raise OSError("the disk is gone")
        if kind == "sleep":
            time.sleep(1000)
        if kind in ("preemption", "ctrl-c"):
            number = signal.SIGTERM if kind == "preemption" else signal.SIGINT
            os.kill(os.getppid(), number)
            os.kill(os.getpid(), number)
            time.sleep(1)  # torchrun passes its signal on meanwhile
        else:
            os.kill(os.getpid(), getattr(signal, kind))
    return healthy_step(self, batch)


def describe_with_a_fault(self: Storage, *args: Any) -> Any:
    if (os.environ["RANK"], faulty_step) == (faulty_rank, "save"):
        print(f"fault at {time.time()}", flush=True)
        os.kill(os.getpid(), getattr(signal, kind))
    return healthy_describe(self, *args)


healthy_describe = Storage.describe
Storage.describe = describe_with_a_fault  # type: ignore[method-assign]
ForwardBackward.__call__ = step_with_a_fault  # type: ignore[method-assign]
sys.argv[0] = str(Path(__file__).parents[3] / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
