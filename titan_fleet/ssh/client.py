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

from titan_fleet.node import messages
from titan_fleet.node.messages import CHUNK_BYTES, LINE_BYTES, AnyAnswer, Message, ReportAnswer, ValidationError
from torchtitan.foreign import printable
from torchtitan.refusal import Refusal

_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\]-]*")
# No question on a terminal; a dead line is noticed within 45 s; nothing is forwarded.
_OPTIONS = ["-T", "-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=15", "-oServerAliveCountMax=3"]
_OPTIONS += ["-oClearAllForwardings=yes"]
_SEND_SECONDS = 60  # a node that takes no byte for so long is given up
_MOST_STRAYS = 100  # lines of a connection that answer nothing, such as a greeting
_WAITS = (0.5, 1, 2, 5, 10, 20, 30)  # seconds between attempts to connect
_SECONDS_TO_CLOSE = 5
_FOLLOW_SECONDS = 0.2  # between questions whether a followed file has grown
_REFUSED_SECONDS = 2  # the same, after the node could not read the file
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
    """One node. Its methods may be called from any thread; each sink is called from a thread of its own."""

    def __init__(self, name: str, command: Sequence[str], cwd: Path | None = None) -> None:
        self.name, self._command, self._cwd = name, list(command), cwd
        self.report: ReportAnswer | None = None  # of the newest connection
        self.trouble = ""  # why there is no connection
        self.exit_code: int | None = None  # of the last connection
        self._ids = itertools.count(1)
        self._changes = threading.Condition()
        self._asked: dict[int | None, tuple[messages.Request, Future[Any]]] = {}  # over this connection
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._is_up = self._is_closed = False
        self._failures = 0
        self._sends, self._puts = threading.Lock(), threading.Lock()
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
            self._changes.wait_for(lambda: self._is_up or self._is_closed, timeout)
            if not self._is_up or self._is_closed:
                raise Broken(f"{self.name} is not connected: {self.trouble or 'it was closed'}")
            answer = self._expect(made)
        try:
            self._send(made)
            return answer.result(timeout)
        except NoAnswer:
            raise Broken(f"{self.name} gives no answer to {made.do} within {timeout:.0f} s") from None
        finally:
            with self._changes:
                self._asked.pop(made.id, None)

    def follow(self, run: str, path: str, sink: Sink, position: int = 0) -> None:
        """Give the sink every byte of a file from a position on, each once, over any number of connections."""
        threading.Thread(target=self._follow, args=(run, path, sink, position), daemon=True).start()

    def _follow(self, run: str, path: str, sink: Sink, position: int) -> None:
        is_end = was_over = False
        while not (is_end or self._is_closed):
            piece, seconds = b"", _FOLLOW_SECONDS
            try:
                answer = self.ask(messages.Follow, run=run, path=path, position=position)
                piece, is_end, was_over = base64.b64decode(answer.data), answer.is_end, False
            except Broken:  # ask again for the same bytes
                pass
            except Refusal:  # of a run that was deleted; or a disk fails for a moment, while the run goes on
                is_end, seconds = was_over, _REFUSED_SECONDS
                was_over = was_over or not self._may_run(run)
            if piece or is_end:
                sink(position, piece, is_end)
                position += len(piece)
            else:
                self._pause(seconds)

    def _may_run(self, run: str) -> bool:
        try:
            return any(row.run == run and row.state == "running" for row in self.ask(messages.Runs).runs)
        except Refusal:
            return True

    def put(self, file: Path, code: str, timeout: float = 120) -> bool:
        """Send an archive unless the node has it. Whether bytes were sent."""
        if self.ask(messages.Has, timeout, code=code).is_here:
            return False
        size, position = file.stat().st_size, 0
        with self._puts, file.open("rb") as source:  # a node takes one archive at a time
            while piece := source.read(CHUNK_BYTES):
                fields = {"position": position, "data": base64.b64encode(piece).decode()}
                position += len(piece)
                if self.ask(messages.Put, timeout, name=code, is_last=position >= size, **fields).is_here:
                    return True
        raise Refusal(f"{self.name} has taken all of the archive, and does not have it; look there")

    def close(self) -> None:
        with self._changes:
            self._is_closed = True
            self._changes.notify_all()
            if self._line:
                self._line.close()  # on which the node program ends
        if self._thread.is_alive():
            self._thread.join(_SECONDS_TO_CLOSE)
            if self._process:
                self._process.kill()
            self._thread.join(_SECONDS_TO_CLOSE)

    def _expect(self, request: messages.Request) -> "Future[Any]":
        answer: Future[Any] = Future()
        self._asked[request.id] = request, answer
        return answer

    def _send(self, message: Message) -> None:
        assert self._line and self._process
        try:
            with self._sends:
                self._line.sendall(messages.write(message))
        except OSError:  # half a line may have gone: the reading thread sees the end, and connects again
            self._process.kill()

    def _pause(self, seconds: float) -> None:
        with self._changes:
            self._changes.wait_for(lambda: self._is_closed, seconds)

    def _stay_connected(self) -> None:
        while not self._is_closed:
            try:
                self._converse()
            except OSError as error:
                self.trouble = f"{self._command[0]} does not start: {error}"
            with self._changes:
                self._is_up = False
                broken, self._asked = self._asked, {}
                self._failures += 1
                self._changes.notify_all()
            for _, answer in broken.values():
                answer.set_exception(Broken(f"{self.name}: the connection broke: {self.trouble}"))
            self._pause(_WAITS[min(self._failures, len(_WAITS)) - 1])

    def _converse(self) -> None:
        """One connection, from its start to its end."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_SECONDS)
        pipe = subprocess.PIPE
        with theirs:  # in its own session, so that Ctrl-C in a terminal does not cut the line by which runs are stopped
            process = subprocess.Popen(
                self._command, cwd=self._cwd, stdin=theirs.fileno(), stdout=pipe, stderr=pipe, start_new_session=True
            )
        said = bytearray()
        errors = threading.Thread(target=_drain, args=(process.stderr, said), daemon=True)
        errors.start()
        hello = messages.Report(id=next(self._ids))
        with ours:
            with self._changes:
                self._process, self._line = process, ours
                answer = self._expect(hello)
            self._send(hello)
            trouble = ""
            try:
                self._read(process, answer)
            except Refusal as error:
                trouble = str(error)
                process.kill()
        self.exit_code = process.wait()
        errors.join(1)
        heard = printable(bytes(said).decode(errors="replace")).strip()
        self.trouble = trouble or heard or f"it ended with {self.exit_code}"

    def _read(self, process: "subprocess.Popen[bytes]", hello: "Future[Any]") -> None:
        """Take lines until the end; raises Refusal where the connection has to be given up."""
        strays = 0
        assert process.stdout
        while line := process.stdout.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise Refusal(f"a line of more than {LINE_BYTES} bytes came")
            try:
                strays += not self._take(messages.read_answer(line))
            except ValidationError:
                strays += 1
            if strays > _MOST_STRAYS:
                raise Refusal(f"more than {_MOST_STRAYS} lines came that answer nothing; is it a node program?")
            if hello.done() and not self._is_up:
                self._welcome(hello.result())

    def _welcome(self, report: ReportAnswer) -> None:
        if (theirs := report.protocol) != (ours := messages.PROTOCOL):
            raise Refusal(f"it speaks protocol {theirs}, and this is {ours}; install the same version there")
        with self._changes:
            self.report, self._is_up, self._failures = report, True, 0
            self._changes.notify_all()

    def _take(self, answer: AnyAnswer) -> bool:
        """Whether the answer was asked for."""
        with self._changes:
            request, future = self._asked.pop(answer.id, (None, None))
        if request is None or future is None:
            return False
        if isinstance(answer, messages.Refused):
            future.set_exception(Refusal(f"{self.name}: {answer.why}"))
        elif answer.kind != request.do:
            future.set_exception(Refusal(f"{self.name} answers {request.do} with {answer.kind}; is it a node program?"))
        else:
            future.set_result(answer)
        return True


def _drain(stream: Any, said: bytearray) -> None:
    """Keep the last bytes of what ssh says."""
    while piece := stream.read1(2**16):
        said += piece
        del said[:-_ERROR_BYTES]
