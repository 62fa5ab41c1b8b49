"""A rank's part of a global batch, and the background thread that assembles batches ahead of training."""

import queue
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.data.cursor import DocumentRef, Source
from torchtitan.data.packing import Packed, Packer


@dataclass(frozen=True)
class Origin:
    """Where a batch's sequences came from. It is small enough to keep when the tensors are gone."""

    slots: list[int]
    packed: list[Packed]
    sources: list[Source]

    def describe(self) -> str:
        """One line for each sequence: its first and its last document."""
        lines = []
        for slot, packed in zip(self.slots, self.packed, strict=True):
            documents = [self._describe(ref) for ref in (packed.first, packed.last) if ref is not None]
            lines.append(f"slot {slot}: {' to '.join(dict.fromkeys(documents)) or 'padding'}")
        return "\n".join(lines)

    def _describe(self, ref: DocumentRef) -> str:
        where = self.sources[ref.source].data.describe(*ref.position)
        return f"{where} (epoch {ref.epoch + 1})"


@dataclass(frozen=True)
class Batch:
    """One rank's sequences of a global batch, in slot order."""

    inputs: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S]; the loss skips IGNORED
    documents: torch.Tensor | None  # int32 [B, N]: where each document of a sequence begins, then S
    origin: Origin

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to the device. If its memory is pinned, the host does not wait for the copy."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        documents = None if self.documents is None else move(self.documents)
        return Batch(move(self.inputs), move(self.labels), documents, self.origin)


@dataclass(frozen=True)
class OwnSlots:
    """Which slots of the global batch, and which streams, belong to this rank."""

    global_batch_size: int
    num_streams: int
    dp_rank: int
    dp_size: int

    @property
    def own_streams(self) -> range:
        count = self.num_streams // self.dp_size
        return range(self.dp_rank * count, (self.dp_rank + 1) * count)

    @property
    def own_slots(self) -> list[int]:
        rounds = range(0, self.global_batch_size, self.num_streams)
        return [begin + stream for begin in rounds for stream in self.own_streams]


class Shape(NamedTuple):
    """What the tensors of a batch look like."""

    seq_len: int
    pad_id: int
    block_causal: bool
    pin_memory: bool
    pad_last: bool
    packer: type[Packer] = Packer


class Ahead(NamedTuple):
    """What the background thread hands over: a batch (None at the end of the data) and the streams' states after it."""

    batch: Batch | None = None
    states: dict[int, Any] | None = None
    error: BaseException | None = None


def read_ahead(
    packers: dict[int, Packer],
    states: dict[int, Any],
    slots: list[int],
    shape: Shape,
    sources: list[Source],
    ahead: "queue.Queue[Ahead]",
    stop: threading.Event,
) -> None:
    """Body of the background thread: assemble batches until the data ends or `stop` is set."""
    item = Ahead()
    try:
        for number, state in states.items():
            packers[number].load(state)
        while not stop.is_set():
            batch = assemble(packers, slots, shape, sources)
            item = Ahead(batch, {number: packer.state() for number, packer in packers.items()})
            if batch is None or not _put(ahead, item, stop):
                break
    except BaseException as error:  # of any kind: `next()` raises it in the thread that waits
        item = Ahead(error=error)
    if item.batch is None:
        _put(ahead, item, stop)


def _put(ahead: "queue.Queue[Ahead]", item: Ahead, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ahead.put(item, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False


def assemble(packers: dict[int, Packer], slots: list[int], shape: Shape, sources: list[Source]) -> Batch | None:
    """Assemble the next batch of these slots. Returns None at the end of the data."""
    size = (len(slots), shape.seq_len)
    inputs, labels = np.empty(size, np.int64), np.empty(size, np.int64)
    ids = np.empty(size, np.int32) if shape.block_causal else None
    owners = list(packers.values())
    packed = []
    for row in range(len(slots)):
        packer = owners[row % len(owners)]
        packed.append(packer.pack(inputs[row], labels[row], None if ids is None else ids[row]))
        if packed[-1].num_labels < shape.seq_len and not shape.pad_last:
            return None
    if not any(sequence.num_labels for sequence in packed):
        return None
    ready = (lambda array: torch.from_numpy(array).pin_memory()) if shape.pin_memory else torch.from_numpy
    documents = None
    if ids is not None:
        from torchtitan.data.documents import document_starts

        documents = ready(document_starts(ids))
    return Batch(ready(inputs), ready(labels), documents, Origin(slots, packed, sources))
