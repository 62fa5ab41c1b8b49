"""The body of a request or an answer: a header in JSON, then the bytes of boxes. Nothing is ever unpickled."""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from titan_fleet.swarm.codec import BLOCK, Codec, num_bytes, unpack
from titan_fleet.swarm.fragments import Box
from torchtitan.refusal import Refusal

LARGEST_HEADER = 1 << 22
_LENGTH = struct.Struct("<I")


def framed(header: dict[str, Any], *payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *payload])


def cut(body: bytes | bytearray, most: int = LARGEST_HEADER) -> tuple[bytes, memoryview]:
    """The text of the header, and what follows it."""
    length = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else 0
    if not 0 < length <= min(most, len(body) - _LENGTH.size):
        raise Refusal(
            f"this is no message of a swarm: {len(body)} bytes, with a header of {length}; it was cut off or comes "
            "from elsewhere"
        )
    begin = _LENGTH.size + length
    return bytes(body[_LENGTH.size : begin]), memoryview(body)[begin:]


def boxes_of(named: Sequence[Sequence[int]], fragment: Sequence[Box]) -> list[Box]:
    """The boxes that a header names: each lies in one of the fragment's, and no two in the same."""
    boxes, whole = [Box(*numbers) for numbers in named], {box.weight: box for box in fragment}
    for box in boxes:
        if box.weight not in whole or box.within(whole[box.weight]) != box:
            raise Refusal(f"{tuple(box)} is no part of this fragment; the site cuts the model otherwise than the run")
    if len({box.weight for box in boxes}) < len(boxes):
        raise Refusal("this message names a weight twice; a rank holds one part of each")
    return boxes


def sizes(payload: memoryview, boxes: Sequence[Box], codec: Codec, skipped: Sequence[int] | None = None) -> list[int]:
    """The bytes of each box, if they are as many as came."""
    each = [num_bytes(*b.shape, codec, skip) for b, skip in zip(boxes, skipped or [0] * len(boxes), strict=True)]
    if sum(each) != len(payload):
        raise Refusal(f"this message has {len(payload)} bytes of numbers where {sum(each)} belong; it was cut off")
    return each


def parts(
    payload: memoryview, boxes: Sequence[Box], codec: Codec, of_rows: bool
) -> Iterator[tuple[Box, Tensor, Tensor]]:
    """Codes and scales of each box. `of_rows`: blocks are counted from the row's begin, not from the box's."""
    skipped = [box.column % BLOCK if of_rows else 0 for box in boxes]
    begin = 0
    for box, size, skip in zip(boxes, sizes(payload, boxes, codec, skipped), skipped, strict=True):
        codes, scales = unpack(payload[begin : begin + size], *box.shape, codec, skip)
        yield box, codes, scales
        begin += size
