"""A site's links to all syncers of its swarm. Each syncer serves every so-many-th fragment, in the order of the list.

The first syncer says which part of the data a site reads. The site tells the others which swarm is theirs, so a syncer
of another swarm, or one in another place of the list, refuses it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.swarm.link import Link


class Links:
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
