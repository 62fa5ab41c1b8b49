"""A site with a valid certificate that says whatever it likes: it is refused, and nobody else notices.

    SECONDS_OF_LIES=600 .venv/bin/python -m pytest tests/fleet/swarm/test_lying_site.py -k whatever --timeout 900

sends made messages for ten minutes; the suite does so for a few seconds.
"""

import json
import os
import random
import struct
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fleet.swarm.served import keys, served
from tests.house.fuzzing import damage_json
from titan_fleet.section import Swarm
from titan_fleet.swarm import codec
from titan_fleet.swarm.fragments import Box
from titan_fleet.swarm.link import Link, Travel
from titan_fleet.swarm.outer import Outer
from titan_fleet.swarm.syncer.state import FragmentState
from torchtitan.refusal import Refusal

SECTION = Swarm(fragments=1, codec="int8", quorum=2, sites=3, grace_seconds=0.05)
SHARED = {"protocol": 1, "model.name": "llama3"}
TABLE = [["a", [8, 300]], ["b", [64]]]
WHOLE = [Box(0, 0, 8, 0, 300), Box(1, 0, 1, 0, 64)]
PART = Box(0, 0, 4, 0, 300)  # the liar never has a whole difference, which would count as any site's
HELLO = {"shared": SHARED, "streams": 8, "place": [0, 1], "swarm": ""}
PARTS = "found", "anchor", "difference", "result"
ROUTES = ("hello", "join", "beat", "leave", *PARTS)
REFUSALS = 400, 404, 405, 409, 413, 503
HUGE = "9" * 5000  # more digits than Python reads


def numbers(value: float, kind: Any = "int8", boxes: Any = WHOLE) -> bytes:
    return b"".join(codec.pack(*codec.encode(torch.full(box.shape, float(value)), kind), kind) for box in boxes)


def link(folder: Path, url: str, number: int) -> Link:
    return Link(url, folder / f"keys/site-{number}", 0)


def joined(folder: Path, url: str, number: int, step: int = 0) -> tuple[Link, int]:
    """A site, and the version of the anchor that it has."""
    own = link(folder, url, number)
    own.run = own.ask("/hello", HELLO | {"site": f"site-{number}"})["run"]
    told = own.ask("/join", {"run": own.run, "weights": TABLE, "step": step, "is_new": step == 0})
    own.session = told["session"]
    if told["versions"] == [-1]:
        own.found(0, WHOLE, numbers(1, "float32"))
    return own, max(told["versions"][0], 0)


def both(first: Link, second: Link, values: tuple[float, float], base: int, step: int) -> list[Travel]:
    """What two sites bring home from their meeting."""
    travels = [Travel(0, base, step, 100, WHOLE, WHOLE, numbers(value)) for value in values]
    other = threading.Thread(target=second.carry, args=(travels[1],), daemon=True)
    other.start()
    first.carry(travels[0])
    other.join(20)
    return travels


