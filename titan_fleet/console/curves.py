"""What a run records, read on from where the last look ended: numbers as columns, thinned for a chart; and samples."""

import ast
import json
import math
import re
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from titan_fleet.console.answers import LogPiece
from titan_fleet.console.text import inert

Read = Callable[[str, int, int], tuple[bytes, int]]  # path, position, bytes -> bytes, size of the file
_PIECE, _LINE = 2**19, 2**16  # bytes at a time, and of a record
_END = 128
_MOST_PIECES = 200  # of one look
_MOST_RECORDS = 200_000
_MOST_KEYS = 64
_MOST_SAMPLES = 200
AXES = {"step": "step", "tokens_seen": "tokens", "elapsed": "seconds of training"}


@dataclass
class Columns:
    """The newest 200,000 records of a file. A column has a number for each step; NaN where the record had none."""

    path: str
    steps: array = field(default_factory=lambda: array("q"))
    values: dict[str, array] = field(default_factory=dict)
    _position: int = 0
    _rest: bytes = b""
    _end: bytes = b""  # the last bytes that were read

    def read_on(self, read: Read) -> None:
        """A file that does not go on from these bytes was written anew, as a resumed run does: it is read anew."""
        for _ in range(_MOST_PIECES):
            try:
                piece, size = read(self.path, self._position - len(self._end), _PIECE)
            except FileNotFoundError:
                return
            if not piece.startswith(self._end):
                self.__init__(self.path)  # type: ignore[misc]
                continue
            piece, self._end = piece[len(self._end) :], piece[-_END:]
            self._position += len(piece)
            *lines, rest = (self._rest + piece).split(b"\n")
            for line in lines:
                self._take(line)
            self._rest = rest[: _LINE + 1]  # of what is too long, enough to be that until its end comes
            if len(self.steps) > 1.1 * _MOST_RECORDS:  # a tenth at a time, which is seldom
                self._delete(slice(0, -_MOST_RECORDS))
            if not piece or self._position >= size:
                return

    def _take(self, line: bytes) -> None:
        if len(line) > _LINE:
            return
        try:
            record = json.loads(line)
            numbers = {name: float(value) for name, value in record.items() if type(value) in (int, float)}
        except (ValueError, AttributeError, OverflowError, RecursionError):
            return
        if type(record.get("step")) is not int or abs(record["step"]) > 2**53:
            return
        if self.steps and record["step"] <= self.steps[-1]:
            # A run that went back to an earlier checkpoint writes these steps again.
            self._delete(slice(bisect_left(self.steps, record["step"]), None))
        if "step_seconds" in numbers:
            known = self.values.get("elapsed") if self.steps else None  # a record may have had no seconds
            last, before = (self.steps[-1], known[-1]) if known else (record["step"] - 1, 0.0)
            numbers["elapsed"] = before + numbers["step_seconds"] * (record["step"] - last)
        for name in list(numbers)[:_MOST_KEYS]:
            if name not in self.values and len(self.values) < _MOST_KEYS:
                self.values[name] = array("d", [math.nan] * len(self.steps))
        self.steps.append(record["step"])
        for name, column in self.values.items():
            column.append(numbers.get(name, math.nan))

    def _delete(self, which: slice) -> None:
        for column in (self.steps, *self.values.values()):
            del column[which]

    def after(self, step: int, most: int) -> Iterator[dict[str, float]]:
        start = bisect_right(self.steps, step)
        for i in range(start, min(start + most, len(self.steps))):
            found = {name: column[i] for name, column in self.values.items() if math.isfinite(column[i])}
            yield {"step": self.steps[i], **found}

    def points(self, name: str, axis: str = "step") -> list[tuple[float, float]]:
        ys = self.values.get(name, ())
        xs: Sequence[float] = self.steps if axis == "step" else self.values.get(axis, ())
        return [(x, y) for x, y in zip(xs, ys, strict=False) if math.isfinite(x) and math.isfinite(y)]


@dataclass
class Samples:
    """Texts that the run wrote with its weights at some steps; the newest are kept."""

    WORDS: ClassVar[str] = "sample after step"  # by which the log is searched
    position: int = 0  # from which it is searched next
    _texts: dict[int, str] = field(default_factory=dict)

    def read_on(self, piece: LogPiece) -> list[tuple[int, str]]:
        """All samples after this piece of the log, the newest first."""
        if piece.size < self.position:  # the log was written anew
            self.position, self._texts = 0, {}
        lines = [re.search(f"{self.WORDS} ([0-9]+): (.*)", match.line) for match in piece.matches]
        found = self._texts | {int(line[1]): _unquoted(line[2]) for line in lines if line}
        self._texts = dict(sorted(found.items())[-_MOST_SAMPLES:])
        # The last line of the log may not have ended: it is searched again.
        self.position = piece.next if piece.next < piece.size else max(0, piece.next - 2**16)
        return sorted(self._texts.items(), reverse=True)


def _unquoted(text: str) -> str:
    """The log shows a sample as Python writes a string, on one line."""
    try:
        return inert(str(ast.literal_eval(text)).encode("utf-8", errors="replace"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


@dataclass
class Curves:
    """All that a run records."""

    samples: Samples = field(default_factory=Samples)
    training: Columns = field(default_factory=lambda: Columns("metrics.jsonl"))
    validation: Columns = field(default_factory=lambda: Columns("validation.jsonl"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_on(self, read: Read) -> "Curves":
        with self._lock:
            self.training.read_on(read)
            self.validation.read_on(read)
        return self

    def line(self, name: str, axis: str) -> list[tuple[float, float]]:
        """Points of a curve; validation is placed where training was at its steps."""
        if name in self.training.values:
            return self.training.points(name, axis)
        points = self.validation.points(name)
        if axis == "step":
            return points
        places = dict(zip(self.training.steps, self.training.values.get(axis, ()), strict=False))
        return [(places[step], y) for step, y in points if step in places]

    def metrics(self) -> list[str]:
        """What a model of one's own measures on held-out data beside the loss."""
        return [name for name in self.validation.values if name not in ("step", "validation_loss", "validation_tokens")]

    def names(self) -> list[str]:
        own = ("step", "elapsed")
        return [name for name in (*self.training.values, *self.validation.values) if name not in own]


def smooth(points: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
    """An exponential mean whose first values are not drawn to 0."""
    mean, total, out = 0.0, 0.0, []
    for x, y in points:
        mean, total = weight * mean + (1 - weight) * y, weight * total + (1 - weight)
        out.append((x, mean / total))
    return out


def thin(points: Sequence[tuple[float, float]], most: int = 1000) -> list[tuple[float, float]]:
    """At most about `most` points: of each stretch its lowest and its highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most / 2))
    out = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        out += sorted(ends)
    return out
