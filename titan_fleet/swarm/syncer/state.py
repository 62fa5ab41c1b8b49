"""One fragment at the syncer: its anchor, the outer momentum, the differences that have come, and its files.

The syncer writes a merge to the disk before it answers a site: the update, then the fragment, each whole or absent.
"""

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from titan_fleet.swarm.codec import BLOCK, Codec, decode, encode, pack
from titan_fleet.swarm.decide import NORMS_KEPT, is_usual, shares
from titan_fleet.swarm.fragments import Box, checksum, squares
from titan_fleet.swarm.outer import Outer, taken
from titan_fleet.swarm.syncer.pieces import Pieces, view
from titan_fleet.swarm.wire import parts, sizes
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.whole_file import whole

UPDATES_KEPT = 32  # for sites that go on from a checkpoint of theirs


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
    def __init__(self, folder: Path, boxes: Sequence[Box], codec: Codec, outer: Outer, given_out: int = -1) -> None:
        """`given_out`: the newest version that sites may have; the files may have lost it."""
        self.folder, self.boxes, self.codec, self.outer = folder, list(boxes), codec, outer
        self.size = sum(box.size for box in boxes)
        self.places = {box.weight: (place, box) for place, box in enumerate(boxes)}
        self.version = -1  # no anchor yet
        self.anchor: list[Tensor] = []
        self.velocity: list[Tensor] = []
        self.rest: list[Tensor] = []  # what rounding has kept from the sites so far
        self.meetings: list[Meeting] = []
        self.norms: dict[str, list[float]] = {}  # of each site's differences that counted
        self.arriving: dict[str, Pieces] = {}
        self.founding: dict[str, Pieces] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._load()
        if self.version < given_out:
            self._rebuild(given_out)

    # --- what comes in

    def found(self, site: str, rank: int, boxes: list[Box], payload: memoryview, session: int = 0) -> bool:
        """Take a rank's part of the first weights, unless they are here. Returns whether they are now."""
        if self.version >= 0:
            return True
        sizes(payload, boxes, "float32")
        own = self.founding.get(site)
        if own is None or own.session != session:
            own = self.founding[site] = Pieces(session=session)
        if not own.put(rank, boxes, payload, self.boxes):
            return False
        anchor = [torch.zeros(box.shape) for box in self.boxes]
        for each, body in own.pieces.values():
            for box, codes, scales in parts(body, each, "float32", of_rows=False):
                place, whole = self.places[box.weight]
                view(anchor[place], whole, box).copy_(decode(codes, scales))
        if not all(tensor.isfinite().all() for tensor in anchor):
            del self.founding[site]
            raise Refusal(f"the first weights of site {site} are not all finite; look at its model's initialisation")
        self.anchor, self.founding, self.version = anchor, {}, 0
        self.velocity = [torch.zeros_like(tensor) for tensor in anchor]
        is_rounded = self.codec != "float32"
        self.rest = [torch.zeros(t.shape if is_rounded else (0, 0), dtype=torch.bfloat16) for t in anchor]
        self.arriving.clear()
        self._save()
        return True

    def add(
        self,
        site: str,
        rank: int,
        base: int,
        step: int,
        tokens: int,
        boxes: list[Box],
        payload: memoryview,
        session: int = 0,
    ) -> None:
        """Take a rank's part of a site's difference, if it is what it says."""
        sizes(payload, boxes, self.codec)
        known = self.arriving.get(site)
        if known is None or (known.base, known.step, known.session) != (base, step, session):
            known = Pieces(base, step, tokens, session)
        if known.tokens != tokens:
            raise Refusal(f"rank {rank} of this site counts {tokens} tokens, and another {known.tokens}; they are one")
        known.put(rank, boxes, payload, self.boxes)
        self.arriving[site] = known

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
        answers = {
            site: is_usual(norm, self.norms.get(site, ()), [other for name, other in norms.items() if name != site])
            for site, norm in norms.items()
        }
        counted = {site: each for site, each in complete.items() if answers[site].yes}
        rejected = {site: (complete[site].step, answers[site].why) for site in complete if site not in counted}
        share = shares({site: each.tokens for site, each in counted.items()}) if counted else {}
        try:
            return self._merge(counted, share, norms, rejected, why)
        except BaseException:  # a full disk, say: as it was before, so that it can be tried again
            self._load()
            raise

    def _merge(
        self,
        counted: dict[str, Pieces],
        share: dict[str, float],
        norms: dict[str, float],
        rejected: dict[str, tuple[int, str]],
        why: str,
    ) -> Meeting:
        """A weight at a time, in place, to keep memory low."""
        update, norm, whole = [], 0.0, 0.0
        sent = {site: _by_weight(difference, self.codec) for site, difference in counted.items()}
        for number, box in enumerate(self.boxes):
            mean = torch.zeros(box.shape)
            for site, pieces in sent.items():
                for piece, codes, scales in pieces[box.weight]:
                    view(mean, box, piece).add_(decode(codes, scales), alpha=share[site])
            norm += squares(mean)
            wanted = self.outer.step(mean, self.velocity[number]) if counted else mean
            if self.codec != "float32":
                wanted += self.rest[number]
            codes, scales = encode(wanted, self.codec)
            given = decode(codes, scales)
            if self.codec != "float32":
                self.rest[number].copy_(wanted - given)
            update.append((codes, scales))
            self.anchor[number].copy_(taken(self.anchor[number], given))
            whole += squares(self.anchor[number])
        spread = sum(share[site] * norms[site] ** 2 for site in counted) - norm
        apart = (max(0.0, spread) / max(whole, 1e-30)) ** 0.5
        steps = {site: each.step for site, each in counted.items()}
        meeting = Meeting(self.version + 1, steps, rejected, norm**0.5, apart, checksum(self.anchor), why)
        self._save_update(self.version, update)
        for site in counted:
            self.norms[site] = [*self.norms.get(site, ()), norms[site]][-NORMS_KEPT:]
        self.version += 1
        self.meetings = [*self.meetings, meeting][-UPDATES_KEPT:]
        self._save()
        for site in (*counted, *rejected):
            del self.arriving[site]
        return meeting

    def _norm(self, difference: Pieces) -> float:
        total = 0.0
        for boxes, payload in difference.pieces.values():
            for _, codes, scales in parts(payload, boxes, self.codec, of_rows=False):
                total += squares(decode(codes, scales))
        return total**0.5

    # --- what goes out

    def anchor_of(self, boxes: Sequence[Box]) -> Iterator[bytes]:
        """As it is on the disk now, whatever is merged while it is read."""
        file = safe_open(self._version_file(self.version), "pt")

        def read(box: Box) -> bytes:
            place, whole = self.places[box.weight]
            rows = slice(box.row - whole.row, box.end_row - whole.row)
            anchor = file.get_slice(f"anchor.{place}")[rows, box.column : box.end_column]
            return pack(anchor, torch.empty(0), "float32")

        return map(read, boxes)

    def has_updates(self, base: int, version: int) -> bool:
        return all(self._update_file(number).exists() for number in range(base, version))

    def updates_of(self, base: int, version: int, boxes: Sequence[Box]) -> Iterator[bytes]:
        """What lies between two versions, box by box, one version after the other."""
        files = [safe_open(self._update_file(number), "pt") for number in range(base, version)]

        def read(pair: tuple[Any, Box]) -> bytes:
            file, box = pair
            place, whole = self.places[box.weight]
            rows = slice(box.row - whole.row, box.end_row - whole.row)
            codes = file.get_slice(f"codes.{place}")[rows, box.column : box.end_column]
            blocks = slice(box.column // BLOCK, -(-box.end_column // BLOCK))
            is_coded = self.codec in ("int8", "int4")
            scales = file.get_slice(f"scales.{place}")[rows, blocks] if is_coded else torch.empty(0)
            return pack(codes, scales, self.codec)

        return map(read, itertools.product(files, boxes))

    # --- files

    def _version_file(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

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
        _write(self._version_file(self.version), tensors, {"about": json.dumps(about)})
        for file in self.folder.glob("version-*.safetensors"):
            if int(file.stem.partition("-")[2]) < self.version - 1:
                file.unlink()

    def _load(self) -> None:
        """The newest version that is there; a file has its name only once it is whole."""
        numbers = sorted(int(file.stem.partition("-")[2]) for file in self.folder.glob("version-*.safetensors"))
        if not numbers:
            return
        with safe_open(self._version_file(numbers[-1]), "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
            count = len(self.boxes)
            for kind in ("anchor", "velocity", "rest"):
                setattr(self, kind, [file.get_tensor(f"{kind}.{number}") for number in range(count)])
        self.version, norms = about["version"], about["norms"]
        self.norms = norms if isinstance(norms, dict) else {}  # once they were one list of all sites
        self.meetings = [Meeting(**each) for each in about["meetings"]]

    def _rebuild(self, given_out: int) -> None:
        """Where files of anchors are lost, the updates that the sites took lead to the same anchor, to the bit."""
        begun = self.version
        if begun < 0:
            raise Refusal(
                f"{self.folder}: sites have anchor {given_out}, and no file of an anchor is left here; bring the "
                "folder back from a copy, or name another --out"
            )
        while self.version < given_out and self._update_file(self.version).exists():
            with safe_open(self._update_file(self.version), "pt") as file:
                for number, anchor in enumerate(self.anchor):
                    update = decode(file.get_tensor(f"codes.{number}"), file.get_tensor(f"scales.{number}"))
                    self.anchor[number] = taken(anchor, update)
            self.version += 1
        logger.warning(
            f"{self.folder}: the files of anchor {given_out} are lost, so this goes on from anchor {self.version}, "
            f"which is made from {begun} and its updates"
        )
        if self.version > begun:
            self._save()


def _by_weight(difference: Pieces, codec: Codec) -> dict[int, list[tuple[Box, Tensor, Tensor]]]:
    """In the order of the ranks, so that sums repeat to the bit."""
    found: dict[int, list[tuple[Box, Tensor, Tensor]]] = {}
    for rank in sorted(difference.pieces):
        boxes, payload = difference.pieces[rank]
        for part in parts(payload, boxes, codec, of_rows=False):
            found.setdefault(part[0].weight, []).append(part)
    return found


_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}


def _write(file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """A file of safetensors, a tensor at a time."""
    end = 0
    head: dict[str, Any] = {"__metadata__": about} if about else {}
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with whole(file) as written:
        written.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            written.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
