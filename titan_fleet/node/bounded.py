"""Runs a command for so many seconds at most. A process that hangs in a driver or a disk ends on no signal, so none is
waited for.
"""

import subprocess
from collections.abc import Sequence
from typing import Any


def output(command: Sequence[str], seconds: float, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """What it printed; raises TimeoutExpired. Unlike subprocess.run, it returns also where the kill has no effect."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **options)
    try:
        said, errors = process.communicate(timeout=seconds)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)
