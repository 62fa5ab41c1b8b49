"""Reads requests from a stream of lines, and writes answers, until the input ends. What was started goes on."""

import base64
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.node import messages
from torchtitan.node.archives import Archives
from torchtitan.node.folders import Folders, inside, read_at
from torchtitan.node.jobs import Jobs
from torchtitan.node.messages import LINE_BYTES, MOST_ROWS, Message, Refused, ValidationError
from torchtitan.node.report import report
from torchtitan.refusal import Refusal

_SECONDS = 0.1  # between two looks at followed files
_STATE_SECONDS = 0.5  # between two looks at whether a run is over
_PIECE = 2**18  # of a followed file at a time, so that one does not keep others waiting
_MOST_FOLLOWS, _MOST_WAITING, _THREADS = 256, 64, 8
_SLOW = (messages.Report, messages.Has, messages.Start, messages.Stop, messages.Delete)


@dataclass
class _Followed:
    request: messages.Follow
    position: int = field(init=False)
    next_question: float = 0.0  # whether the run is over

    def __post_init__(self) -> None:
        self.position = self.request.position


class Program:
    def __init__(self, home: Path, folders: Folders, archives: Archives, jobs: Jobs, out: BinaryIO) -> None:
        self._home, self._folders, self._archives, self._jobs = home, folders, archives, jobs
        self._out, self._writes = out, threading.Lock()
        self._follows: dict[int, _Followed] = {}
        self._changes = threading.Condition()  # of the follows
        self._waiting = threading.Semaphore(_MOST_WAITING)
        self._is_over = False

    def serve(self, lines: BinaryIO) -> None:
        threading.Thread(target=self._follow_all, daemon=True).start()
        with ThreadPoolExecutor(_THREADS) as pool:
            while line := lines.readline(LINE_BYTES + 1):
                if len(line) > LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(LINE_BYTES)
                    self._say(Refused(id=None, why=f"a line has more than {LINE_BYTES} bytes; send data in pieces"))
                elif line.strip():
                    self._take(line, pool)
            self._is_over = True

    def _take(self, line: bytes, pool: ThreadPoolExecutor) -> None:
        try:
            request = messages.read_request(line)
        except ValidationError as error:
            self._say(Refused(id=None, why=f"{messages.why(error)}; see torchtitan/node/messages.py"))
            return
        if not isinstance(request, _SLOW) and not getattr(request, "is_last", False):
            self._answer(request)
        elif self._waiting.acquire(blocking=False):
            pool.submit(self._answer, request).add_done_callback(lambda _: self._waiting.release())
        else:
            self._say(Refused(id=request.id, why=f"{_MOST_WAITING} requests wait already; ask again later"))

    def _answer(self, request: messages.Request) -> None:
        answer: Message | None
        try:
            does: Callable[[Any], Message | None] = getattr(self, f"_{request.do}")
            answer = does(request)
        except (Refusal, OSError) as error:
            answer = Refused(id=request.id, why=str(error)[:4000])
        except Exception as error:
            traceback.print_exc()
            answer = Refused(id=request.id, why=f"the node program fails: {type(error).__name__}: {error}"[:4000])
        if answer is not None:
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
        rows = self._folders.rows()
        return messages.RunsAnswer(id=request.id, runs=rows[:MOST_ROWS], left_out=max(0, len(rows) - MOST_ROWS))

    def _port(self, request: messages.Port) -> Message:
        with socket.socket() as s:
            s.bind(("", 0))
            return messages.PortAnswer(id=request.id, port=s.getsockname()[1])

    def _put(self, request: messages.Put) -> Message:
        is_here, size = self._archives.put(request.name, request.position, request.data, request.is_last)
        return messages.CodeAnswer(id=request.id, is_here=is_here, size=size)

    def _has(self, request: messages.Has) -> Message:
        is_here, size = self._archives.has(request.code)
        return messages.CodeAnswer(id=request.id, is_here=is_here, size=size)

    def _start(self, request: messages.Start) -> Message:
        part = self._jobs.start(request)
        folder = part.parent.parent
        return messages.StartedAnswer(
            id=request.id, folder=str(folder), log=str(part.relative_to(folder) / "output.log")
        )

    def _stop(self, request: messages.Stop) -> Message:
        state: Any = self._jobs.stop(request.run, request.seconds)
        return messages.DoneAnswer(id=request.id, state=state)

    def _delete(self, request: messages.Delete) -> Message:
        return messages.DoneAnswer(id=request.id, freed_bytes=self._folders.delete(request.run))

    def _files(self, request: messages.Files) -> Message:
        rows, left_out = self._folders.files(request.run)
        return messages.FilesAnswer(id=request.id, files=rows, left_out=left_out)

    def _read(self, request: messages.Read) -> Message:
        file = inside(self._folders.of(request.run), request.path)
        piece, size = read_at(file, request.position, request.size)
        return _data(request.id, request.position, piece, size, request.position + len(piece) >= size)

    def _follow(self, request: messages.Follow) -> None:
        inside(self._folders.of(request.run), request.path)  # refused at once
        with self._changes:
            if len(self._follows) >= _MOST_FOLLOWS or request.id in self._follows:
                raise Refusal(f"{len(self._follows)} follows are open, or one has this id; end one by `unfollow`")
            self._follows[request.id] = _Followed(request)
            self._changes.notify()

    def _unfollow(self, request: messages.Unfollow) -> Message:
        with self._changes:
            self._follows.pop(request.follow, None)
        return messages.DoneAnswer(id=request.id)

    def _follow_all(self) -> None:
        """One thread sends what all followed files gain."""
        while not self._is_over:
            with self._changes:
                self._changes.wait_for(lambda: self._follows, timeout=1)
                follows = list(self._follows.values())
            if not sum(self._send_more(one) for one in follows):  # each gets its turn
                time.sleep(_SECONDS)

    def _send_more(self, one: _Followed) -> bool:
        """Whether something was sent. Only after the run is known to be over, an end of the file is its last."""
        request, is_over = one.request, False
        try:
            piece, size = self._look(one)
            if not piece and time.monotonic() >= one.next_question:
                one.next_question = time.monotonic() + _STATE_SECONDS
                if is_over := self._folders.over(request.run):
                    piece, size = self._look(one)
            is_end = is_over and one.position + len(piece) >= size
            answer: Message = _data(request.id, one.position, piece, size, is_end)
        except Exception as error:  # of this file; the others are followed on
            piece, is_end, answer = b"", True, Refused(id=request.id, why=str(error)[:4000])
        if not piece and not is_end:
            return False
        with self._changes:
            if self._follows.get(request.id) is not one:
                return False
            if is_end:
                del self._follows[request.id]
        self._say(answer)
        one.position += len(piece)
        return True

    def _look(self, one: _Followed) -> tuple[bytes, int]:
        try:
            piece, size = read_at(inside(self._folders.of(one.request.run), one.request.path), one.position, _PIECE)
        except FileNotFoundError:  # not yet
            return b"", one.position
        if size < one.position:
            raise Refusal(f"{one.request.path} has only {size} bytes, fewer than {one.position}; follow it from 0")
        return piece, size


def _data(id: int, position: int, piece: bytes, size: int, is_end: bool) -> Message:
    data = base64.b64encode(piece).decode()
    return messages.DataAnswer(id=id, position=position, data=data, size=size, is_end=is_end)


def own_output() -> BinaryIO:
    """Standard output for messages alone: what anything else prints goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
