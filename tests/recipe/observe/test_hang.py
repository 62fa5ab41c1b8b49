"""Which rank lags: read from stacks, decided, and reported in one message; and the settings of NCCL's recorder."""

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from torchtitan.config.schema import Comm
from torchtitan.observe.peers import beats, watch
from torchtitan.observe.peers.hang import Whereabouts, describe, find_laggards, locate, ranges
from torchtitan.observe.peers.verdict import Verdict
from torchtitan.training.flight_recorder import flight_recorder


def at(step: int, collective: str = "all_reduce", place: str = "train.py:1 (main)", error: str = "") -> Whereabouts:
    return Whereabouts(step, collective, place, error)


@pytest.mark.parametrize(
    ("known", "world_size", "laggards", "sign"),
    [
        ({0: at(5), 1: at(5, ""), 2: at(5)}, 3, [1], "in no collective"),
        ({0: at(5), 2: at(5, "")}, 3, [1], "no answer"),
        ({0: at(5), 1: at(5), 2: at(4)}, 3, [2], "at an earlier step"),
        ({0: at(5), 1: at(5, "barrier"), 2: at(5)}, 3, [1], "not in the collective of most"),
        ({0: at(5), 1: at(5), 2: at(5, place="train.py:2 (main)")}, 3, [2], "not in the collective of most"),
        ({0: at(5), 1: at(5, "barrier")}, 2, [], ""),
        ({0: at(5), 1: at(5)}, 2, [], ""),
    ],
)
def test_the_surest_sign_decides_who_lags(
    known: dict[int, Whereabouts], world_size: int, laggards: list[int], sign: str
) -> None:
    assert find_laggards(known, world_size) == (laggards, sign)


def test_the_message_names_the_laggard_first_and_ranks_in_the_same_place_once() -> None:
    known = {rank: at(7, error=f"Connection closed by peer {rank}") for rank in range(1000)}
    del known[3]
    message = describe(known, {rank: f"process {rank} on node" for rank in range(1000)}, 70.4, Path("out/hang"))
    assert message.splitlines() == [
        "no progress for 70 s at step 7: rank 3 lags (no answer), others wait in all_reduce",
        "  rank 3 is process 3 on node",
        "  ranks 0-2, 4-999: step 7, in all_reduce, called from train.py:1 (main): Connection closed by peer 0",
        "  a process without an answer has ended, is stopped, or is in a call that holds Python's lock",
        "  each rank's stacks: out/hang/rank_N.txt; what to do: docs/recipe/debugging.md",
    ]
    late = {0: at(7, error="Timed out"), 1: at(7, ""), 2: at(7, error="Timed out")}
    assert "Timed out" not in describe(late, dict.fromkeys(range(3), "p"), 9, Path("hang"))
    many = describe(
        {0: at(7)} | {rank: at(7, "") for rank in range(1, 9)}, dict.fromkeys(range(9), "p"), 9, Path("hang")
    )
    assert "ranks 1-8 lag (in no collective)" in many and "  rank 4 is" in many and "  rank 5 is" not in many
    assert "no rank lags, all wait for each other in all_reduce" in describe({0: at(7)}, {0: "p"}, 9, Path("hang"))


def test_ranks_are_written_as_ranges() -> None:
    assert [ranges(ranks) for ranks in ([4], [0, 1], [5, 0, 2, 1])] == ["rank 4", "ranks 0-1", "ranks 0-2, 5"]


def test_a_stack_is_read_from_the_inside_up_to_the_first_line_of_this_project() -> None:
    def stack() -> Whereabouts:
        return locate(3, traceback.walk_stack(sys._getframe()))

    def called_in(file: str) -> Whereabouts:
        scope: dict[str, Callable[..., Whereabouts]] = {}
        code = "def all_reduce():\n    return locate(3, traceback.walk_stack(sys._getframe()))"
        exec(compile(code, file, "exec"), {"locate": locate, "traceback": traceback, "sys": sys}, scope)
        return scope["all_reduce"]()

    assert stack().place.startswith("tests/recipe/observe/test_hang.py:") and stack().place.endswith(" (stack)")
    assert stack().collective == ""
    for packages in ("/somewhere", str(Path(__file__).parents[3] / ".venv/lib/python3/site-packages")):
        where = called_in(f"{packages}/torch/distributed/distributed_c10d.py")
        assert where.collective == "all_reduce" and where.place.endswith(" (called_in)")
    assert str(where).startswith("step 3, in all_reduce, called from tests/recipe/observe/test_hang.py:")
    assert called_in("/somewhere/torch/nn/functional.py").collective == ""
    assert locate(3, []).place == "code outside this project"


def test_nccl_writes_its_last_collectives_to_the_run_folder(tmp_path: Path) -> None:
    comm = Comm(trace_buf_size=99, save_traces_folder="nccl", save_traces_file_prefix="r")
    assert flight_recorder(comm, tmp_path) == {
        "TORCH_FR_BUFFER_SIZE": "99",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl/r",
    }
    assert (
        flight_recorder(Comm(), Path("outputs"))["TORCH_FR_DUMP_TEMP_FILE"] == f"{Path.cwd()}/outputs/comm_traces/rank_"
    )
    assert flight_recorder(Comm(trace_buf_size=0), tmp_path)["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_looking_at_a_step_keeps_none_of_its_tensors() -> None:
    """A run switches garbage collection off, so a reference cycle would keep more memory with every look."""

    class Activation:
        pass

    looker = watch.Watch.__new__(watch.Watch)
    looker.step, looker._verdict, looker._loop = 1, Verdict(), threading.get_ident()
    looker._reads = False

    def step() -> weakref.ref:
        activation = Activation()
        look = threading.Thread(target=looker._where)
        look.start()
        look.join()
        return weakref.ref(activation)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("has_gpu", "step", "where", "is_long"),
    [
        (False, 5, at(5), True),
        (False, 5, at(5, ""), False),
        (True, 5, at(5, ""), True),  # a GPU takes no more work until its collective ends
        (True, 1, at(1, ""), False),  # the first step compiles
    ],
)
def test_a_rank_that_stands_still_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, step: int, where: Whereabouts, is_long: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: has_gpu)
    rank = object.__new__(watch.Watch)
    rank.step, rank._timeout_seconds, rank._saves, rank._where = step, 100, False, lambda: where
    assert rank._waits_long(71) is is_long and not rank._waits_long(69)
    with rank.saving():  # a slow disk is no hang
        assert not rank._waits_long(71)


def test_rank_0_hears_all_ranks_and_they_hear_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    board = dist.HashStore()
    first, second, third = ranks = [beats.Beats(board, rank, 3) for rank in range(3)]
    seconds = 0.0
    monkeypatch.setattr(beats.time, "monotonic", lambda: seconds)
    first.beat()
    assert first.silent(5) == []  # not all have come yet
    second.beat()
    third.beat("left")
    assert [rank.silent(5) for rank in ranks] == [[], [], []]
    for seconds in (2.0, 4.0, 6.0):  # noqa: B007 - the clock reads it
        first.beat()
        heard = [rank.silent(5) for rank in ranks]
    assert heard == [[1], [], []]
    for seconds in (8.0, 10.0, 12.0):  # noqa: B007
        second.beat()
        heard = [rank.silent(5) for rank in ranks]
    assert heard == [[0], [0], [0]]
    seconds = 100.0  # all stood still, as on a machine that slept
    assert [rank.silent(5) for rank in ranks] == [[], [], []]
