"""Starts Python programs without the seconds that importing torch takes: a process that has it forks for each.

    started.run([sys.executable, "train.py", ...])      as subprocess.run
    started.Popen([sys.executable, "-m", ...])          as subprocess.Popen

    [*started.IN_PLACE, "-m", ...]                      is started itself, in a namespace say, and forks what it starts
    PYTHON=started.python(folder) ./run_llama_train.sh  likewise

The process that forks is called the nursery. It runs no thread, so its children are as good as new. A child gets the
arguments, environment, folder, descriptors and session that it would have got, and its parent is the caller, so pid,
signals and exit code are real. What it starts itself (compare its runs, torchrun its ranks) is forked, too.
A child differs in this: environment variables that torch reads at import come too late, its peak memory begins at the
nursery's, and all children draw the same hashes of strings. Tests of these use subprocess.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
_REAL, _real_execve = subprocess.Popen, os.execve
IN_PLACE = [sys.executable, __file__, "." * 10000]  # the dots are room for the commands that /proc shows
_OURS = "__main__ launch.ranks models.decoder.parallelize observe.profiling observe.peers.watch training.assemble"
_OURS += " training.checkpoints.saves training.report training.update training.validate"  # train.py's main imports them
_IMPORTED = "train", *[f"torchtitan.{name}" for name in _OURS.split()], "tests.recipe.distributed.cases"
_USED = "torch.distributed.run", "torch.utils.tensorboard", "torch._inductor.compile_fx", "tokenizers", "PIL.ImageDraw"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_lock = threading.Lock()
_nursery: socket.socket | None = None


class Popen(_REAL):
    """A process of this Python is forked; any other is started."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *others: Any) -> None:
        pass_fds, cwd, env, _, _, _, stdin, to_stdin, from_stdout, stdout, from_stderr, stderr, _, *last = others
        if isinstance(args, str) or not _is_python(args, cwd):
            return super()._execute_child(args, executable, preexec_fn, close_fds, *others)
        streams = {0: stdin, 1: stdout, 2: stderr}
        fds = {to: to if fd == -1 else fd for to, fd in streams.items()} | {int(fd): int(fd) for fd in pass_fds}
        words = [os.fsdecode(word) for word in args]
        job = {"argv": words, "env": dict(os.environ if env is None else env), "cwd": os.fspath(cwd or os.getcwd())}
        job |= {"fds": list(fds), "preexec": preexec_fn, "session": last[4], "parent": os.getpid()}
        self.pid = _fork(pickle.dumps(job), list(fds.values()))
        self._child_created = True
        self._close_pipe_fds(stdin, to_stdin, from_stdout, stdout, from_stderr, stderr)


def run(
    command: Sequence[str | Path], *, timeout: float | None = None, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[Any]":
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            done = subprocess.CompletedProcess(command, 0, *process.communicate(timeout=timeout))
        except BaseException:
            process.kill()
            raise
    done.returncode = process.returncode
    if check:
        done.check_returncode()
    return done


def python(folder: Path) -> str:
    """A file that stands for this Python where a script is given one: the package's programs fork what they start."""
    file = folder / "python"
    real, forks = (" ".join(f"'{word}'" for word in words) for words in ([sys.executable], IN_PLACE))
    file.write_text(f"""#!/bin/sh\ncase "$1 $2" in "-m torchtitan"*) exec {forks} "$@" ;; esac\nexec {real} "$@"\n""")
    file.chmod(0o755)
    return str(file)


def _is_python(args: Sequence[Any], cwd: Any) -> bool:
    name = os.path.join(cwd or "", os.fspath(args[0]))
    words = [word for word in args[1:3] if word != "-u"]
    is_known = bool(words) and (words[0] == "-m" or str(words[0]).endswith(".py"))
    return sys.platform == "linux" and is_known and os.path.abspath(name) == os.path.abspath(sys.executable)


def _fork(job: bytes, fds: list[int]) -> int:
    """Have the nursery fork, while this process is the one that orphans below it are given to."""
    global _nursery
    prctl = ctypes.CDLL(None).prctl
    with _lock:
        if _nursery is None:
            _nursery = _start_nursery()
        prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_nursery, [len(job).to_bytes(4, "big")], fds)
            _nursery.sendall(job)
            answer = _nursery.recv(4)
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the process that forks the tests' programs has died"
    return int.from_bytes(answer, "big")


