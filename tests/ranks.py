"""Ranks that are started once and serve all the tests of the suite: torch's first step costs more than most tests."""

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests import started

ROOT = Path(__file__).parents[1]

START_SECONDS = 200  # of the process that they are forked from, which imports torch
TEST_SECONDS = 100
MOST_THREADS = 40  # of a rank; groups of a compiled run outlive it, and gloo's threads wake 100 times a second for each
_OF_A_LATER_TORCH = "needs torch 2.13"  # what the code refuses on torch 2.11


def serve(pipe: Connection) -> None:
    """What a rank does: `python -m tests.rank`."""
    faulthandler.enable()  # torch's C++ may end a rank by a signal: the test's output then shows where
    gc.unfreeze()  # to find the caches among what was there when this process was forked
    rank, frozen = int(os.environ["RANK"]), _caches_of_torch()
    gc.freeze()  # what is loaded by now is no test's: not to be looked through after each
    pipe.send("ready")
    while True:
        try:
            function, world_size, port, args = pipe.recv()
        except (EOFError, ConnectionResetError):  # the tests have ended
            return
        os.environ |= {"WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
        try:
            answer = function(rank, world_size, *args), None
        except BaseException:
            answer = None, traceback.format_exc()
        finally:
            _forget(frozen)
        pipe.send_bytes(pickle.dumps(answer))  # tensors by value


def _caches_of_torch() -> list[Any]:
    kind = functools._lru_cache_wrapper
    return [o for o in gc.get_objects() if type(o) is kind and str(o.__module__).startswith("torch.distributed")]


def _forget(frozen: list[Any]) -> None:
    """End what a test has started. gloo polls with a thread a group, and torch's caches know groups long gone."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    for thread in threading.enumerate():
        if thread.name == "watch":  # of a run that ended before its loop; it would end this process later
            thread._target.__self__.__exit__(None, None, None)  # type: ignore[attr-defined]
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    gc.enable()  # a run turns it off
    for cache in [*frozen, *_caches_of_torch()]:
        cache.cache_clear()
    torch._dynamo.reset()
    gc.collect()


class Ranks:
    """Calls `function(rank, world_size, *args)` on the first ranks and returns their answers.

    As many are started as a test has asked for so far.
    """

    def __init__(self, num_ranks: int = 4) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._start(num_ranks)

    def _start(self, num_ranks: int) -> None:
        # as under torchrun: who starts the ranks serves their store
        env = os.environ | {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        folders = (path for path in sys.path if Path(path).is_relative_to(ROOT / "tests"))
        env["PYTHONPATH"] = os.pathsep.join(folders)  # a test's functions are found by the name of its file
        new = range(len(self._pipes), num_ranks)
        for rank in map(str, new):
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-m", "tests.rank", str(theirs.fileno())]
            own = {"RANK": rank, "LOCAL_RANK": rank}
            self._processes.append(started.Popen(command, cwd=ROOT, env=env | own, pass_fds=[theirs.fileno()]))
            self._pipes.append(ours)
            theirs.close()
        for pipe in self._pipes[new.start :]:
            assert pipe.poll(START_SECONDS) and pipe.recv() == "ready"

    def __call__(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        self._start(world_size)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes[:world_size]:
            pipe.send((function, world_size, store.port, args))
        answers, errors = [], []
        for rank, pipe in enumerate(self._pipes[:world_size]):
            # After one rank's error the others may hang in a collective; they get a moment to say why they do.
            if not pipe.poll(5 if errors else TEST_SECONDS):
                errors.append(f"rank {rank} gave no answer")
                continue
            try:
                answer, error = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                answer, error = None, "its process has died"
            answers.append(answer)
            errors += [f"rank {rank}: {error}"] if error else []
        if errors and all(_OF_A_LATER_TORCH in error for error in errors):  # before any rank waited for another
            pytest.skip(_OF_A_LATER_TORCH)
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))
        tasks = [Path(f"/proc/{process.pid}/task") for process in self._processes]  # only Linux has them
        if any(len([*threads.glob("*")]) > MOST_THREADS for threads in tasks):
            self.stop()
        return answers

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._pipes, self._processes = [], []


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()
