"""What this rank holds of the model, of the anchor, and of what it has sent: views that a fragment's boxes name."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan_fleet.swarm.codec import BLOCK, Codec, decode, encode, pack
from titan_fleet.swarm.fragments import Box, Weight, box_of, checksum, divide, held_of
from titan_fleet.swarm.outer import mixed, taken
from titan_fleet.swarm.wire import parts
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.training.optimizer.apply import local_part, plain

ANCHOR, SENT, REST = "anchor", "sent", "rest"  # the agreed weights; the weights when sent; what rounding kept back


class Held:
    def __init__(self, model: ModelParts, mesh: Mesh, num_fragments: int, codec: Codec) -> None:
        self.model, self.codec = model, codec
        named = {n: p for n, p in model.saved_parameters().items() if isinstance(p, nn.Parameter) and p.requires_grad}
        self.weights = _table(named)
        places = {weight.name: place for place, weight in enumerate(self.weights)}
        copies = {id(copy) for tie in model.ties for copy in tie.copies}
        kinds = (ANCHOR, SENT) if codec == "float32" else (ANCHOR, SENT, REST)
        self.states: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._named, self._at, self._sends = named, dict[int, list[tuple[Box, nn.Parameter]]](), set[int]()
        held: list[Box] = []
        for name, parameter in named.items():
            self.states[parameter] = {kind: torch.zeros_like(plain(parameter), dtype=torch.float32) for kind in kinds}
            box = _box(places[name], name, parameter)
            if not box.size:
                continue
            held.append(box)
            self._at.setdefault(places[name], []).append((box, parameter))
            if id(parameter) not in copies and _sends(parameter, mesh):
                self._sends.add(places[name])
        fragments = divide(self.weights, num_fragments)
        self.boxes = [held_of(fragment, held) for fragment in fragments]
        self.sent = [[box for box in boxes if box.weight in self._sends] for boxes in self.boxes]

    def tensors(self) -> dict[str, Tensor]:
        """Under the names of a checkpoint."""
        return {
            f"swarm.{kind}.{name}": tensor
            for name, parameter in self._named.items()
            for kind, tensor in self.states[parameter].items()
        }

    @torch.no_grad()
    def begin(self) -> None:
        """From the weights as they are, once they were loaded."""
        self.free_gathered()
        for parameter, state in self.states.items():
            for kind in (ANCHOR, SENT):
                state[kind].copy_(plain(parameter))

    def fill_copies(self) -> None:
        for tie in self.model.ties:
            tie.copy_first(self.states)

    # --- all of these work on views, in place

    def view(self, kind: str, box: Box) -> Tensor:
        whole, parameter = next((w, p) for w, p in self._at[box.weight] if box.within(w) == box)
        tensor = parameter.detach() if kind == "" else self.states[parameter][kind]
        rows = slice(box.row - whole.row, box.end_row - whole.row)
        return local_part(tensor).view(whole.shape)[rows, box.column - whole.column : box.end_column - whole.column]

    def free_gathered(self) -> None:
        self.model.free_gathered()

    @torch.no_grad()
    def note_sent(self, number: int) -> None:
        for box in self.boxes[number]:
            self.view(SENT, box).copy_(self.view("", box))

    @torch.no_grad()
    def encoded(self, number: int) -> bytes:
        """How the anchor differs from the weights that were noted."""
        return b"".join(pack(*encode(self._difference(box), self.codec), self.codec) for box in self.sent[number])

    def _difference(self, box: Box) -> Tensor:
        difference = self.view(ANCHOR, box) - self.view(SENT, box)
        return difference if self.codec == "float32" else difference + self.view(REST, box)

    @torch.no_grad()
    def keep_rest(self, number: int, counts: bool) -> None:
        """What rounding kept from a difference that counted goes into the next one; of another, nothing does."""
        for box in self.sent[number] if self.codec != "float32" else ():
            difference = self._difference(box)
            lost = difference - decode(*encode(difference, self.codec))
            self.view(REST, box).copy_(lost if counts else torch.zeros_like(lost))

    @torch.no_grad()
    def take_updates(self, number: int, count: int, payload: memoryview, mix: float) -> None:
        boxes = self.boxes[number]
        anchors = [self.view(ANCHOR, box).clone() for box in boxes]
        read = parts(payload, list(boxes) * count, self.codec, of_rows=True)
        for place, (box, codes, scales) in enumerate(read):
            skipped = box.column % BLOCK
            device = anchors[place % len(boxes)].device
            update = decode(codes.to(device), scales.to(device), skipped)
            anchors[place % len(boxes)] = taken(anchors[place % len(boxes)], update)
        for box, anchor in zip(boxes, anchors, strict=True):
            weights = self.view("", box)
            weights.copy_(mixed(weights.float(), self.view(SENT, box), anchor, mix))
            self.view(ANCHOR, box).copy_(anchor)

    @torch.no_grad()
    def take_anchor(self, number: int, payload: memoryview) -> None:
        """In the place of what this site has learned."""
        for box, codes, scales in parts(payload, self.boxes[number], "float32", of_rows=False):
            for kind in (ANCHOR, SENT, ""):
                self.view(kind, box).copy_(decode(codes, scales))

    def checksum(self, number: int) -> int:
        """Of the whole anchor: each rank adds what it sends."""
        own = torch.tensor(checksum(self.view(ANCHOR, box) for box in self.sent[number]))
        dist.all_reduce(own)
        return int(own)

    @torch.no_grad()
    def anchor_bytes(self, number: int) -> bytes:
        return b"".join(pack(self.view(ANCHOR, box), torch.empty(0), "float32") for box in self.sent[number])


def _table(named: dict[str, nn.Parameter]) -> list[Weight]:
    """Of the whole model, from what all ranks hold."""
    own = {name: tuple(parameter.shape) for name, parameter in named.items()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    merged = {name: shape for each in everyones for name, shape in each.items()}
    return [Weight(name, merged[name]) for name in sorted(merged)]


def _box(place: int, name: str, parameter: nn.Parameter) -> Box:
    offsets: Sequence[int] = [0] * parameter.dim()
    sizes: Sequence[int] = list(parameter.shape)
    if isinstance(parameter, DTensor):
        chunks = parameter.__create_chunk_list__()  # DTensor's description of itself for checkpoints
        if len(chunks) != 1:
            raise Refusal(
                f"{name}: this rank holds {len(chunks)} pieces, and a swarm exchanges one; use another layout"
            )
        offsets, sizes = chunks[0].offsets, chunks[0].sizes
    if 0 in sizes:
        return Box(place, 0, 0, 0, 0)
    return box_of(place, tuple(parameter.shape), offsets, sizes, name)


def _sends(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Of several ranks that hold the same, the first sends it."""
    if not isinstance(parameter, DTensor):
        return mesh.tokens.get_local_rank() == 0 and mesh.devices.get_local_rank("tp") == 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, p in zip(coordinate, parameter.placements, strict=True) if isinstance(p, Replicate))