def _start_nursery() -> socket.socket:
    ours, theirs = socket.socketpair()
    process = _REAL(IN_PLACE, stdin=theirs, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    theirs.close()
    atexit.register(_end_nursery, ours, process.pid)
    return ours


def _end_nursery(nursery: socket.socket, pid: int) -> None:
    nursery.close()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# What follows runs in the nursery and in its children.


class _Program(BaseException):
    """What a process becomes instead of what it does now: the counterpart of os.execve."""

    def __init__(self, argv: Sequence[Any], env: Any) -> None:
        self.argv, self.env = [os.fspath(word) for word in argv], dict(env)


def _serve(calls: socket.socket) -> _Program:
    """Fork for each call, until the caller is gone. Returns in each child, with what it is to run."""
    while True:
        size, fds, _, _ = socket.recv_fds(calls, 4, 64)
        if not size:
            os._exit(0)
        job = pickle.loads(calls.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        number, numbered = os.pipe()
        adopted, adopt = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(numbered, child.to_bytes(4, "big"))
                os._exit(0)  # an orphan now, the child is given to the caller
            for fd in (number, numbered, adopt):
                os.close(fd)
            calls.close()
            os.read(adopted, 1)
            os.close(adopted)
            if os.getppid() != job["parent"]:  # the caller was killed meanwhile
                os._exit(1)
            return _begin(job, fds)
        for fd in (numbered, adopted, *fds):
            os.close(fd)
        os.waitpid(between, 0)
        calls.sendall(os.read(number, 4))
        os.close(number)
        os.close(adopt)


def _fork_nursery(fds: list[int]) -> _Program | None:
    """Fork a nursery for what this process will start; with threads it could not. Returns in its children, too."""
    global _nursery
    _nursery, calls = socket.socketpair()
    if pid := os.fork():
        calls.close()
        atexit.register(_end_nursery, _nursery, pid)
        return None
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for fd in (nothing, *fds, _nursery.detach()):
        os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _serve(calls)


def _begin(job: dict[str, Any], fds: list[int]) -> _Program:
    """Take over what the caller gives."""
    if job["session"]:
        os.setsid()
    if inherited := _fork_nursery(fds):
        return inherited
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in fds]  # numbers that none of them is to get
    for fd in fds:
        os.close(fd)
    for fd, to in zip(above, job["fds"], strict=True):
        os.dup2(fd, to)
        os.close(fd)
    os.chdir(job["cwd"])
    if job["preexec"]:
        job["preexec"]()
    return _Program(job["argv"], job["env"])


def _be(program: _Program) -> None:
    """Run as if Python had been started with these arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program.env)
    argv = program.argv[1:]
    is_unbuffered = argv[0] == "-u" or "PYTHONUNBUFFERED" in os.environ
    argv = argv[argv[0] == "-u" :]
    sys.stdout.reconfigure(line_buffering=is_unbuffered or os.isatty(1))
    _show(program.argv)
    os.execve = lambda path, argv, env: _become(path, argv, env)
    os.execv = lambda path, argv: _become(path, argv, os.environ)
    is_module = argv[0] == "-m"
    sys.argv = argv = argv[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(argv[0]))
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if is_module:
        for name in (argv[0], f"{argv[0]}.__main__"):
            sys.modules.pop(name, None)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


def _become(path: Any, argv: Sequence[Any], env: Any) -> NoReturn:
    if _is_python([path, *argv[1:]], None):
        raise _Program(argv, env)
    _real_execve(path, argv, env)


def _end(error: BaseException | None) -> NoReturn:
    """End as Python does, but for taking torch apart, which costs 0.25 s."""
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    if isinstance(error, SystemExit) and isinstance(code, str):
        print(code, file=sys.stderr)
    elif error and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255 if isinstance(code, int) else int(code is not None))


def _show(argv: list[str]) -> None:
    """Let /proc/PID/cmdline, and so ps, show this command: some programs find their processes by it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join(argv).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen = Popen
    sys.path.insert(1, str(ROOT))
    for name in (*_IMPORTED, *_USED):
        importlib.import_module(name)
    torch, hardware = sys.modules["torch"], sys.modules["torchtitan.hardware"]
    for dtype in (torch.float32, torch.bfloat16):
        hardware.find_peak(torch.device("cpu"), dtype)  # each run would measure it
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()
    if words := sys.argv[2:]:
        program = _fork_nursery([]) or _Program([sys.executable, *words], os.environ)
    else:
        program = _serve(socket.socket(fileno=os.dup(0)))
    while True:
        try:
            _be(program)
            _end(None)
        except _Program as other:
            program = other
        except BaseException as error:
            _end(error)
