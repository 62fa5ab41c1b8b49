"""A node as its clients see it: asks, follows files, and connects again when the connection breaks.

It starts the system's ssh (or the node program of this machine). Nothing that a node says is trusted: its lines are
bounded and checked, and only answers to what was asked count.
"""

import base64
import itertools
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from typing import Any

from torchtitan.node import messages
from torchtitan.node.messages import ANSWERS, CHUNK_BYTES, LINE_BYTES, AnyAnswer, Message, ReportAnswer
from torchtitan.refusal import Refusal

_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\]-]*")
# No question on a terminal; a dead line is noticed within 45 s; nothing is forwarded.
_OPTIONS = ["-T", "-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=15", "-oServerAliveCountMax=3"]
_OPTIONS += ["-oClearAllForwardings=yes"]
_SEND_SECONDS = 60  # a node that takes no byte for so long is given up
_MOST_STRAYS = 100  # lines of a connection that answer nothing, such as a greeting
_WAITS = (0.5, 1, 2, 5, 10, 20, 30)  # seconds between attempts to connect
_ERROR_BYTES = 4000

Sink = Callable[[int, bytes, bool], None]  # position, bytes, whether they are the last


class Broken(Refusal):
    """The connection broke; whether the node still did what was asked is unknown."""


def ssh_command(host: str, program: Sequence[str], ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """The argument vector for ssh; a key with a forced command runs that, whatever `program` is."""
    if not _HOST.fullmatch(host):
        raise Refusal(f"host = {host!r} is no name for ssh; write it as user@gpu1.example.org")
    return [*ssh, *_OPTIONS, "--", host, shlex.join(program)]


def local_command(home: str | None = None) -> list[str]:
    """The node program of this machine, without ssh."""
    return [sys.executable, "-m", "torchtitan", "node", *(["--home", home] if home else [])]


class Node:
    """One node. Its methods may be called from any thread; sinks are called from one thread, and must be quick."""

    def __init__(self, name: str, command: Sequence[str], cwd: Path | None = None) -> None:
        self.name, self._command, self._cwd = name, list(command), cwd
        self.report: ReportAnswer | None = None  # of the newest connection
        self.trouble = ""  # why there is no connection
        self.exit_code: int | None = None  # of the last connection
        self._ids = itertools.count(1)
        self._changes = threading.Condition()
        self._asked: dict[int, tuple[messages.Request, Future[Any]]] = {}
        self._follows: dict[int, tuple[messages.Follow, Sink]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._is_up = self._is_closed = False
        self._failures = 0
        self._sends = threading.Lock()
        self._thread = threading.Thread(target=self._stay_connected, daemon=True, name=f"node {name}")

    def connect(self, timeout: float = 60) -> ReportAnswer:
        """Wait for the first connection; raises Broken with what ssh said when it fails."""
        self._thread.start()
        with self._changes:
            self._changes.wait_for(lambda: self._is_up or self._failures, timeout)
            if self._is_up and self.report:
                return self.report
        raise Broken(f"{self.name}: {self.trouble or f'no answer within {timeout:.0f} s'}")

    def ask(self, request: Callable[..., messages.Request], timeout: float = 60, **fields: Any) -> Any:
        """The answer; raises Refusal with the node's reason, and Broken where there is none."""
        made = request(id=next(self._ids), **fields)
        with self._changes:
            if not self._changes.wait_for(lambda: self._is_up or self._is_closed, timeout) or self._is_closed:
                raise Broken(f"{self.name} is not connected: {self.trouble or 'it was closed'}")
        answer: Future[Any] = Future()
        with self._changes:
            self._asked[made.id] = made, answer
        try:
            self._send(made)
            return answer.result(timeout)
        except (NoAnswer, OSError):
            raise Broken(f"{self.name} gives no answer to {made.do} within {timeout:.0f} s") from None
        finally:
            with self._changes:
                self._asked.pop(made.id, None)

    def follow(self, run: str, path: str, sink: Sink, position: int = 0) -> int:
        """Give the sink every byte of a file from a position on, each once, over any number of connections."""
        request = messages.Follow(id=next(self._ids), run=run, path=path, position=position)
        with self._changes:
            self._follows[request.id] = request, sink
            is_up = self._is_up
        if is_up:
            self._send(request)
        return request.id

    def unfollow(self, follow: int) -> None:
        with self._changes:
            self._follows.pop(follow, None)
            is_up = self._is_up
        if is_up:
            self._send(messages.Unfollow(id=next(self._ids), follow=follow))

    def put(self, file: Path, code: str, timeout: float = 120) -> bool:
        """Send an archive unless the node has it, from where an earlier attempt broke off. Whether bytes were sent."""
        state = self.ask(messages.Has, timeout, code=code)
        was_here, size, restarts = state.is_here, file.stat().st_size, 0
        with file.open("rb") as source:
            while not state.is_here:
                position = state.size if state.size < size else 0
                source.seek(position)
                piece = source.read(CHUNK_BYTES)
                is_last = position + len(piece) >= size
                data = base64.b64encode(piece).decode()
                fields = {"name": code, "position": position, "data": data, "is_last": is_last}
                before, state = state, self.ask(messages.Put, timeout, **fields)
                restarts += state.size <= before.size
                if restarts > 3 and not state.is_here:
                    raise Refusal(f"{self.name} does not take the archive: it stays at {state.size} bytes; look there")
        return not was_here

    def close(self) -> None:
        with self._changes:
            self._is_closed = True
            self._changes.notify_all()
            process, line = self._process, self._line
        if line:
            line.close()
        if process:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _send(self, message: Message) -> None:
        try:
            with self._sends:
                if self._line is None:
                    raise BrokenPipeError
                self._line.sendall(messages.write(message))
        except OSError:  # the reading thread sees the end, too
            if self._process:
                self._process.kill()

    def _stay_connected(self) -> None:
        while not self._is_closed:
            try:
                self._converse()
            except OSError as error:
                self.trouble = f"{self._command[0]} does not start: {error}"
            with self._changes:
                self._is_up = False
                broken = [answer for _, answer in self._asked.values()]
                self._failures += 1
                self._changes.notify_all()
            for answer in broken:
                if not answer.done():
                    answer.set_exception(Broken(f"{self.name}: the connection broke: {self.trouble}"))
            with self._changes:
                wait = _WAITS[min(self._failures, len(_WAITS)) - 1]
                self._changes.wait_for(lambda: self._is_closed, wait)

    def _converse(self) -> None:
        """One connection, from its start to its end."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_SECONDS)
        pipe = subprocess.PIPE
        with theirs:  # in its own session, so that Ctrl-C in a terminal does not cut the line by which runs are stopped
            process = subprocess.Popen(
                self._command, cwd=self._cwd, stdin=theirs.fileno(), stdout=pipe, stderr=pipe, start_new_session=True
            )
        with self._changes:
            self._process, self._line = process, ours
        said = bytearray()
        errors = threading.Thread(target=_drain, args=(process.stderr, said), daemon=True)
        errors.start()
        hello = messages.Report(id=next(self._ids))
        answer: Future[Any] = Future()
        answer.add_done_callback(self._welcome)
        with self._changes:
            self._asked[hello.id] = hello, answer
        self._send(hello)
        trouble = self._read(process)
        with self._changes:
            self._is_up, self._line = False, None
            self._asked.pop(hello.id, None)
        ours.close()
        if trouble:
            process.kill()
        self.exit_code = process.wait()
        errors.join(1)
        self.trouble = trouble or bytes(said).decode(errors="replace").strip() or f"it ended with {self.exit_code}"

    def _welcome(self, answer: "Future[Any]") -> None:
        """The node has answered the first question: ask for the rest of what was followed."""
        if answer.exception() is not None:
            return
        if (theirs := answer.result().protocol) != messages.PROTOCOL:
            self.trouble = (
                f"it speaks protocol {theirs}, and this is {messages.PROTOCOL}; install the same version there"
            )
            with self._changes:
                self._failures += 1
                self._changes.notify_all()
            return
        with self._changes:
            self.report, self._is_up, self._failures = answer.result(), True, 0
            follows = [request for request, _ in self._follows.values()]
            self._changes.notify_all()
        for request in follows:
            self._send(request)

    def _read(self, process: "subprocess.Popen[bytes]") -> str:
        """Take lines until the end; why the connection has to be given up, or ""."""
        strays = 0
        assert process.stdout
        while line := process.stdout.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                return f"a line of more than {LINE_BYTES} bytes came"
            try:
                strays += not self._take(messages.read_answer(line))
            except ValueError:  # no message, or a sink's or base64's
                strays += 1
            if strays > _MOST_STRAYS:
                return f"more than {_MOST_STRAYS} lines came that answer nothing; is it a node program?"
        return ""

    def _take(self, answer: AnyAnswer) -> bool:
        """Whether the answer was asked for."""
        if answer.id is None:
            return False
        with self._changes:
            followed, asked = self._follows.get(answer.id), self._asked.get(answer.id)
        if followed:
            return self._take_data(answer, *followed)
        if asked is None or asked[1].done():
            return False
        request, future = asked
        if isinstance(answer, messages.Refused):
            future.set_exception(Refusal(f"{self.name}: {printable(answer.why)}"))
        elif not isinstance(answer, ANSWERS[type(request)]):
            future.set_exception(Refusal(f"{self.name} answers {request.do} with {answer.kind}; is it a node program?"))
        else:
            future.set_result(answer)
        return True

    def _take_data(self, answer: AnyAnswer, request: messages.Follow, sink: Sink) -> bool:
        """Only what continues the bytes so far is taken."""
        if isinstance(answer, messages.DataAnswer) and answer.position == request.position:
            piece = base64.b64decode(answer.data, validate=True)
            is_end = answer.is_end
        elif isinstance(answer, messages.Refused):
            piece, is_end = b"", True
        else:
            return False
        with self._changes:
            if request.id not in self._follows:
                return True
            after = request.model_copy(update={"position": request.position + len(piece)})
            if is_end:
                del self._follows[request.id]
            else:
                self._follows[request.id] = after, sink
        sink(request.position, piece, is_end)
        return True


def printable(text: str) -> str:
    """A node's text without what a terminal would obey."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def _drain(stream: Any, said: bytearray) -> None:
    """Keep the last bytes of what ssh says."""
    while piece := stream.read1(2**16):
        said += piece
        del said[:-_ERROR_BYTES]
