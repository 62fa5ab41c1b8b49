"""Reads requests from a stream of lines, and writes answers, until the input ends. What was started goes on."""

import base64
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from titan_fleet.node import messages
from titan_fleet.node.archives import Archives
from titan_fleet.node.checkpoints import Checkpoints
from titan_fleet.node.folders import Folders, log_of
from titan_fleet.node.jobs import Jobs
from titan_fleet.node.messages import LINE_BYTES, Message, Refused, ValidationError
from titan_fleet.node.report import report
from torchtitan.refusal import Refusal

_MOST_AT_ONCE = 32  # requests; nothing more is read meanwhile
_LOOK_SECONDS = 0.1  # between two looks at the runs for who waits for a change
_IDLE = 19  # times the CPU's time for a look, if that is more


class Program:
    def __init__(self, home: Path, folders: Folders, archives: Archives, jobs: Jobs, out: BinaryIO) -> None:
        self._home, self._folders, self._archives, self._jobs = home, folders, archives, jobs
        self._checkpoints = Checkpoints(folders)
        self._out, self._writes = out, threading.Lock()
        self._free, self._is_over = threading.Semaphore(_MOST_AT_ONCE), threading.Event()
        self._pause = _LOOK_SECONDS

    def serve(self, lines: BinaryIO) -> None:
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            while line := lines.readline(LINE_BYTES + 1):
                if len(line) > LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(LINE_BYTES)
                    self._say(Refused(id=None, why=f"a line has more than {LINE_BYTES} bytes; send data in pieces"))
                elif line.strip():
                    self._take(line, pool)
            self._is_over.set()

    def _take(self, line: bytes, pool: ThreadPoolExecutor) -> None:
        try:
            request = messages.read_request(line)
        except ValidationError as error:
            self._say(Refused(id=None, why=f"{messages.why(error)}; see titan_fleet/node/messages.py"))
            return
        self._free.acquire()
        pool.submit(self._answer, request).add_done_callback(lambda _: self._free.release())

    def _answer(self, request: messages.Request) -> None:
        try:
            does: Callable[[Any], Message] = getattr(self, f"_{request.do}")
            answer = does(request)
        except (Refusal, OSError) as error:
            answer = Refused(id=request.id, why=str(error)[:4000])
        except Exception as error:
            traceback.print_exc()
            answer = Refused(id=request.id, why=f"the node program fails: {type(error).__name__}: {error}"[:4000])
        self._say(answer)

    def _say(self, message: Message) -> None:
        line = messages.write(message)
        with self._writes:
            try:
                self._out.write(line)
                self._out.flush()
            except (BrokenPipeError, ValueError):
                os._exit(0)  # nobody listens; what was started goes on

    def _report(self, request: messages.Report) -> Message:
        return report(request.id, self._home, self._archives.git)

    def _runs(self, request: messages.Runs) -> Message:
        end = time.monotonic() + request.seconds
        while True:
            self._is_over.wait(self._pause if request.known else 0)
            is_last, spent = time.monotonic() >= end or self._is_over.is_set(), time.thread_time()
            rows = self._folders.rows()
            mark = hashlib.sha256(repr(rows).encode()).hexdigest()
            self._pause = max(_LOOK_SECONDS, _IDLE * (time.thread_time() - spent))
            if mark != request.known or is_last:
                shown = messages.fitting(rows)
                return messages.RunsAnswer(id=request.id, runs=shown, left_out=len(rows) - len(shown), mark=mark)

    def _port(self, request: messages.Port) -> Message:
        with socket.socket() as s:
            s.bind(("", 0))
            return messages.PortAnswer(id=request.id, port=s.getsockname()[1])

    def _put(self, request: messages.Put) -> Message:
        is_here = self._archives.put(request.name, request.position, request.data, request.is_last)
        return messages.CodeAnswer(id=request.id, kind="put", is_here=is_here)

    def _has(self, request: messages.Has) -> Message:
        return messages.CodeAnswer(id=request.id, kind="has", is_here=self._archives.has(request.code))

    def _start(self, request: messages.Start) -> Message:
        part = self._jobs.start(request)
        return messages.StartedAnswer(id=request.id, folder=str(part.parents[1]), log=log_of(part))

    def _stop(self, request: messages.Stop) -> Message:
        return messages.StoppedAnswer(id=request.id, state=self._jobs.stop(request.run, request.seconds))

    def _delete(self, request: messages.Delete) -> Message:
        return messages.DeletedAnswer(id=request.id, freed_bytes=self._folders.delete(request.run))

    def _generate(self, request: messages.Generate) -> Message:
        return messages.MadeAnswer(id=request.id, kind="generate", made=self._checkpoints.generate(request))

    def _export(self, request: messages.Export) -> Message:
        return messages.MadeAnswer(id=request.id, kind="export", made=self._checkpoints.export(request))

    def _files(self, request: messages.Files) -> Message:
        rows, left_out = self._folders.files(request.run)
        return messages.FilesAnswer(id=request.id, files=rows, left_out=left_out)

    def _read(self, request: messages.Read) -> Message:
        return _data(request, *self._look(request), is_over=True)

    def _follow(self, request: messages.Follow) -> Message:
        is_over = self._folders.over(request.run)  # asked first: what is there after the end is all
        try:
            piece, size = self._look(request)
        except FileNotFoundError:  # not yet
            piece, size = b"", request.position
        if size < request.position:
            raise Refusal(f"{request.path} has only {size} bytes, fewer than {request.position}; follow it from 0")
        return _data(request, piece, size, is_over)

    def _look(self, request: messages.Piece) -> tuple[bytes, int]:
        return self._folders.read(request.run, request.path, request.position, request.size)


def _data(request: messages.Read | messages.Follow, piece: bytes, size: int, is_over: bool) -> Message:
    is_end = is_over and request.position + len(piece) >= size
    data = base64.b64encode(piece).decode()
    return messages.DataAnswer(id=request.id, kind=request.do, data=data, size=size, is_end=is_end)


def own_output() -> BinaryIO:
    """Standard output for messages alone: what anything else prints goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
