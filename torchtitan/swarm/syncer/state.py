"""One fragment at the syncer: its anchor, the outer momentum, the differences that have come, and its files.

A merge is on the disk before anyone is told of it: the update first, then the fragment, each complete or absent.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.swarm.codec import BLOCK, Codec, decode, encode, pack
from torchtitan.swarm.decide import NORMS_KEPT, is_usual, shares
from torchtitan.swarm.fragments import Box, checksum
from torchtitan.swarm.outer import Outer, taken
from torchtitan.swarm.wire import parts

UPDATES_KEPT = 32  # for sites that go on from a checkpoint of theirs


@dataclass
class Difference:
    """What a site sent of a fragment, rank by rank."""

    base: int  # the version of the anchor that it differs from
    step: int
    tokens: int
    pieces: dict[int, tuple[list[Box], bytes]] = field(default_factory=dict)  # by rank
    complete_at: float = 0.0

    def size(self) -> int:
        return sum(box.size for boxes, _ in self.pieces.values() for box in boxes)


@dataclass(frozen=True)
class Meeting:
    """What came of one merge."""

    version: int
    counted: dict[str, int]  # site -> the step of its difference
    rejected: dict[str, tuple[int, str]]  # site -> that step, and why
    norm: float  # of the mean difference
    apart: float  # how far the sites were from their mean, in norms of the anchor
    checksum: int  # of the anchor after it
    why: str


class FragmentState:
    def __init__(self, folder: Path, boxes: Sequence[Box], codec: Codec, outer: Outer) -> None:
        self.folder, self.boxes, self.codec, self.outer = folder, list(boxes), codec, outer
        self.size = sum(box.size for box in boxes)
        self.version = -1  # no anchor yet
        self.anchor: list[Tensor] = []
        self.velocity: list[Tensor] = []
        self.rest: list[Tensor] = []  # what rounding has kept from the sites so far
        self.meetings: list[Meeting] = []
        self.norms: list[float] = []  # of differences that counted
        self.arriving: dict[str, Difference] = {}
        self.founding: dict[str, dict[int, tuple[list[Box], bytes]]] = {}  # by site and rank
        folder.mkdir(parents=True, exist_ok=True)
        self._load()

    # --- what comes in

    def found(self, site: str, version: int, rank: int, boxes: list[Box], payload: bytes) -> bool:
        """Take a rank's part of an anchor that is newer than ours. Returns whether it is complete now."""
        if version <= self.version:
            return True
        own = self.founding.setdefault(site, {})
        own[rank] = boxes, payload
        if sum(box.size for each, _ in own.values() for box in each) < self.size:
            return False
        anchor = [torch.zeros(box.shape) for box in self.boxes]
        for each, body in own.values():
            for box, codes, scales in parts(memoryview(body), each, "float32", of_rows=False):
                self._place(anchor, box).copy_(decode(codes, scales))
        self.anchor, self.founding, self.version, self.meetings = anchor, {}, version, []
        self.velocity = [torch.zeros_like(tensor) for tensor in anchor]
        is_rounded = self.codec != "float32"
        self.rest = [torch.zeros(t.shape if is_rounded else (0, 0), dtype=torch.bfloat16) for t in anchor]
        self.arriving.clear()
        self._save()
        return True

    def add(self, site: str, rank: int, base: int, step: int, tokens: int, boxes: list[Box], payload: bytes) -> None:
        """Take a rank's part of a site's difference. A repeated one changes nothing."""
        known = self.arriving.get(site)
        if known is None or (known.base, known.step) != (base, step):
            known = self.arriving[site] = Difference(base, step, tokens)
        known.pieces[rank] = boxes, payload
        if known.size() == self.size and not known.complete_at:
            known.complete_at = time.monotonic()

    def arrived(self) -> dict[str, float]:
        return {site: each.complete_at for site, each in self.arriving.items() if each.complete_at}

    def meeting_of(self, site: str, step: int, after: int) -> Meeting | None:
        """The merge that this difference of the site was part of, or left out of by name."""
        for meeting in self.meetings:
            left_out = meeting.rejected.get(site, (None, ""))[0]
            if meeting.version > after and step in (meeting.counted.get(site), left_out):
                return meeting
        return None

    # --- the merge

    @torch.no_grad()
    def merge(self, why: str) -> Meeting:
        complete = {site: self.arriving[site] for site in sorted(self.arrived())}
        norms = {site: self._norm(each) for site, each in complete.items()}
        answers = {site: is_usual(norm, self.norms) for site, norm in norms.items()}
        counted = {site: each for site, each in complete.items() if answers[site].yes}
        rejected = {site: (complete[site].step, answers[site].why) for site in complete if site not in counted}
        mean = [torch.zeros(box.shape) for box in self.boxes]
        share = shares({site: each.tokens for site, each in counted.items()}) if counted else {}
        for site, difference in counted.items():
            self._add_to(mean, difference, share[site])
        update, anchor, norm = [], [], 0.0
        for number, each in enumerate(mean):
            norm += float(each.double().square().sum())
            wanted = self.outer.step(each, self.velocity[number]) if counted else each
            if self.codec != "float32":
                wanted += self.rest[number]
            codes, scales = encode(wanted, self.codec)
            given = decode(codes, scales)
            if self.codec != "float32":
                self.rest[number] = (wanted - given).bfloat16()
            update.append((codes, scales))
            anchor.append(taken(self.anchor[number], given))
        spread = sum(share[site] * norms[site] ** 2 for site in counted) - norm
        whole = sum(float(each.double().square().sum()) for each in anchor)
        apart = (max(0.0, spread) / max(whole, 1e-30)) ** 0.5
        steps = {site: each.step for site, each in counted.items()}
        meeting = Meeting(self.version + 1, steps, rejected, norm**0.5, apart, checksum(anchor), why)
        self._save_update(self.version, update)
        self.norms = [*self.norms, *(norms[site] for site in counted)][-NORMS_KEPT:]
        self.anchor, self.version = anchor, self.version + 1
        self.meetings = [*self.meetings, meeting][-UPDATES_KEPT:]
        for site in complete:
            del self.arriving[site]
        self._save()
        return meeting

    def _place(self, tensors: list[Tensor], box: Box) -> Tensor:
        """The part of these tensors, one for each box of the fragment, that a box means."""
        number = next(n for n, whole in enumerate(self.boxes) if whole.weight == box.weight)
        whole = self.boxes[number]
        rows = slice(box.row - whole.row, box.end_row - whole.row)
        return tensors[number][rows, box.column - whole.column : box.end_column - whole.column]

    def _add_to(self, mean: list[Tensor], difference: Difference, share: float) -> None:
        for rank in sorted(difference.pieces):
            boxes, payload = difference.pieces[rank]
            for box, codes, scales in parts(memoryview(payload), boxes, self.codec, of_rows=False):
                self._place(mean, box).add_(decode(codes, scales), alpha=share)

    def _norm(self, difference: Difference) -> float:
        total = 0.0
        for boxes, payload in difference.pieces.values():
            for _, codes, scales in parts(memoryview(payload), boxes, self.codec, of_rows=False):
                total += float(decode(codes, scales).double().square().sum())
        return total**0.5

    # --- what goes out

    def anchor_of(self, boxes: Sequence[Box]) -> bytes:
        return b"".join(pack(self._place(self.anchor, box), torch.empty(0), "float32") for box in boxes)

    def has_updates(self, base: int, version: int) -> bool:
        return all(self._update_file(number).exists() for number in range(base, version))

    def updates_of(self, base: int, version: int, boxes: Sequence[Box]) -> bytes:
        """What lies between two versions, box by box, one version after the other."""
        found = []
        for number in range(base, version):
            with safe_open(self._update_file(number), "pt") as file:
                for box in boxes:
                    piece = next(n for n, whole in enumerate(self.boxes) if whole.weight == box.weight)
                    rows = slice(box.row - self.boxes[piece].row, box.end_row - self.boxes[piece].row)
                    codes = file.get_slice(f"codes.{piece}")[rows, box.column : box.end_column]
                    scales = file.get_slice(f"scales.{piece}")
                    if self.codec in ("int8", "int4"):
                        scales = scales[rows, box.column // BLOCK : -(-box.end_column // BLOCK)]
                    else:
                        scales = torch.empty(0)
                    found.append(pack(codes, scales, self.codec))
        return b"".join(found)

    # --- files

    def _update_file(self, version: int) -> Path:
        return self.folder / f"update-{version}.safetensors"

    def _save_update(self, version: int, update: list[tuple[Tensor, Tensor]]) -> None:
        tensors = {f"codes.{n}": codes.contiguous() for n, (codes, _) in enumerate(update)}
        tensors |= {f"scales.{n}": scales.contiguous() for n, (_, scales) in enumerate(update)}
        _write(self._update_file(version), tensors, {})
        self._update_file(version - UPDATES_KEPT).unlink(missing_ok=True)

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for kind in ("anchor", "velocity", "rest"):
            tensors |= {f"{kind}.{number}": tensor for number, tensor in enumerate(getattr(self, kind))}
        about = {"version": self.version, "norms": self.norms, "meetings": [vars(each) for each in self.meetings]}
        _write(self.folder / f"version-{self.version}.safetensors", tensors, {"about": json.dumps(about)})
        for file in self.folder.glob("version-*.safetensors"):
            if int(file.stem.partition("-")[2]) < self.version - 1:
                file.unlink()

    def _load(self) -> None:
        """The newest version that is there; a file has its name only once it is whole."""
        numbers = sorted(int(file.stem.partition("-")[2]) for file in self.folder.glob("version-*.safetensors"))
        if not numbers:
            return
        with safe_open(self.folder / f"version-{numbers[-1]}.safetensors", "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
            count = len(self.boxes)
            for kind in ("anchor", "velocity", "rest"):
                setattr(self, kind, [file.get_tensor(f"{kind}.{number}") for number in range(count)])
        self.version, self.norms = about["version"], about["norms"]
        self.meetings = [Meeting(**each) for each in about["meetings"]]


def _write(file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Under another name first, so that a file is whole or absent."""
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished, about)
    with open(unfinished, "rb") as written:
        os.fsync(written.fileno())
    os.replace(unfinished, file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