class Liar:
    def __init__(self, folder: Path, url: str, run: str, chance: random.Random) -> None:
        self.chance, self.run, self.session = chance, run, 0
        self.client = link(folder, url, 2).client
        self.messages: dict[str, Any] = {
            "hello": HELLO | {"site": "site-2"},
            "join": {"run": run, "weights": TABLE, "step": 0, "is_new": True},
            "beat": {"speed": 1.0, "step": 1},
            "leave": {},
            "found": {"rank": 0, "boxes": [PART]},
            "anchor": {"boxes": [PART]},
            "difference": {"rank": 0, "base": 0, "step": 10, "tokens": 100, "boxes": [PART]},
            "result": {"boxes": [PART], "base": 0, "step": 10},
        }

    def begin(self) -> None:
        self.post("hello", self.messages["hello"])
        self.session = self.post("join", self.messages["join"]).json().get("session", 0)

    def post(self, route: str, said: Any, payload: bytes = b"", place: str | None = None) -> httpx.Response:
        text = json.dumps(said).replace('"HUGE"', HUGE).encode()
        body = struct.pack("<I", len(text)) + text + payload if route in PARTS else text
        return self.send(route, body, place)

    def send(self, route: str, body: bytes, place: str | None = None) -> httpx.Response:
        at = f"/{self.run}/{self.session}/0/" if place is None else place
        return self.client.post(f"{at}{route}" if route in PARTS else f"/{route}", content=body)

    def lie(self) -> tuple[str, bytes, int]:
        """Says something made up, and returns what, and the answer's number."""
        chance = self.chance
        route = chance.choice(ROUTES)
        said = damage_json(self.messages[route], chance)
        if chance.random() < 0.3 and route in PARTS:
            said = dict(self.messages[route], boxes=[self._box() for _ in range(chance.choice([0, 1, 2, 3, 500]))])
        if chance.random() < 0.1 and isinstance(said, dict) and said:
            said[chance.choice(list(said))] = chance.choice(["HUGE", 1.5, 10.0**300, -1, 5, 2**62])
        payload = numbers(1.0, "float32" if route == "found" else "int8", [PART]) if chance.random() < 0.5 else b""
        payload = payload[: chance.randrange(len(payload) + 1)] if chance.random() < 0.3 else payload
        place = f"/{self.run}/{self.session}/0/"
        if chance.random() < 0.1:
            bits = [chance.choice([self.run, "x", HUGE, "%00", "-1", "0", "1e3", "%ff"]) for _ in range(3)]
            place = f"/{'/'.join(bits)}/"
        body = json.dumps(said).replace('"HUGE"', HUGE).encode()
        if chance.random() < 0.05:
            body = chance.choice([b"[" * 100_000, b'{"a":' * 50_000, b"", b"\xff" * 9, b"null", b'{"step": NaN}'])
        if route in PARTS:
            length = len(body) if chance.random() < 0.95 else chance.randrange(1 << 32)
            body = struct.pack("<I", length) + body + payload
        return route, body, self.send(route, body, place).status_code

    def _box(self) -> list[int]:
        rows, columns = sorted(self.chance.choices(range(-1, 5), k=2)), sorted(self.chance.choices(range(-1, 302), k=2))
        return [self.chance.choice([0, 0, 0, 2, -1]), *rows, *columns]


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_whatever_a_site_says_the_others_meet_as_without_it(tmp_path: Path, monkeypatch, caplog) -> None:
    """And the syncer starts again from its files after each round."""
    monkeypatch.setattr("titan_fleet.swarm.syncer.server.POLL_SECONDS", 0.05)
    keys(tmp_path, 3)
    chance, ends = random.Random(0), time.monotonic() + float(os.environ.get("SECONDS_OF_LIES", "3"))
    alone = FragmentState(tmp_path / "alone", WHOLE, "int8", Outer(0.7, 0.6))  # the same merges, without a liar
    alone.found("site-0", 0, WHOLE, memoryview(bytearray(numbers(1, "float32"))))
    rounds, begun_mib, count = 0, 0.0, 0
    while time.monotonic() < ends or rounds < 2:
        with served(tmp_path, SECTION, SHARED) as (url, syncer):
            (first, base), (second, _) = (joined(tmp_path, url, number, rounds) for number in (0, 1))
            liar, lies = Liar(tmp_path, url, syncer.run, chance), list[tuple[str, bytes, int]]()
            liar.begin()
            lying = threading.Thread(target=lambda liar=liar, lies=lies: lies.extend(liar.lie() for _ in range(100)))
            lying.start()
            values, step = (chance.uniform(0.5, 1.5), chance.uniform(0.5, 1.5)), rounds + 10
            travels = both(first, second, values, base, step)
            lying.join(60)
            assert len(lies) == 100
            for number, value in enumerate(values):
                alone.add(f"site-{number}", 0, base, step, 100, WHOLE, memoryview(bytearray(numbers(value))))
            expected = alone.merge("a test")
            for travel in travels:
                assert travel.failed is None and travel.about is not None
                assert travel.about["checksum"] == expected.checksum and travel.about["version"] == base + 1
            assert first.client.get("/status").json()["sites"]["site-0"]["step"] >= step
        assert not [each for each in caplog.records if each.exc_info or each.levelname == "ERROR"]
        for _ in range(2):  # the liar is the first to come, and the syncer starts again from what it has kept of it
            with served(tmp_path, SECTION, SHARED, out=f"first-{rounds}") as (url, syncer):
                liar = Liar(tmp_path, url, syncer.run, chance)
                liar.post("hello", liar.messages["hello"])
                lies += [liar.lie() for _ in range(25)]
                assert liar.client.get("/status").status_code == 200
        wrong = [(route, body[:300], answer) for route, body, answer in lies if answer not in (200, 202, *REFUSALS)]
        assert not wrong, wrong[:3]
        begun_mib, rounds, count = begun_mib or resident_mib(), rounds + 1, count + len(lies)
        assert resident_mib() < begun_mib + 200
    print(f"{count} messages in {rounds} rounds, {resident_mib() - begun_mib:.0f} MiB more")


