"""Runs a verb of the recipe in a process of its own: it may load a model, or wait for somebody else's program."""

import subprocess
import sys
from collections.abc import Sequence

from torchtitan.refusal import Refusal
from torchtitan.root import ROOT


def call(words: Sequence[str], seconds: float, look_at: str) -> "subprocess.CompletedProcess[bytes]":
    """What it said, and how it ended."""
    command = [sys.executable, "-m", "torchtitan", *words]
    try:
        return subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"`{words[0]}` gives no answer within {seconds} s; {look_at}") from None
