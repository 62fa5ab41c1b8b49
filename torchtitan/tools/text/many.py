"""Answers the prompts of a file, many at once: a line of JSON each, in and out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Model
from torchtitan.data.chat.prompts import ChatPrompts
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.tools.text.writer import Writer
from torchtitan.training.scores.generation import generate
from torchtitan.whole_file import write_whole

_BATCH_TOKENS = 1 << 15  # of prompts and answers, whose keys and values are kept


def read_prompts(path: str, is_chat: bool) -> list[Any]:
    """Texts, or with `is_chat` texts and lists of messages; what is neither is refused by its line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"--prompts {path} cannot be read: {error}; give a file with a line of JSON for each") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Refusal(f"{path}, line {number}: no JSON ({error}); write a text in quotes, or an object") from None
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, dict) else row
        are_messages = isinstance(prompt, list) and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
            for each in prompt
        )
        if not prompt or not (isinstance(prompt, str) or are_messages):
            raise Refusal(
                f"{path}, line {number}: expected a text, or an object with 'prompt' (a text) or 'messages' (a list "
                "with role and content); correct the line"
            )
        if are_messages and not is_chat:
            raise Refusal(f"{path}, line {number}: messages need the chat template; give --chat, too")
        found.append(prompt)
    if not found:
        raise Refusal(f"--prompts {path} holds no prompt; write a line of JSON for each")
    return found


def answer_file(writer: Writer, prompts: Sequence[Any], out: Path, chat: Model | None, system: str | None) -> None:
    """Write a line for each prompt, in their order: prompt, answer, and whether it ended by itself."""
    stop, talk = set(writer.stop), None
    if chat is not None:
        talk = ChatPrompts(chat, writer.tokenizer)
        stop.add(talk.stop)
    ids = [_encode(prompt, writer, talk, system) for prompt in prompts]
    longest, room = max(range(len(ids)), key=lambda number: len(ids[number])), writer.longest - writer.max_new_tokens
    if len(ids[longest]) > room:
        raise Refusal(
            f"prompt {longest + 1} has {len(ids[longest])} tokens, and with {writer.max_new_tokens} new ones the model "
            f"can see {room}; shorten it, or give a smaller --max_new_tokens"
        )
    answers = _answers(writer, ids, stop)
    if not writer.shows:
        return
    lines, ended = [], 0
    for number, prompt in enumerate(prompts):
        has_ended = answers[number][-1] in stop
        ended += has_ended
        text = writer.tokenizer.decode(answers[number][: len(answers[number]) - has_ended])
        row = {"prompt": prompt, "answer": text.strip() if chat is not None else text, "ended": has_ended}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_whole(out, "".join(lines))
    cut = len(prompts) - ended
    advice = f"; {cut:,} were cut after {writer.max_new_tokens} tokens (--max_new_tokens)" if cut else ""
    logger.info(f"{out}: {len(prompts):,} answers, of which {ended:,} ended by themselves{advice}")


def _encode(prompt: Any, writer: Writer, talk: ChatPrompts | None, system: str | None) -> list[int]:
    if talk is None:
        return writer.tokenizer.encode_prompt(prompt, as_trained=writer.as_trained)
    opening = [] if system is None else [{"role": "system", "content": system}]
    return talk.ids([*opening, {"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _answers(writer: Writer, prompts: Sequence[Sequence[int]], stop: set[int]) -> dict[int, list[int]]:
    """New tokens by the prompt's number, in batches of prompts of like length. A batch changes no answer."""
    answers: dict[int, list[int]] = {}
    waiting = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    while waiting:
        size = max(1, _BATCH_TOKENS // (len(prompts[waiting[-1]]) + writer.max_new_tokens))
        batch, waiting = waiting[-size:], waiting[:-size]
        answers |= {number: [] for number in batch}
        given = [prompts[number] for number in batch]
        for tokens in generate(
            writer.model, writer.longest, given, stop, writer.max_new_tokens, writer.sampling, numbers=batch
        ):
            for number, token in zip(batch, tokens, strict=True):
                answers[number] += [] if token is None else [token]
        if waiting:
            logger.info(f"{len(answers):,} of {len(prompts):,} prompts are answered")
    return answers
