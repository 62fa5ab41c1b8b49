"""Pairs of a chosen and a rejected conversation: two documents that stand beside each other in one sequence.

Each is a conversation as elsewhere (rows.py, spans.py), of which the answer is learned. A pair travels as one array,
in which an element that is no token parts the two; both fit, because each is cut after half of a sequence.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from torchtitan.data.chat.encoder import ChatEncoder
from torchtitan.data.chat.packing import ChatPacker
from torchtitan.data.chat.rows import BESIDE, Conversation, conversation
from torchtitan.data.packing import Packed
from torchtitan.refusal import Refusal

SIDES = ("chosen", "rejected")
_JOIN = int(np.iinfo(np.int32).min)


class Pair(Conversation):
    """In the place of a text_key: the rows of a source are pairs."""

    def names_in(self, there: Sequence[str], where: Callable[[], str]) -> list[str]:
        if not all(side in there for side in SIDES):
            found = ", ".join(map(repr, there)) or "none"
            raise Refusal(
                f"{where()}: the fields {found} hold no pair; expected 'chosen' and 'rejected', and 'prompt' unless "
                "both begin with it; rename them, or remove training.preference_beta if the rows are conversations"
            )
        return [*SIDES, *(name for name in ("prompt", *BESIDE) if name in there)]

    def compose(self, row: Mapping[str, Any], where: Callable[[], str]) -> str:
        row = {name: row[name] for name in self.names_in([name for name in row if row[name] is not None], where)}
        prompt, answers = row.pop("prompt", None), [row.pop(side) for side in SIDES]
        if answers[0] == answers[1]:
            raise Refusal(f"{where()}: 'chosen' and 'rejected' are the same, so nothing is preferred; leave it out")
        if prompt is None:
            prompt, answers = _parted(answers, where)
        texts = [
            conversation({"prompt": prompt, "completion": answer, **row}, partial("{}, {}".format, where(), side))
            for side, answer in zip(SIDES, answers, strict=True)
        ]
        return f"[{texts[0]},{texts[1]}]"


def _parted(answers: list[Any], where: Callable[[], str]) -> tuple[Any, list[Any]]:
    """The messages that both begin with, and what each goes on with."""
    if not all(isinstance(answer, list) for answer in answers):
        raise Refusal(f"{where()}: no 'prompt', and 'chosen' and 'rejected' are no lists of messages; add the prompt")
    longest = min(map(len, answers))
    same = next((n for n in range(longest) if answers[0][n] != answers[1][n]), longest)
    if same in (0, longest):
        what = "have no first message in common" if same == 0 else "go on from each other"
        raise Refusal(f"{where()}: 'chosen' and 'rejected' {what}; give a 'prompt' that both answer")
    return answers[0][:same], [answer[same:] for answer in answers]


class PairEncoder(ChatEncoder):
    """Cuts each conversation after half a sequence. A pair of which one has no learned token left is dropped."""

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        chosen, rejected = (super(PairEncoder, self).encode(json.dumps(each), bos, eos) for each in json.loads(text))
        return [*chosen, _JOIN, *rejected] if chosen and rejected else []


class PairPacker(ChatPacker):
    """Gives a chosen document an even number, and its rejected one the next."""

    def pack(self, inputs: np.ndarray, labels: np.ndarray, document_ids: np.ndarray | None) -> Packed:
        packed = super().pack(inputs, labels, document_ids)
        inputs[inputs == ~_JOIN] = self._pad_id  # the end of a chosen document, which nothing sees
        return packed

    def _separate(self, starts: list[int], labels: np.ndarray, document_ids: np.ndarray) -> None:
        joins = np.flatnonzero(self._tokens == _JOIN) + 1
        super()._separate(sorted([*starts, *joins.tolist()]), labels, document_ids)
