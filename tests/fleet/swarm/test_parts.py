"""The pure parts of a swarm: fragments, codecs, the outer step, and what the syncer decides."""

import itertools
import json
import random
import struct
from xml.etree import ElementTree

import pytest
import torch

from titan_fleet.swarm import codec, decide, wire
from titan_fleet.swarm.drawing import TRAINING, TRAVELLING, WAITING, Trip, draw
from titan_fleet.swarm.fragments import Box, Weight, as_matrix, box_of, checksum, divide, held_of
from titan_fleet.swarm.messages import Anchor, read
from titan_fleet.swarm.outer import Outer, mixed
from torchtitan.refusal import Refusal

WEIGHTS = [Weight("a", (7, 300)), Weight("b", (64,)), Weight("c", (40, 3)), Weight("d", (64, 64))]
CODECS = ["float32", "bfloat16", "int8", "int4"]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fragments_hold_every_number_once_and_are_about_equal(count):
    fragments = divide(WEIGHTS, count)
    places = [(b.weight, row) for boxes in fragments for b in boxes for row in range(b.row, b.end_row)]
    assert sorted(places) == [(n, row) for n, weight in enumerate(WEIGHTS) for row in range(weight.rows)]
    sizes = [sum(box.size for box in boxes) for boxes in fragments]
    assert max(sizes) - min(sizes) <= 2 * 300  # a row of the widest weight


def test_too_many_fragments_are_refused():
    with pytest.raises(Refusal, match="fragment 0 would be empty; use fewer"):
        divide([Weight("a", (1, 8)), Weight("b", (8,))], 4)


def test_ranks_of_any_layout_hold_each_number_of_a_fragment():
    """Rows by FSDP, columns by tensor parallelism, a weight of one dimension by its only one."""
    quarters = [[box_of(3, (64, 64), (32 * r, 32 * c), (32, 32), "d")] for r in (0, 1) for c in (0, 1)]
    halves = [[box_of(1, (64,), (32 * r,), (32,), "b"), box_of(2, (40, 3), (20 * r, 0), (20, 3), "c")] for r in (0, 1)]
    for fragment in divide(WEIGHTS, 3):
        whole = [box for box in fragment if box.weight == 3]
        assert sum(b.size for q in quarters for b in held_of(fragment, q)) == sum(b.size for b in whole)
        whole = [box for box in fragment if box.weight in (1, 2)]
        assert sum(b.size for h in halves for b in held_of(fragment, h)) == sum(b.size for b in whole)
    assert as_matrix((8, 3, 3, 3)) == (8, 27) and as_matrix((5,)) == (1, 5) and as_matrix(()) == (1, 1)
    with pytest.raises(Refusal, match="conv has the size .8, 4, 3., and tensor parallelism cuts it otherwise"):
        box_of(0, (8, 4, 3), (0, 2, 0), (8, 2, 3), "conv")


