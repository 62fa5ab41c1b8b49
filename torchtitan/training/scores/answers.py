"""What a run on conversations changed: loss and answers of ten held-out ones, before its first step and at its end."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.data.batch import OwnSlots
from torchtitan.data.chat.prompts import ChatPrompts
from torchtitan.data.cursor import Order
from torchtitan.data.loader import open_sources
from torchtitan.data.stream import Stream
from torchtitan.observe.log import logger
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.parallel.collectives import any_says_so
from torchtitan.training.data import holds_out, shape_of, source_of
from torchtitan.training.run import Run
from torchtitan.training.scores.generation import Sampling, stop_ids
from torchtitan.training.scores.led import Led
from torchtitan.training.scores.lines import Row
from torchtitan.training.scores.scorer import Scorer
from torchtitan.training.step import ForwardBackward
from torchtitan.whole_file import write_whole

_COUNT, _NEW_TOKENS = 10, 64


@dataclass(frozen=True)
class Conversation:
    ids: list[int]
    learned: list[tuple[int, int]]  # where what is learned begins and ends


@dataclass(frozen=True)
class Answer:
    loss: float  # of what is learned of the conversation
    text: str  # in the place of its last answer
    ended: bool  # by an end mark, not by the limit


class Answers:
    """Made on all ranks before the first step. A run that resumes finds what was measured before its own first one."""

    def __init__(self, run: Run, forward_backward: ForwardBackward, watch: NoWatch) -> None:
        assert run.tokenizer is not None
        self.config, self.tokenizer, self.watch = run.config, run.tokenizer, watch
        self.scorer = Scorer(run, forward_backward)
        self.led, self.file = Led(self.scorer, "answers"), Path(run.folder) / "answers.json"
        self.conversations: list[Conversation] = []
        self.record: dict[str, Any] = {}
        if run.place.rank == 0:
            found = _read(run.config, run, self.scorer.longest - _NEW_TOKENS)
            self.conversations = list(islice(found, _COUNT))
            self.record = self._begun()
        if any_says_so(bool(self.conversations) and "before" not in self.record):
            self._measure("before")

    def _begun(self) -> dict[str, Any]:
        """What was measured of the same conversations before the run's first step."""
        conversations = sha256(repr(self.conversations).encode()).hexdigest()
        found: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        if found.get("conversations") == conversations:
            return found
        if found:
            logger.info(
                f"{self.file}: this run began with other held-out conversations; from here on the table compares with "
                "answers before this start"
            )
        return {"conversations": conversations}

    def finish(self) -> None:
        """Measure again, and log the table."""
        if not any_says_so(bool(self.conversations)):
            return
        with self.watch.saving():
            self._measure("after")
        if self.conversations:
            logger.info("\n".join(self._table()))

    def _measure(self, when: str) -> None:
        answers = self.led.run(self._lead)
        if answers is not None:
            self.record |= {
                "asked": [self._decode(each.ids[: each.learned[-1][0]]) for each in self.conversations],
                "expected": [self._decode(each.ids[slice(*each.learned[-1])]).strip() for each in self.conversations],
                when: [asdict(answer) for answer in answers],
            }
            write_whole(self.file, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")

    def _lead(self) -> list[Answer]:
        stop = stop_ids(Path(self.config.model.hf_assets_path), self.tokenizer)
        stop.add(ChatPrompts(self.config.model, self.tokenizer).stop)
        rows = [Row(each.ids[:end], begin) for each in self.conversations for begin, end in each.learned]
        scores = iter(self.led.call("score", rows))
        prompts = [each.ids[: each.learned[-1][0]] for each in self.conversations]
        texts = self.led.call("write", prompts, stop, _NEW_TOKENS, Sampling())
        answers = []
        for each, text in zip(self.conversations, texts, strict=True):
            total = sum(next(scores).log_probability for _ in each.learned)
            loss = -total / sum(end - begin for begin, end in each.learned)
            answers.append(Answer(loss, self._decode(text.ids).strip(), text.has_ended))
        return answers

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def _table(self) -> Iterator[str]:
        tokens = sum(len(each.ids) for each in self.conversations)
        learned = sum(end - begin for each in self.conversations for begin, end in each.learned)
        before, after = ([Answer(**each) for each in self.record[when]] for when in ("before", "after"))
        yield (
            f"{len(after)} held-out conversations before and after this run, {learned / tokens:.0%} of their tokens "
            "learned: loss, and the last answer (with ... if it was cut)"
        )
        for asked, old, new in zip(self.record["asked"], before, after, strict=True):
            yield f"  {old.loss:7.3f} -> {new.loss:7.3f}  {asked[-40:]!r}: {_short(old)} -> {_short(new)}"
        (was, ended, right), (is_now, end_now, right_now) = (self._totals(each) for each in (before, after))
        yield (
            f"  {was:7.3f} -> {is_now:7.3f}  on average; ended by the end mark {ended} -> {end_now}, as in the data "
            f"{right} -> {right_now}"
        )

    def _totals(self, answers: list[Answer]) -> tuple[float, int, int]:
        right = sum(each.text == text for each, text in zip(answers, self.record["expected"], strict=True))
        return sum(each.loss for each in answers) / len(answers), sum(each.ended for each in answers), right


def _short(answer: Answer) -> str:
    return repr(answer.text[:30]) + ("" if answer.ended else "...")


def _read(config: Config, run: Run, longest: int) -> Iterator[Conversation]:
    """Held-out conversations that are not cut, in the order of their file; questions leave room for an answer."""
    assert run.tokenizer is not None
    divided = holds_out(config)
    source = source_of(config.training if divided else config.validation)
    given, _ = shape_of(config, [source], config.validation.seq_len, run.tokenizer, run.device, pads=True)
    sources = open_sources(given, run.tokenizer, OwnSlots(1, 1, 0, 1), 1, divided=divided, pads=True)
    cursor = Stream(sources, run.tokenizer, Order(1, 0, shuffle=False), 0).cursors[0]
    while (found := cursor.next()) is not None:
        tokens, places, begin = found[0].tolist(), [], 0
        for is_learned, group in groupby(tokens, lambda token: token >= 0):
            end = begin + len(list(group))
            places += [(begin, end)] if is_learned else []
            begin = end
        if places and len(tokens) <= config.validation.seq_len and places[-1][0] <= longest:
            yield Conversation([token if token >= 0 else ~token for token in tokens], places)
