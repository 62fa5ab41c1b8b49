"""What a syncer knows and does; server.py speaks HTTP around it.

It holds the run's identity, its sites, and the fragments with their anchors. It knows no model: the first site that
joins brings the table of weights and their first values, and from then on no site's values replace them.
"""

import contextlib
import itertools
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_fleet.section import Swarm
from titan_fleet.swarm.decide import differing, is_due, where_to_begin
from titan_fleet.swarm.fragments import Box, Weight, divide
from titan_fleet.swarm.identity import MAY_CHANGE
from titan_fleet.swarm.messages import Known, Weights, read
from titan_fleet.swarm.outer import Outer
from titan_fleet.swarm.syncer.state import FragmentState, Meeting
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

UNREADABLE = "run.json is not what a syncer writes; bring it back from a copy, or name another --out"
ABSENT_SECONDS = 30.0  # without a word, after which merges do not wait for a site


class Syncer:
    """All methods may be called from several threads; a fragment's own lock keeps its merges apart."""

    def __init__(
        self,
        folder: Path,
        section: Swarm,
        shared: Mapping[str, Any],
        seed: int | None,
        sites: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`sites`: names in the order in which they got their keys, which decides their parts of the data."""
        self.folder, self.section, self.shared, self.named = folder, section, dict(shared), sites
        self.outer = Outer.of(section.method, section.outer_lr, section.outer_momentum)
        self.file, self.lock = folder / "run.json", threading.RLock()
        self.heard: dict[str, float] = {}
        self.fragments: list[FragmentState] = []
        folder.mkdir(parents=True, exist_ok=True)
        known: dict[str, Any]
        if self.file.exists():
            known = read_known(folder).model_dump()
            fixed = {key: value for key, value in known["shared"].items() if key not in MAY_CHANGE}
            if different := differing(fixed, self.shared):
                raise Refusal(
                    f"{folder} holds another swarm's run: {different[0].replace('at this site', 'in this file')}; name "
                    "another --out, or serve the file that it was made with"
                )
        else:
            known = {"run": secrets.token_hex(8), "seed": secrets.randbits(31) if seed is None else seed}
            known |= {"shared": self.shared, "weights": None, "streams": None, "sites": {}, "place": None, "swarm": ""}
            known |= {"download": {}, "versions": []}
        self.run, self.seed = known["run"], known["seed"]
        self.weights: Weights | None = known["weights"]
        self.download: dict[str, str] = known["download"]  # digests of what the first site has beside these weights
        self.streams: int | None = known["streams"]
        self.sites: dict[str, dict[str, Any]] = known["sites"]
        self.place: tuple[int, int] | None = known["place"]  # among the swarm's syncers
        self.swarm: str = known["swarm"]  # the run of the first of them
        if self.weights is not None:
            self.fragments = self._fragments_of(self.weights, known["versions"])
        self._save()

    @property
    def versions(self) -> list[int]:
        return [fragment.version for fragment in self.fragments]

    @property
    def waits_for_all(self) -> bool:
        return self.section.quorum >= self.section.sites

    @property
    def _first_fragment(self) -> int:
        return self.place[0] if self.place else 0

    def hello(
        self, site: str, shared: Mapping[str, Any], streams: int, place: tuple[int, int] = (0, 1), swarm: str = ""
    ) -> dict[str, Any]:
        """Admit a site whose configuration is the run's, and give it its part of the data.

        `place`: where the site's list of syncers has this one, and how many it has; `swarm`: the run of the first.
        """
        if self.streams not in (None, streams):
            raise Refusal(
                f"site {site} has {streams} streams of data, and the run {self.streams}; set training.num_streams = "
                f"{self.streams} there"
            )
        if different := differing(self.shared, shared):
            raise Refusal(f"site {site} does not fit the run {self.run}: {'; '.join(different)}")
        with self.lock:
            if self.place not in (None, place) or self.swarm not in ("", swarm):
                at, count = self.place or place
                raise Refusal(
                    f"site {site} has this syncer as number {place[0] + 1} of {place[1]} of swarm {swarm or self.run}, "
                    f"and it is number {at + 1} of {count} of swarm {self.swarm or self.run}; give all sites the same "
                    "swarm.syncers, in the same order"
                )
            if site not in self.sites:
                taken = {each["part"] for each in self.sites.values()}
                free = [number for number in range(self.section.sites) if number not in taken]
                named = list(self.named())
                if site in named and named.index(site) in free:
                    free = [named.index(site)]
                if not free:
                    raise Refusal(
                        f"site {site}: all {self.section.sites} parts of the data have their site "
                        f"({', '.join(sorted(self.sites))}); a swarm with more needs swarm.sites of its own"
                    )
                self.sites[site] = {"part": free[0], "session": 0, "step": 0, "tokens": 0, "speed": 0.0, "meeting": ""}
                self.streams, self.place, self.swarm = streams, place, swarm
                self._save()
            self.hear(site)
            own = self.sites[site]
            logger.info(f"site {site} is there, with part {own['part'] + 1} of {self.section.sites} of the data")
            return {"run": self.run, "seed": self.seed, "part": own["part"], "parts": self.section.sites}

    def join(
        self, site: str, run: str, weights: Weights, download: Mapping[str, str], step: int, is_new: bool
    ) -> dict[str, Any]:
        self.check(run)
        with self.lock:
            if site not in self.sites:
                raise Refusal(f"site {site} has not said hello to this syncer; restart the site")
            if self.weights is None:
                fragments = self._fragments_of(weights)
                self.weights, self.fragments, self.download = weights, fragments, dict(download)
                logger.info(f"site {site} decides the model: {len(weights)} weights of {_size(weights):,} numbers")
            if weights != self.weights:
                other = next(
                    (f"{[*a]} and {[*b]}" for a, b in zip(weights, self.weights, strict=False) if a != b),
                    "more weights",
                )
                raise Refusal(f"site {site} has another model than the run: {other}; use the run's [model]")
            if unlike := [what for what, digest in download.items() if self.download.get(what, digest) != digest]:
                ours, theirs = (each[unlike[0]][:12] for each in (self.download, download))
                raise Refusal(
                    f"site {site} has other files than the site that began the run, so the two would not learn the "
                    f"same: {', '.join(unlike)} (SHA-256 {theirs}, and {ours} in the run); copy them from there"
                )
            own = self.sites[site]
            own["session"] += 1  # what an earlier run of this site still sends is refused
            self._save()
            read_again = max(0, own["step"] - step) if not self.waits_for_all else 0
            there = [name for name in self.present() if name != site] or [name for name in self.sites if name != site]
            others = [self.sites[name]["step"] for name in there]
            begins_at = where_to_begin(step, others, is_new and not self.waits_for_all)
            self.hear(site)
            return {
                "session": own["session"],
                "clock": time.time(),
                "versions": self.versions,
                "begins_at": begins_at,
                "again": read_again,
            }

    def check(self, run: str, site: str = "", session: int = 0) -> None:
        if site and session != (newest := self.sites.get(site, {}).get("session", 0)):
            raise Refusal(
                f"site {site} has joined again since (session {newest}, this message is of {session}); let one run "
                "have a site's keys, and make keys for another"
            )
        if run != self.run:
            raise Refusal(
                f"this is the run {self.run}, and the message is for {run}; restart the site, so that it joins"
            )

    def fragment(self, number: int) -> FragmentState:
        if not 0 <= number < len(self.fragments):
            raise Refusal(f"there is no fragment {number}; the site has to join first")
        return self.fragments[number]

    def hear(self, site: str, **said: Any) -> None:
        self.heard[site] = time.monotonic()
        if site in self.sites:
            self.sites[site] |= said

    def leave(self, site: str) -> None:
        self.heard.pop(site, None)
        logger.info(f"site {site} has left")

    def present(self) -> list[str]:
        now, heard = time.monotonic(), list(self.heard.items())  # another thread may hear of a further site
        return sorted(site for site, when in heard if site in self.sites and now - when < ABSENT_SECONDS)

    def merge_if_due(self, number: int) -> Meeting | None:
        fragment, section = self.fragments[number], self.section
        present = [] if self.waits_for_all else self.present()
        answer = is_due(fragment.arrived(), present, section.quorum, section.grace_seconds, time.monotonic())
        if not answer.yes:
            return None
        begun = time.monotonic()
        tokens = {site: each.tokens for site, each in fragment.arriving.items()}
        meeting = fragment.merge(answer.why)
        with self.lock:
            for site, step in meeting.counted.items():
                own = self.sites[site]
                own["tokens"] += tokens[site] if number == self._first_fragment else 0
                own["step"], own["meeting"] = max(step, own["step"]), f"{number}.{meeting.version}"
            self._save()
            # How far the swarm is, for `runs` and the console; a full disk fails no meeting that is saved.
            with contextlib.suppress(OSError), open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": max(own["step"] for own in self.sites.values())}) + "\n")
        for site, (_, why) in meeting.rejected.items():
            logger.warning(f"meeting {meeting.version} of fragment {number}: {site} does not count: {why}")
        logger.info(
            f"meeting {meeting.version} of fragment {number}: {answer.why}, merged in "
            f"{time.monotonic() - begun:.1f} s, outer norm {meeting.norm:.3g}, sites {meeting.apart:.2%} apart"
        )
        return meeting

    def status(self) -> dict[str, Any]:
        present = self.present()
        with self.lock:
            sites = {name: each | {"present": name in present} for name, each in self.sites.items()}
        first, count = self.place or (0, 1)
        versions = {number: self.fragments[number].version for number in range(first, len(self.fragments), count)}
        return {"run": self.swarm or self.run, "shared": self.shared, "versions": versions, "sites": sites}

    def _fragments_of(self, weights: Weights, versions: Sequence[int] = ()) -> list[FragmentState]:
        """`versions`: those that were given out. Refuses a table that this syncer could not serve."""
        size, codec = _size(weights), self.section.codec
        needed, memory = size * (8 if codec == "float32" else 10), _memory()
        if len({name for name, _ in weights}) < len(weights):
            raise Refusal("two of the model's weights have one name; this is no table that a site makes")
        if needed > memory:
            raise Refusal(
                f"the syncer needs {needed:,} bytes of memory for a model of {size:,} numbers, and its machine has "
                f"{memory:,}; serve on a larger one"
            )
        boxes: list[list[Box]] = divide([Weight(name, tuple(shape)) for name, shape in weights], self.section.fragments)
        newest = itertools.chain(versions, itertools.repeat(-1))
        return [
            FragmentState(self.folder / f"fragment-{number}", each, codec, self.outer, given_out)
            for number, (each, given_out) in enumerate(zip(boxes, newest, strict=False))
        ]

    def _save(self) -> None:
        """Nothing is written that could not be read again."""
        text = json.dumps({name: getattr(self, name) for name in Known.model_fields})
        read(Known, text, UNREADABLE)
        write_whole(self.file, text)


def read_known(folder: Path) -> Known:
    return read(Known, (folder / "run.json").read_bytes(), f"{folder}: {UNREADABLE}")


def _size(weights: Weights) -> int:
    return sum(math.prod(shape) for _, shape in weights)


def _memory() -> int:
    """Of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
