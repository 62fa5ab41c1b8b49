"""Attention that keeps documents apart, against attention under a mask of the whole square."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.data.documents import document_starts
from torchtitan.models.layers import CausalAttention
from torchtitan.parallel.documents import pieces
from torchtitan.parallel.documents.attention import attend, document_mask
from torchtitan.parallel.gpu_attention import by_flash_attention

CUTS = {
    "one document": [[0, 700]],
    "long and short": [[0, 30, 330, 331, 350, 352, 620, 700], [0, 512, 513, 700]],
    "many short": [[*range(0, 700, 3), 700], [*range(0, 700, 7), 700]],
    "no two tokens together": [list(range(701))],
}


def starts_of(cuts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The starts, and the number of each position's document."""
    numbers = np.stack([np.repeat(np.arange(len(cut) - 1), np.diff(cut)) for cut in cuts]).astype(np.int32)
    return torch.from_numpy(document_starts(numbers)), torch.from_numpy(numbers)


def results(attention, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(*inputs)
    out.backward(torch.cos(torch.arange(out.numel()).view_as(out)).to(out.dtype))
    return [out.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_starts_are_the_first_positions_of_documents_and_then_the_length(cuts: list[list[int]]) -> None:
    starts, _ = starts_of(cuts)
    for row, cut in zip(starts.tolist(), cuts, strict=True):
        assert row == cut + [cut[-1]] * (len(row) - len(cut))


@pytest.mark.parametrize("part", [(0, 700), (175, 350), (525, 700)], ids=["all", "middle", "end"])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [*((name, torch.float32, 1e-5) for name in CUTS), ("long and short", torch.bfloat16, 3e-2)],
)
def test_pieces_equal_the_mask(name: str, part: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    """Also of a part's queries over all keys so far, as a rank of context parallelism has them."""
    torch.manual_seed(0)
    (starts, numbers), (first, end) = starts_of(CUTS[name]), part
    shapes = (len(starts), end - first, 4, 16), (len(starts), end, 2, 16), (len(starts), end, 2, 16)
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]
    seen = numbers[:, first:end, None] == numbers[:, None, :end]
    mask = (seen & (torch.arange(end) <= torch.arange(first, end)[:, None]))[:, None]
    assert (document_mask(starts, first, end) == mask).all()
    expected = results(lambda q, k, v: CausalAttention()(q, k, v, mask), *(tensor.float() for tensor in drawn))
    for ours, reference in zip(results(lambda q, k, v: attend(q, k, v, starts, None), *drawn), expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - reference).abs().max() <= tolerance * max(reference.abs().max(), 1)


def test_the_operation_is_what_torch_expects_of_one() -> None:
    """Its fake form, gradients and compiled form agree with it."""
    inputs = [torch.randn(40, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 3, 30, 40, 40], dtype=torch.int32)
    torch.library.opcheck(pieces.document_attention, (*inputs, starts, starts))


def test_other_documents_compile_nothing_again() -> None:
    """Nor more of them, once there have been more."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *inputs: attend(*inputs, None), backend=counter, fullgraph=True)
    counts = []
    for size in (100, 350, 33, 7, 3, 2, 1):
        cuts = [[*range(0, 700, size), 700]]
        q, k, v = (torch.randn(1, 700, heads, 16) for heads in (4, 2, 2))
        results(lambda q, k, v, cuts=cuts: compiled(q, k, v, starts_of(cuts)[0]), q, k, v)
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 2, 2, 2, 2]


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    """What the largest tensor is, forward and backward."""
    largest = []
    for length in (512, 2048):
        starts, _ = starts_of([[*range(0, length, 256), length]])
        q, k, v = (torch.randn(1, length, heads, 16, requires_grad=True) for heads in (2, 1, 1))
        with torch.profiler.profile(profile_memory=True) as profile:
            attend(q, k, v, starts, None).sum().backward()
        largest.append(max(event.self_cpu_memory_usage for event in profile.events()))
    assert 0 < largest[1] <= 4.5 * largest[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_takes_what_it_is_given(dtype: torch.dtype) -> None:
    """As far as a CPU knows: names, types and shapes, forward and backward, of a part and of whole sequences."""
    with FakeTensorMode():
        for num_queries in (64, 16):
            q = torch.empty(2 * num_queries, 4, 16, dtype=dtype, requires_grad=True)
            k, v = (torch.empty(2 * 64, 2, 16, dtype=dtype, requires_grad=True) for _ in range(2))
            bounds = torch.empty(9, dtype=torch.int32)
            out = by_flash_attention(q, k, v, bounds, bounds, num_queries, 64)
            out.sum().backward()
            assert out.shape == q.shape and out.dtype == dtype
            assert k.grad is not None and k.grad.shape == k.shape


def test_bounds_cover_every_query_and_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's gradients of keys in no document would hold no value, so all keys are in one."""
    found: list[tuple[Tensor, Tensor]] = []
    kernel = pieces.document_attention
    monkeypatch.setattr(
        "torchtitan.parallel.documents.attention.document_attention",
        lambda *inputs: found.append(inputs[3:]) or kernel(*inputs),
    )
    starts, _ = starts_of(CUTS["long and short"])
    for first, end in ((0, 700), (175, 350), (525, 700)):
        q, k, v = torch.randn(2, end - first, 4, 16), torch.randn(2, end, 2, 16), torch.randn(2, end, 2, 16)
        attend(q, k, v, starts, None)
        for bounds, length in zip(found[-1], (end - first, end), strict=True):
            assert bounds[0] == 0 and bounds[-1] == 2 * length and bounds.dtype == torch.int32
            assert all(0 <= after - before <= length for before, after in pairwise(bounds.tolist()))