LIES: list[tuple[str, dict[str, Any], bytes, str]] = [
    ("difference", {}, b"short", "5 bytes of numbers where"),
    ("difference", {"boxes": [PART, PART]}, numbers(1, boxes=[PART, PART]), "a weight twice"),
    ("difference", {"tokens": "HUGE"}, numbers(1, boxes=[PART]), "no message of a swarm"),
    ("difference", {"tokens": 2**50}, numbers(1, boxes=[PART]), "tokens"),
    ("difference", {"rank": 2**40}, numbers(1, boxes=[PART]), "rank"),
    ("difference", {"base": 7}, numbers(1, boxes=[PART]), "this syncer's newest is 0"),
    ("difference", {"step": 1.5}, numbers(1, boxes=[PART]), "step"),
    ("result", {"boxes": [[0, 0, 9, 0, 300]]}, b"", "no part of this fragment"),
    ("beat", {"speed": float("nan")}, b"", "speed"),
    ("beat", {"step": 2**64}, b"", "step"),
    ("join", {"weights": [["a", [0, 3]]]}, b"", "weights"),
    ("hello", {"place": [3, 2]}, b"", "place"),
]


@pytest.mark.parametrize(("route", "changed", "payload", "says"), LIES)
def test_a_lie_is_refused_to_the_liar_when_it_comes(tmp_path, route, changed, payload, says):
    keys(tmp_path, 3)
    with served(tmp_path, SECTION, SHARED) as (url, syncer):
        joined(tmp_path, url, 0)
        liar = Liar(tmp_path, url, syncer.run, random.Random(0))
        liar.begin()
        answer = liar.post(route, liar.messages[route] | changed, payload)
        assert answer.status_code == 409 and says in answer.json()["refusal"]
        assert liar.post("difference", {}, place=f"/{syncer.run}/{HUGE}/0/").status_code == 409
        assert not syncer.fragments[0].arriving and liar.client.get("/status").status_code == 200


def test_no_site_replaces_an_anchor_and_no_first_weights_are_kept_that_cannot_be_read_again(tmp_path):
    keys(tmp_path, 3)
    whole = numbers(5, "float32")
    for weights in (
        [["a", [2**40, 2**40]]],
        [["a", "8"]],
        [["a", [8]], ["a", [8]]],
        [[str(number), []] for number in range(2**16 + 1)],
        [["a", [10**14]]],
    ):
        with served(tmp_path, SECTION, SHARED) as (url, syncer):
            liar = Liar(tmp_path, url, syncer.run, random.Random(0))
            if not syncer.sites:
                assert "has not said hello" in liar.post("join", liar.messages["join"]).json()["refusal"]
            liar.post("hello", liar.messages["hello"])
            assert liar.post("join", liar.messages["join"] | {"weights": weights}).status_code == 409
            assert syncer.weights is None
    with served(tmp_path, SECTION, SHARED) as (url, syncer):
        liar = Liar(tmp_path, url, syncer.run, random.Random(0))
        liar.begin()
        for payload in (numbers(float("nan"), "float32"), whole[:-4]):
            assert liar.post("found", {"rank": 0, "boxes": WHOLE}, payload).status_code == 409
        half, top = (
            [Box(0, 0, 8, 0, 150), WHOLE[1]],
            [Box(0, 0, 4, 0, 300)],
        )  # as many numbers as all, some of them twice
        for rank, boxes, says in (0, half, "false"), (1, top, "send, too"), (2, WHOLE, "send, too"):
            assert says in liar.post("found", {"rank": rank, "boxes": boxes}, numbers(5, "float32", boxes)).text
        assert syncer.fragments[0].version == -1
        joined(tmp_path, url, 0)
        rank_0 = liar.messages["difference"]
        assert liar.post("difference", rank_0, numbers(1, boxes=[PART])).status_code == 200
        other = {"rank": 1, "boxes": [WHOLE[1]], "tokens": 7}
        answer = liar.post("difference", rank_0 | other, numbers(1, boxes=[WHOLE[1]]))
        assert "counts 7 tokens, and another 100" in answer.json()["refusal"]
        for version in (0, 5, 1.5, 10.0**300):
            liar.post("found", {"version": version, "rank": 0, "boxes": WHOLE}, whole)
        assert syncer.fragments[0].version == 0 and syncer.fragments[0].anchor[0][0, 0].item() == 1
    file = tmp_path / "syncer/run.json"
    for damaged in ('{"run": 1}', "[" * 9, file.read_text().replace('"streams": 8', '"streams": -8')):
        file.write_text(damaged)
        with pytest.raises(Refusal, match="run.json is not what a syncer writes"):
            with served(tmp_path, SECTION, SHARED):
                pass
