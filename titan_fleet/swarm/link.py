"""A site's side of the connection. It only dials out, tries again for as long as it takes, and never unpickles."""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from titan_fleet.swarm.certificates import context
from titan_fleet.swarm.fragments import Box
from titan_fleet.swarm.wire import cut, framed
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_PAUSES = 0.2, 0.5, 1, 2, 5, 10  # seconds before a further try; then always the last
_PIECE = 1 << 16  # of a body: a time-out is for each, so a slow line only takes longer
_ANSWERS = 200, 202, 404  # of a syncer; anything else is a proxy's, or a syncer in trouble


class Ended(Exception):
    """The run ends while it waits for the syncer."""


@dataclass
class Travel:
    """A fragment on its way, on one rank."""

    number: int
    base: int
    step: int
    tokens: int
    boxes: Sequence[Box]
    sent: Sequence[Box]  # those of the boxes that no other rank sends
    body: bytes
    begun: float = field(default_factory=time.monotonic)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    about: dict[str, Any] | None = None  # the meeting, once it has been
    payload: memoryview = memoryview(b"")
    failed: BaseException | None = None

    @property
    def has_arrived(self) -> bool:
        return self.about is not None or self.failed is not None


class Link:
    def __init__(self, url: str, keys: Path, rank: int) -> None:
        timeout = httpx.Timeout(60.0, connect=10.0, pool=None)
        self.client = httpx.Client(base_url=url, verify=context(keys, is_server=False), timeout=timeout)
        self.url, self.rank = url, rank
        self.run, self.session = "", 0  # of the swarm, and of this site in it
        self.ended, self.is_away = threading.Event(), False

    def ask(self, path: str, said: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._call(path, json.dumps(said).encode()).json()
        return answer

    def try_once(self, path: str, said: dict[str, Any]) -> None:
        """For what does not matter."""
        try:
            self.client.post(path, content=json.dumps(said).encode(), timeout=5.0)
        except httpx.HTTPError:
            return

    def fetch_anchor(self, number: int, boxes: Sequence[Box]) -> tuple[int, memoryview]:
        while True:
            answer = self._call(f"{self._place(number)}/anchor", framed({"boxes": boxes}))
            if answer.status_code == 200:
                header, payload = cut(answer.content)
                return json.loads(header)["version"], payload
            self._pause(1)

    def found(self, number: int, boxes: Sequence[Box], payload: bytes) -> None:
        """Offer first weights; the syncer takes those of the first site whose ranks have sent all."""
        header = {"rank": self.rank, "boxes": boxes}
        self._call(f"{self._place(number)}/found", framed(header, payload))

    def carry(self, travel: Travel) -> None:
        """Send a difference, and wait for the meeting that it was part of. Runs in a thread of its own."""
        try:
            while travel.about is None:
                self._send(travel)
                self._await(travel)
        except (Exception, Ended) as error:
            travel.failed = error

    def _send(self, travel: Travel) -> None:
        header = {"rank": self.rank, "base": travel.base, "step": travel.step, "tokens": travel.tokens}
        body = framed(header | {"boxes": travel.sent}, travel.body)
        if travel.sent:
            self._call(f"{self._place(travel.number)}/difference", body)
            travel.bytes_up += len(body)

    def _await(self, travel: Travel) -> None:
        asked = framed({"boxes": travel.boxes, "base": travel.base, "step": travel.step})
        while True:
            answer = self._call(f"{self._place(travel.number)}/result", asked)
            if answer.status_code == 200:
                travel.bytes_down = len(answer.content)
                about, travel.payload = cut(answer.content)
                travel.seconds = time.monotonic() - travel.begun
                travel.about = json.loads(about)  # last: the training thread takes all of it once this is there
                return
            if answer.status_code == 404:  # the syncer has lost it, or the other ranks have not sent theirs
                self._pause(0.2)
                return

    def _place(self, number: int) -> str:
        return f"/{self.run}/{self.session}/{number}"

    def _call(self, path: str, body: bytes) -> httpx.Response:
        pauses = itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1]))
        while True:
            why: object
            try:
                answer = self.client.post(path, content=_pieces(body), headers={"content-length": str(len(body))})
            except httpx.HTTPError as error:
                why = error
            else:
                if answer.status_code == 409:
                    raise Refusal(f"the syncer refuses: {answer.json()['refusal']}")
                if answer.status_code in _ANSWERS:
                    if self.is_away:
                        self.is_away = False
                        logger.info(f"{self.url} is there again")
                    return answer
                why = f"it answers with {answer.status_code}"
            self._note_away(why)
            self._pause(next(pauses))

    def _note_away(self, why: object) -> None:
        if not self.is_away:
            self.is_away = True
            logger.warning(f"{self.url} cannot be reached ({why}); this site goes on and tries again")

    def _pause(self, seconds: float) -> None:
        if self.ended.wait(seconds):
            raise Ended

    def close(self) -> None:
        self.ended.set()
        self.client.close()


class Links:
    """Links to all syncers of a swarm. Each serves every so-many-th fragment, in the order of the list.

    The first syncer says which part of the data a site reads. The site tells the others which swarm is theirs, so a
    syncer of another swarm, or one in another place of the list, refuses it.
    """

    def __init__(self, urls: Sequence[str], keys: Path, rank: int) -> None:
        self.all = [Link(url, keys, rank) for url in urls]
        self.urls, self.ended = ", ".join(urls), self.all[0].ended
        for link in self.all:
            link.ended = self.ended

    @property
    def run(self) -> str:
        """The swarm's name: that of the first syncer's run."""
        return self.all[0].run

    def of(self, number: int) -> Link:
        return self.all[number % len(self.all)]

    def hello(self, said: dict[str, Any]) -> dict[str, Any]:
        """What the first syncer says, and the runs of all. One rank asks; all ranks then take the runs."""
        answers: list[dict[str, Any]] = []
        for place, link in enumerate(self.all):
            swarm = answers[0]["run"] if answers else ""
            answers.append(link.ask("/hello", said | {"place": [place, len(self.all)], "swarm": swarm}))
        return answers[0] | {"runs": [answer["run"] for answer in answers]}

    def join(self, said: dict[str, Any]) -> dict[str, Any]:
        """What the first syncer says, with the versions of all fragments, and where the site furthest along is."""
        answers = [link.ask("/join", said | {"run": link.run}) for link in self.all]
        versions = [answers[n % len(answers)]["versions"][n] for n in range(len(answers[0]["versions"]))]
        begins_at = max(answer["begins_at"] for answer in answers)
        told = {"versions": versions, "begins_at": begins_at, "sessions": [answer["session"] for answer in answers]}
        return answers[0] | told

    def take_runs(self, runs: Sequence[str]) -> None:
        for link, run in zip(self.all, runs, strict=True):
            link.run = run

    def take_sessions(self, sessions: Sequence[int]) -> None:
        for link, session in zip(self.all, sessions, strict=True):
            link.session = session

    def tell(self, path: str, said: dict[str, Any]) -> None:
        for link in self.all:
            link.try_once(path, said)

    def close(self) -> None:
        for link in self.all:
            link.close()


def _pieces(body: bytes) -> Iterator[bytes]:
    return (body[begin : begin + _PIECE] for begin in range(0, len(body), _PIECE))
