"""Finds which parts of a conversation's text are learned, and proves it for every row or refuses the row.

A learned message of the assistant begins where the prompt of a conversation up to there would end, so its header is
not learned. It ends with the end mark, the control token behind its text. A message of another role that is to be
learned begins with its text. Where a template has {% generation %} marks, they are the assistant's parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.data.chat.marks import Marked, Marks, has_text
from torchtitan.data.chat.template import ChatTemplate
from torchtitan.refusal import Refusal

ROLES = {"system", "developer", "user", "assistant", "tool"}  # a template may know others
_ASSISTANT = "assistant"
Span = tuple[int, int]


@dataclass(frozen=True)
class Learned:
    """The text of a conversation, and the parts of it that are learned."""

    text: str
    spans: list[Span]
    others_open: int = 0  # answers whose header is not the one that a prompt ends with


class SpanFinder:
    """Finds the learned parts by one template: of `all` answers, of the `last` one, or of the roles that are named."""

    def __init__(self, template: ChatTemplate, learn: str, control: Sequence[str], ends: Sequence[str]) -> None:
        self.template, self.learn, self._ends = template, learn, set(ends)
        self.roles = {_ASSISTANT} if learn in ("all", "last") else set(learn.split(","))
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, conversation: dict[str, Any]) -> Learned:
        messages, where = conversation["messages"], conversation["where"]
        chosen = self._choose(messages, conversation["first"], where)
        text = self.template.render(messages, conversation)
        marks = Marks(self.template, conversation, text)
        marked = marks.render(len(messages))
        self._prove(marked, text, messages, where)
        ends = {number: self._end(marks, marked, number) for number in chosen}
        if self.template.has_marks and self.roles == {_ASSISTANT}:
            return self._as_marked(conversation, marked, ends)
        starts = {number: self._start(marks, marked, number) for number in chosen}
        spans = [(starts[number][0], ends[number]) for number in chosen]
        bounds = [0, *(place for span in spans for place in span), len(text)]
        assert bounds == sorted(bounds), "learned parts overlap"
        return Learned(text, spans, sum(not as_prompted for _, as_prompted in starts.values()))

    def _choose(self, messages: list[dict[str, Any]], first: int, where: str) -> list[int]:
        known = ROLES | self.roles | self.template.words
        for number, message in enumerate(messages):
            if message["role"] not in known:
                raise Refusal(
                    f"{where}, message {number + 1}: role {message['role']!r} is unknown, and not in the template; "
                    f"use one of {', '.join(sorted(ROLES))}"
                )
        chosen = [n for n, message in enumerate(messages) if n >= first and message["role"] in self.roles]
        if not chosen:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            wanted = " or ".join(sorted(self.roles))
            raise Refusal(
                f"{where}: no message of {wanted} to learn (its roles: {roles}); leave the row out, or name "
                "other roles in chat"
            )
        chosen = chosen[-1:] if self.learn == "last" else chosen
        for number in chosen:
            if not has_text(messages[number]):
                raise Refusal(f"{where}, message {number + 1}: the {messages[number]['role']}'s message is empty")
        return chosen

    def _prove(self, marked: Marked, text: str, messages: list[dict[str, Any]], where: str) -> None:
        if marked.text != text:
            at = next((i for i, (a, b) in enumerate(zip(text, marked.text, strict=False)) if a != b), len(marked.text))
            raise Refusal(
                f"{where}: the chat template ({self.template.origin}) writes another text, from {text[at : at + 40]!r} "
                "on, when a mark stands in a message, so what is learned cannot be found; leave the row out"
            )
        end = 0
        for number, message in enumerate(messages):
            places = marked.places.get(number)
            if places is None and has_text(message):
                raise Refusal(
                    f"{where}, message {number + 1}: the chat template ({self.template.origin}) drops the "
                    f"{message['role']}'s message; correct the conversation or the template"
                )
            if places is None or message["role"] in ("system", "developer"):  # templates put these where they like
                continue
            if places[0] < end:
                raise Refusal(
                    f"{where}, message {number + 1}: the chat template ({self.template.origin}) puts the messages into "
                    "another order; correct the template"
                )
            end = places[-1]

    def _end(self, marks: Marks, marked: Marked, number: int) -> int:
        """Behind the end mark of a message: the first control tokens that the template writes after its text."""
        where = f"{marks.conversation['where']}, message {number + 1}"
        begin = marked.places[number][-1]
        limit = min((places[0] for other, places in marked.places.items() if other > number), default=len(marked.text))
        found = self._control.search(marked.text, begin, limit)
        following = None if found is None else self._control.match(marked.text, found.end(), limit)
        if found is not None and following is None and found[0] in self._ends:
            return found.end()
        if found is not None:
            alone = marks.render(number + 1)  # as the last message, nothing of another follows its text
            rest = alone.text[alone.places[number][-1] :] if number in alone.places else ""
            end = found.end()
            while following is not None and rest.startswith(marked.text[begin : following.end()]):
                end = following.end()  # an end mark of several tokens
                following = self._control.match(marked.text, end, limit)
            if rest.startswith(marked.text[begin:end]) or found[0] in self._ends:
                return end
        raise Refusal(
            f"{where}: the chat template ({self.template.origin}) writes no end mark (a control token) behind the "
            f"{marks.conversation['messages'][number]['role']}'s text, so a model would never learn to stop; correct "
            'the template, or set chat = "last" if it writes one at the end of a conversation'
        )

    def _start(self, marks: Marks, marked: Marked, number: int) -> tuple[int, bool]:
        """Where a message begins that is learned, and whether the prompt before it is the one that a user gives."""
        messages, where = marks.conversation["messages"], f"{marks.conversation['where']}, message {number + 1}"
        if messages[number]["role"] != _ASSISTANT:
            return self._before_text(marks, marked, number, where), True
        prompt = marks.render(number, prompt=True)
        anchor, place = prompt.last
        if anchor >= 0 and anchor not in marked.places:
            raise Refusal(f"{where}: the chat template ({self.template.origin}) drops message {anchor + 1} later on")
        begin, header = marked.places[anchor][-1] if anchor >= 0 else 0, prompt.text[place:]
        as_prompted = marked.text.startswith(header, begin)
        if as_prompted:
            start = begin + len(header)
        else:  # such as a prompt that opens a reasoning which this answer lacks
            start = self._parting(marks, marked, number, (begin, header), where)
        if not self.template.asks and (found := self._control.match(marked.text, start)):
            if found[0] in marked.text[:start] and not messages[number].get("tool_calls"):
                raise Refusal(
                    f"{where}: the chat template ({self.template.origin}) knows no add_generation_prompt, so an "
                    "answer's header would be learned; add it to the template"
                )
        return start, as_prompted

    def _before_text(self, marks: Marks, marked: Marked, number: int, where: str) -> int:
        before = marks.render_before(number)
        if before.text != marked.text or number not in before.places:
            raise Refusal(
                f"{where}: where it begins cannot be found, because the chat template ({self.template.origin}) changes "
                "its text when a mark stands before the message; leave the row out"
            )
        return before.places[number][0]

    def _parting(self, marks: Marks, marked: Marked, number: int, header: tuple[int, str], where: str) -> int:
        """Where the conversation parts from its prompt, which is behind a control token and before the message."""
        begin, expected = header
        limit = self._before_text(marks, marked, number, where)
        same = 0
        while begin + same < limit and same < len(expected) and marked.text[begin + same] == expected[same]:
            same += 1
        without = marks.render(number)
        tail = len(without.text) - without.last[1]  # of the message before, and no header yet
        if same <= tail or not self._control.search(marked.text, begin + tail, begin + same):
            raise Refusal(
                f"{where}: the chat template ({self.template.origin}) opens the answer by "
                f"{marked.text[begin:limit][:60]!r}, and a prompt by {expected[:60]!r}; correct the template"
            )
        return begin + same

    def _as_marked(self, conversation: dict[str, Any], marked: Marked, ends: dict[int, int]) -> Learned:
        """What {% generation %} encloses, of the chosen messages."""
        where = conversation["where"]
        text, enclosed = self.template.render_marked(conversation)
        if text != marked.text:
            raise Refusal(
                f"{where}: {self.template.origin} changes what {{% generation %}} encloses; correct the template"
            )
        spans = []
        for number, end in ends.items():
            place = marked.places[number][-1]
            others = [places[-1] for other, places in marked.places.items() if other < number]
            before = max((end for end in others if end <= place), default=0)
            own = [(begin, close) for begin, close in enclosed if before <= begin <= place]
            if not own or own[-1][1] < end:
                raise Refusal(
                    f"{where}, message {number + 1}: {{% endgeneration %}} in {self.template.origin} is not behind the "
                    f"end mark {marked.text[place:end].strip()!r}, so a model would never learn to stop; put it there"
                )
            spans += own
        return Learned(text, spans)