@pytest.mark.parametrize(("kind", "error"), [("float32", 0), ("bfloat16", 4e-3), ("int8", 4.5e-3), ("int4", 8e-2)])
def test_numbers_arrive_within_the_error_of_their_codec(kind, error):
    torch.manual_seed(0)
    values = torch.randn(7, 300) * torch.logspace(-6, 3, 7)[:, None]
    values[3] = 0
    codes, scales = codec.encode(values, kind)
    data = codec.pack(codes, scales, kind)
    assert len(data) == codec.num_bytes(7, 300, kind)
    back = codec.decode(*codec.unpack(memoryview(data), 7, 300, kind))
    assert ((back - values).abs() <= error * values.abs().amax(1, keepdim=True)).all()
    assert torch.equal(back, codec.decode(codes, scales)) and not back[3].any()


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize(("begin", "end"), [(0, 600), (100, 400), (256, 512), (511, 513)])
def test_a_cut_out_of_coded_rows_decodes_to_the_same_bits(kind, begin, end):
    """So all ranks of all sites hold the same anchor."""
    values = torch.randn(4, 600, generator=torch.Generator().manual_seed(1))
    codes, scales = codec.encode(values, kind)
    blocks = slice(begin // codec.BLOCK, -(-end // codec.BLOCK))
    data = codec.pack(codes[1:3, begin:end], scales[1:3, blocks] if scales.numel() else scales, kind)
    header = wire.framed({"boxes": [Box(0, 1, 3, begin, end)]}, data)
    text, payload = wire.cut(header)
    boxes = wire.boxes_of(read(Anchor, text).boxes, [Box(0, 0, 4, 0, 600)])
    ((_, part, of_part),) = wire.parts(payload, boxes, kind, of_rows=True)
    assert torch.equal(codec.decode(part, of_part, begin % codec.BLOCK), codec.decode(codes, scales)[1:3, begin:end])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_rounding_keeps_back_is_not_lost(kind):
    """The sum of what arrives follows the sum of what was meant, however often it was rounded."""
    generator, rest, meant, arrived = torch.Generator().manual_seed(2), torch.zeros(2, 256), 0, 0
    for _ in range(50):
        wanted = torch.randn(2, 256, generator=generator)
        given = codec.decode(*codec.encode(wanted + rest, kind))
        rest, meant, arrived = wanted + rest - given, meant + wanted, arrived + given
    assert (arrived - meant).abs().max() < 1.0  # of a sum whose numbers are about 7


def test_nothing_but_whole_messages_is_read():
    whole = wire.framed({"boxes": [[0, 0, 2, 0, 8]]}, bytes(64))
    for body in (
        b"",
        b"\0\0",
        whole[:9],
        b"\xff" * 40,
        struct.pack("<I", 1 << 30) + b"{}",
        struct.pack("<I", 2) + b"[]",
    ):
        with pytest.raises(Refusal, match="no message of a swarm"):
            read(Anchor, wire.cut(body)[0])
    payload = wire.cut(whole)[1]
    with pytest.raises(Refusal, match="64 bytes of numbers where 20 belong"):
        list(wire.parts(payload, [Box(0, 0, 2, 0, 8)], "int8", False))
    for boxes in (
        [[1, 0, 2, 0, 8]],
        [[0, 0, 3, 0, 8]],
        [[0, -1, 2, 0, 8]],
        [[0, 1, 1, 0, 8]],
        [[0, 0, 2]],
        [[0, 0, 1, 0, 8], [0, 1, 2, 0, 8]],
        "all",
        None,
    ):
        with pytest.raises(Refusal, match="no part of this fragment|a weight twice|no message of a swarm: boxes"):
            wire.boxes_of(read(Anchor, json.dumps({"boxes": boxes})).boxes, [Box(0, 0, 2, 0, 8)])


def test_a_merge_waits_for_the_quorum_and_then_for_the_grace_of_those_who_are_there():
    def due(arrived, present, now, quorum=2):
        return decide.is_due(arrived, present, quorum, 10.0, now)

    assert due({"a": 0.0}, "ab", 99.0) == (False, "1 of at least 2 sites")
    assert due({"a": 0.0, "b": 5.0}, "ab", 5.0) == (True, "all 2 sites")
    assert due({"a": 0.0, "b": 5.0}, "abc", 14.0) == (False, "waiting for c, 1 s more")
    assert due({"a": 0.0, "b": 5.0}, "abc", 15.1).why == "2 of 3 sites; c did not come within 10 s"
    assert due({"a": 0.0, "b": 5.0}, "b", 5.0).yes  # a site that has left after it sent counts


def test_shares_follow_tokens_and_unusual_differences_are_left_out_by_name():
    assert decide.shares({"b": 30, "a": 10}) == {"a": 0.25, "b": 0.75}
    assert decide.is_usual(float("nan"), []) == (False, "its difference is not finite")
    assert decide.is_usual(1e9, [1.0, 1.0]).yes  # too few to judge by
    assert decide.is_usual(30.0, [1.0, 2.0, 3.0, 4.0, 5.0]) == (True, "norm 30")
    assert "has the norm 31, 10 times the usual 3" in decide.is_usual(31.0, [1.0, 2.0, 3.0, 4.0, 5.0]).why
    warming_up = [0.09, 0.09, 0.1, 0.1]  # all sites went further since; one of them far too far
    assert [
        decide.is_usual(norm, warming_up, others).yes for norm, others in ((2.1, [2.0, 2.2]), (30.0, [2.0, 2.2]))
    ] == [
        True,
        False,
    ]
    assert [decide.goes_far("diloco", 0.7, 0.9, n).yes for n in (999, 1000)] == [True, False]
    assert [decide.goes_far("diloco", 0.7, 0.6, n).yes for n in (100, 101)] == [True, False]
    assert not decide.goes_far("average", 0.7, 0.9, 9).yes
    assert "the outer step goes 7 times as far as the sites" in decide.goes_far("diloco", 0.7, 0.9, 9).why
    assert decide.differing({"a": 1, "b": "x"}, {"a": 1, "b": "y"}) == ["b is 'y' at this site and 'x' in the run"]
    assert decide.where_to_begin(0, [400, 500, 900], True) == 500
    assert decide.where_to_begin(0, [], True) == decide.where_to_begin(0, [500], False) == 0


def test_the_outer_step_is_nesterovs_and_the_mean_without_momentum_is_the_average():
    mean, velocity = torch.tensor([1.0]), torch.tensor([2.0])
    assert Outer(0.7, 0.9).step(mean, velocity).item() == pytest.approx(0.7 * (1 + 0.9 * 2.8))
    assert velocity.item() == pytest.approx(2.8)
    assert Outer.of("average", 0.7, 0.9).step(mean, torch.zeros(1)).item() == 1.0
    optimizer = torch.optim.SGD([anchor := torch.nn.Parameter(torch.zeros(3))], 0.7, 0.9, nesterov=True)
    ours, velocity = torch.zeros(3), torch.zeros(3)
    for difference in torch.randn(5, 3, generator=torch.Generator().manual_seed(0)):
        anchor.grad = difference.clone()
        optimizer.step()
        ours = ours - Outer(0.7, 0.9).step(difference, velocity)
    assert torch.allclose(ours, anchor.detach(), atol=1e-6)


def test_what_a_site_learned_while_its_fragment_travelled_stays():
    sent, weights, anchor = torch.tensor([1.0]), torch.tensor([1.25]), torch.tensor([3.0])
    assert mixed(weights, sent, anchor, 0.0).item() == 3.25
    assert mixed(sent, sent, anchor, 0.0).item() == 3.0
    assert mixed(weights, sent, anchor, 0.5).item() == 2.25


def test_a_checksum_is_a_sum_over_pieces():
    values = torch.randn(6, 5)
    assert checksum([values]) == checksum([values[:2], values[2:, :3], values[2:, 3:]])
    changed = values.clone()
    changed[3, 3] = torch.nextafter(changed[3, 3], torch.tensor(9.0))
    assert checksum([changed]) != checksum([values])


def test_the_drawing_shows_travels_and_waits_where_they_were(tmp_path):
    trips = [Trip(0, 10.0, 20.0, 5.0, "a & b"), Trip(1, 50.0, 10.0, 0.0, "c")]
    draw(tmp_path / "swarm.svg", "site <zurich>", 2, trips, 100.0)
    bars = [e for e in ElementTree.parse(tmp_path / "swarm.svg").getroot() if len(e)]  # those with a title
    seen = [(e.get("fill"), round(float(e.get("x"))), round(float(e.get("width"))), e[0].text) for e in bars]
    assert seen[0] == (TRAINING, 110, 870, "training") and (TRAVELLING, 197, 130, "a & b") in seen
    assert sum(fill == WAITING and x == 328 and what.startswith("waited 5.0 s") for fill, x, _, what in seen) == 2
    assert seen[-1] == (TRAVELLING, 545, 87, "c")


def test_random_bytes_and_cuts_never_end_in_anything_but_a_refusal():
    draws, whole = random.Random(0), wire.framed({"boxes": [[0, 0, 2, 0, 8]]}, bytes(64))
    for cut, flip in itertools.product(range(0, len(whole), 7), range(8)):
        body = bytearray(whole[:cut] + draws.randbytes(flip))
        try:
            header, payload = wire.cut(bytes(body))
            boxes = wire.boxes_of(read(Anchor, header).boxes, [Box(0, 0, 2, 0, 8)])
            list(wire.parts(payload, boxes, "float32", False))
        except Refusal:
            continue
        assert len(body) == len(whole)
