"""How numbers travel: as they are, in bfloat16, or as whole numbers of 8 or 4 bits with a scale for each 256 of a row.

What was lost on the way is kept by whoever sent it, and added to what is sent next.
"""

import math
from typing import Literal

import torch
from torch import Tensor

BLOCK = 256
Codec = Literal["float32", "bfloat16", "int8", "int4"]
_LARGEST = {"int8": 127, "int4": 7}


def num_bytes(rows: int, columns: int, codec: Codec, skipped: int = 0) -> int:
    """Of a box, whose first column is the block's column `skipped`."""
    if codec in ("float32", "bfloat16"):
        return rows * columns * (4 if codec == "float32" else 2)
    codes = rows * columns if codec == "int8" else (rows * columns + 1) // 2
    return codes + 2 * rows * math.ceil((skipped + columns) / BLOCK)


def encode(values: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Codes, and the scales of the blocks (none, for numbers with a point)."""
    if codec not in _LARGEST:
        return values.to(getattr(torch, codec)), values.new_empty(0)
    largest, blocks = _LARGEST[codec], _blocks(values)
    scales = torch.linalg.vector_norm(blocks, math.inf, -1).div_(largest).bfloat16()
    spread = scales.float()
    spread[spread == 0] = 1
    codes = blocks.div(spread[:, :, None]).round_().clamp_(-largest, largest).to(torch.int8)
    return codes.flatten(1)[:, : values.shape[1]], scales


def decode(codes: Tensor, scales: Tensor, skipped: int = 0) -> Tensor:
    """In float32. `skipped`: columns of the first block that lie before these codes."""
    if not scales.numel():
        return codes.float()
    values = _blocks(torch.nn.functional.pad(codes, (skipped, 0)) if skipped else codes).float()
    return values.mul_(scales.float()[:, :, None]).flatten(1)[:, skipped : skipped + codes.shape[1]]


def pack(codes: Tensor, scales: Tensor, codec: Codec) -> bytes:
    if codec == "int4":
        flat = codes.flatten().cpu()
        flat = torch.cat([flat, flat.new_zeros(len(flat) % 2)]).view(-1, 2) + 8
        codes = flat[:, 0] | (flat[:, 1] << 4)
    return _bytes(codes) + _bytes(scales)


def unpack(data: memoryview, rows: int, columns: int, codec: Codec, skipped: int = 0) -> tuple[Tensor, Tensor]:
    """What `pack` gave; the caller has checked that there are so many bytes."""
    raw = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
    if codec in ("float32", "bfloat16"):
        return raw.view(getattr(torch, codec)).view(rows, columns), torch.empty(0)
    size = rows * columns if codec == "int8" else (rows * columns + 1) // 2
    codes = raw[:size].view(torch.int8)
    if codec == "int4":
        codes = (torch.stack([raw[:size] & 15, raw[:size] >> 4], -1).flatten()[: rows * columns].to(torch.int8)) - 8
    blocks = math.ceil((skipped + columns) / BLOCK)
    return codes.view(rows, columns), _aligned(raw[size:]).view(torch.bfloat16).view(rows, blocks)


def _aligned(raw: Tensor) -> Tensor:
    return raw.clone() if raw.storage_offset() % 2 else raw


def _blocks(values: Tensor) -> Tensor:
    """[rows, blocks, BLOCK], the last block of a row filled up with zeros."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK)) if columns % BLOCK else values
    return padded.reshape(rows, -1, BLOCK)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
