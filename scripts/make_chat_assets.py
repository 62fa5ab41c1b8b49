"""Makes tests/assets/chat: conversations about small numbers and letters, for a model that is to learn them at once;
and tests/assets/tasks/questions.jsonl: the same questions, one at a time, with four answers to choose from.

    python scripts/make_chat_assets.py

Nothing is read and nothing drawn but from a fixed seed, so the same files come out again. Questions are asked in
several ways, one to four in a conversation, and a system message may ask for words in place of digits. The held-out
conversations are others about the same numbers and letters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "tests" / "assets" / "chat"
NUM_TRAIN, NUM_HELD_OUT, NUM_QUESTIONS = 2000, 100, 200
WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen"
).split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def question(draw: random.Random, in_words: bool) -> tuple[str, str]:
    def number(value: int) -> str:
        return WORDS[value] if in_words else str(value)

    kind = draw.randrange(3)
    if kind == 0:
        a, b = draw.randrange(10), draw.randrange(10)
        return draw.choice([f"What is {a} + {b}?", f"Add {a} and {b}."]), f"{number(a + b)}."
    if kind == 1:
        a, b = draw.sample(range(10), 2)
        return draw.choice([f"Which is more, {a} or {b}?", f"The larger of {a} and {b}?"]), f"{number(max(a, b))}."
    place = draw.randrange(25)
    asked = draw.choice(["Which letter follows {}?", "What comes after {}?"]).format(LETTERS[place])
    return asked, f"{LETTERS[place + 1]}."


def conversation(draw: random.Random) -> list[dict[str, str]]:
    in_words = draw.random() < 0.3
    messages = [{"role": "system", "content": "Write numbers as words."}] if in_words else []
    for _ in range(draw.randint(1, 4)):
        asked, answered = question(draw, in_words)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return messages


def make(out: Path) -> None:
    draw, seen = random.Random(0), set[str]()
    while len(seen) < NUM_TRAIN + NUM_HELD_OUT:
        seen.add(json.dumps({"messages": conversation(draw)}) + "\n")
    lines = sorted(seen)
    draw.shuffle(lines)
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.jsonl").write_text("".join(lines[NUM_HELD_OUT:]), encoding="utf-8")
    (out / "validation.jsonl").write_text("".join(lines[:NUM_HELD_OUT]), encoding="utf-8")


def make_questions(file: Path) -> None:
    """For tasks of lm-evaluation-harness; an answer begins with the space behind `Assistant:`."""
    draw, found = random.Random(1), dict[str, str]()
    while len(found) < NUM_QUESTIONS:
        asked, answered = question(draw, in_words=False)
        found[asked] = answered
    lines = []
    for asked, answered in found.items():
        others = LETTERS if answered[0] in LETTERS else [str(value) for value in range(19)]
        choices = [answered, *draw.sample([f"{other}." for other in others if f"{other}." != answered], 3)]
        draw.shuffle(choices)
        row = {"question": asked, "choices": [f" {choice}" for choice in choices], "answer": choices.index(answered)}
        lines.append(json.dumps(row | {"written": answered}) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    make(OUT)
    make_questions(OUT.parent / "tasks" / "questions.jsonl")
