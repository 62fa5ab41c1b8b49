"""The body of a request or an answer: a header in JSON, then the bytes of boxes. Nothing is ever unpickled."""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from torchtitan.refusal import Refusal
from torchtitan.swarm.codec import BLOCK, Codec, num_bytes, unpack
from torchtitan.swarm.fragments import Box

LARGEST_HEADER = 1 << 22
_LENGTH = struct.Struct("<I")


def framed(header: dict[str, Any], *payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *payload])


def opened(body: bytes | bytearray) -> tuple[dict[str, Any], memoryview]:
    """The header, and what follows it."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        if length > LARGEST_HEADER or length > len(body) - _LENGTH.size:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(body[_LENGTH.size : _LENGTH.size + length])
        if not isinstance(header, dict):
            raise ValueError("no header")
    except (struct.error, ValueError) as error:
        raise Refusal(f"this body is no message of a swarm ({error}); it was cut off or comes from elsewhere") from None
    return header, memoryview(body)[_LENGTH.size + length :]


def boxes_of(header: dict[str, Any], fragment: Sequence[Box]) -> list[Box]:
    """The boxes that a header names, each of which must lie in one of the fragment's."""
    try:
        boxes = [Box(*map(int, numbers)) for numbers in header["boxes"]]
    except (KeyError, TypeError, ValueError):
        raise Refusal("this message names no boxes of weights; it comes from another version") from None
    whole = {box.weight: box for box in fragment}
    for box in boxes:
        if box.weight not in whole or box.within(whole[box.weight]) != box or box.size < 1:
            raise Refusal(f"{tuple(box)} is no part of this fragment; the site cuts the model otherwise than the run")
    return boxes


def parts(
    payload: memoryview, boxes: Sequence[Box], codec: Codec, of_rows: bool
) -> Iterator[tuple[Box, Tensor, Tensor]]:
    """Codes and scales of each box. `of_rows`: blocks are counted from the row's begin, not from the box's."""
    skipped = [box.column % BLOCK if of_rows else 0 for box in boxes]
    sizes = [num_bytes(*box.shape, codec, skip) for box, skip in zip(boxes, skipped, strict=True)]
    if sum(sizes) != len(payload):
        raise Refusal(f"this message has {len(payload)} bytes of numbers where {sum(sizes)} belong; it was cut off")
    begin = 0
    for box, size, skip in zip(boxes, sizes, skipped, strict=True):
        codes, scales = unpack(payload[begin : begin + size], *box.shape, codec, skip)
        yield box, codes, scales
        begin += size
