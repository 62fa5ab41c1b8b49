"""What a client may do with a checkpoint of a run: continue a text, and write the weights for Hugging Face.

Each is one verb of the run's own code, in a process of its own with bounds. None of its words reaches a shell.
"""

import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fleet.node import processes
from titan_fleet.node.folders import Folders, inside
from titan_fleet.node.jobs import own_environment
from titan_fleet.node.messages import Export, Generate
from torchtitan.refusal import Refusal
from torchtitan.root import PACKAGE

GENERATE_SECONDS, EXPORT_SECONDS = 300, 3600
_TEXT_BYTES, _ERROR_BYTES = 2**16, 3000
# The process ends by itself, also where this program is gone.
_BOUNDED = """
import runpy, signal, sys
signal.alarm(int(sys.argv.pop(1)))
runpy.run_module("torchtitan", run_name="__main__", alter_sys=True)
"""


class Checkpoints:
    def __init__(self, folders: Folders) -> None:
        self._folders, self._free = folders, threading.Lock()

    def generate(self, wish: Generate) -> str:
        """The prompt and what follows it."""
        processes.need_linux()
        checkpoint = self._find(wish.run, wish.checkpoint)
        # A prompt that is a word of its own could be taken for an option.
        words = ["--checkpoint", str(checkpoint), f"--prompt={wish.prompt}", "--max_new_tokens", str(wish.tokens)]
        words += ["--temperature", str(wish.temperature)]
        return self._do(wish.run, ["generate", *words], GENERATE_SECONDS)

    def export(self, wish: Export) -> str:
        """The folder, below the run's; it is complete or absent."""
        processes.need_linux()
        run, checkpoint = self._folders.of(wish.run), self._find(wish.run, wish.checkpoint)
        exports = inside(run, "export")
        whole, part = exports / checkpoint.name, exports / f".{secrets.token_hex(8)}"
        if not whole.is_dir():
            exports.mkdir(exist_ok=True)
            try:
                self._do(wish.run, ["convert", str(checkpoint), str(part), "--to", "hf"], EXPORT_SECONDS)
                part.rename(whole)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return str(whole.relative_to(run))

    def _find(self, run: str, path: str) -> Path:
        found = inside(self._folders.of(run), path)
        if not re.fullmatch("step-[0-9]+", found.name) or not (found / "manifest.json").is_file():
            raise Refusal(f"checkpoint = {path} is none of this run; name a folder step-N that has a manifest.json")
        return found

    def _code(self, run: str) -> Path:
        """The code that the run had. A watched run did not record it; this program's serves."""
        if run.startswith("@"):
            return PACKAGE.parent
        codes = [Path(str(processes.read_record(part / "job.json").get("code"))) for part in self._folders.parts(run)]
        if not codes or not codes[0].is_dir():
            raise Refusal(f"the code of run = {run} is not on this machine any more; copy the checkpoint to a clone")
        return codes[0]

    def _do(self, run: str, words: Sequence[str], seconds: int) -> str:
        code = self._code(run)
        if not self._free.acquire(blocking=False):
            raise Refusal("this node reads another checkpoint at the moment; ask again when that is done")
        try:
            return _output(code, words, seconds)
        finally:
            self._free.release()


def _output(code: Path, words: Sequence[str], seconds: int) -> str:
    """What a verb prints. It computes on the CPU, for devices are for training."""
    mark, pipe = secrets.token_hex(16), subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", _BOUNDED, str(seconds), *words],
        cwd=code,
        env=own_environment() | {"CUDA_VISIBLE_DEVICES": "", processes.MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
    )
    said, errors = bytearray(), bytearray()
    kept = (process.stdout, said, slice(_TEXT_BYTES, None)), (process.stderr, errors, slice(None, -_ERROR_BYTES))
    threads = [threading.Thread(target=_keep, args=one, daemon=True) for one in kept]
    for thread in threads:
        thread.start()
    try:
        status = process.wait(seconds + 10)
    except subprocess.TimeoutExpired:
        status = -signal.SIGALRM
    finally:
        processes.end_all(mark, None)  # also what it has started
    for thread in threads:
        thread.join(5)
    if status == -signal.SIGALRM:
        raise Refusal(f"{words[0]} takes over {seconds} s here; use python -m torchtitan {words[0]} on this machine")
    if status:
        why = bytes(errors).decode(errors="replace").strip().removeprefix("error: ")
        raise Refusal(why or f"{words[0]} ends with {status}; look at the checkpoint")
    return bytes(said).decode(errors="replace")


def _keep(stream: Any, kept: bytearray, beyond: slice) -> None:
    """Of what comes, the first bytes or the last; a pipe that nobody reads would halt the process."""
    while piece := stream.read1(2**16):
        kept += piece
        del kept[beyond]
