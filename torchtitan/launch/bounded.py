"""Runs a command for so many seconds at most. One that hangs in a driver or a disk ends on no signal; nobody waits."""

import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from torchtitan.refusal import Refusal

_asks = threading.Lock()
_killed: list[tuple[str, "subprocess.Popen[Any]"]] = []  # programs that may not have ended


def output(command: Sequence[str], seconds: float, **options: Any) -> "subprocess.CompletedProcess[Any]":
    """What it printed; raises TimeoutExpired. Unlike subprocess.run, it returns also where the kill has no effect."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **options)
    try:
        said, errors = process.communicate(timeout=seconds)
    except BaseException:
        process.kill()
        _killed[:] = [each for each in (*_killed, (command[0], process)) if each[1].poll() is None]
        raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def nvidia_smi(*words: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    """Raises OSError where there is none. While one hangs in the driver, no second one is started to hang as well."""
    command = ["nvidia-smi", *words]
    with _asks:
        try:
            if any(name == command[0] and killed.poll() is None for name, killed in _killed):
                raise subprocess.TimeoutExpired(command, seconds)
            return output(command, seconds, text=True)
        except subprocess.TimeoutExpired:
            hangs = f"nvidia-smi does not answer within {seconds} s: a GPU or its driver hangs"
            raise Refusal(f"{hangs}; restart this node, or leave it out") from None


def query_gpus(fields: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    """A line for each GPU, with these fields."""
    return nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", seconds=seconds)
