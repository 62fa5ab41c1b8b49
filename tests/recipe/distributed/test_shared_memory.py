"""What FSDP exchanges through shared memory is what gloo would bring, and where there is none gloo does."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from torchtitan.parallel.collectives import start_process_group
from torchtitan.parallel.fsdp import ReduceScatterOfOne
from torchtitan.parallel.shared_memory import SharedMemory
from torchtitan.refusal import Refusal


def in_shared_memory() -> set[Path]:
    return {*Path("/dev/shm").glob("torchtitan-*")}


def is_left_as(before: set[Path]) -> bool:
    """Another test's ranks may have files there, for a moment."""
    end = time.monotonic() + 10
    while not (is_so := in_shared_memory() <= before) and time.monotonic() < end:
        time.sleep(0.1)
    return is_so


@pytest.mark.parametrize("folder_of_rank_1", ["/dev/shm", "/no/such/folder"])
def test_ranks_of_one_machine_exchange_what_gloo_would_bring(ranks: Ranks, folder_of_rank_1: str) -> None:
    before = in_shared_memory()
    for shared, came, expected in ranks(cases.exchange, 3, folder_of_rank_1):
        assert shared is (folder_of_rank_1 == "/dev/shm")
        for one, other in zip(came, expected, strict=True):
            assert torch.equal(one, other)
    assert is_left_as(before)


def test_nothing_is_left_behind_where_another_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    class Group:
        rank, size = (lambda self: 0), (lambda self: 2)

    before = in_shared_memory()
    monkeypatch.setattr(dist, "broadcast_object_list", fail)
    with pytest.raises(RuntimeError, match="closed by peer"):
        SharedMemory(Group()).parts(10, torch.uint8)  # type: ignore[arg-type]
    assert is_left_as(before)


def test_a_gloo_group_has_one_thread_for_two_may_break_the_heap(ranks: Ranks) -> None:
    assert ranks(cases.threads_of_gloo, 2) == [[1, 1]] * 2


def test_an_interface_that_is_misspelt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eht0")
    with pytest.raises(Refusal, match="GLOO_SOCKET_IFNAME = eht0 is no interface here; `ip address` lists them"):
        start_process_group(torch.device("cpu"), 0, 1, 60)


def test_on_one_rank_input_and_output_are_one() -> None:
    device = torch.device("cpu")
    reduce_scatter = ReduceScatterOfOne()
    first, second = (reduce_scatter.allocate((4,), dtype=torch.float32, device=device) for _ in range(2))
    assert first is second
    assert reduce_scatter.allocate((4,), dtype=torch.float32, device=device) is not first
    with pytest.raises(AssertionError, match="one rank"):
        reduce_scatter(first, second)
