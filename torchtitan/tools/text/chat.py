"""Talks with a model by its chat template: keeps the messages, shows an answer as it grows, stops at its end mark."""

from collections.abc import Iterable

from torchtitan.config.schema import Model
from torchtitan.data.chat.prompts import ChatPrompts
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.tools.text.writer import Writer, generate


class Chat:
    """A conversation with a writer's model."""

    def __init__(self, writer: Writer, model: Model, system: str | None) -> None:
        self._writer, self._prompts = writer, ChatPrompts(model, writer.tokenizer)
        self._stop = {*writer.stop, self._prompts.stop}
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.begin_anew()

    def begin_anew(self) -> None:
        self.messages = list(self._opening)

    def ask(self, question: str) -> str:
        """Show and keep the answer."""
        self.messages.append({"role": "user", "content": question})
        prompt, room = self._prompts.ids(self.messages), self._writer.longest - self._writer.max_new_tokens
        while len(prompt) > room and len(self.messages) > len(self._opening) + 1:
            del self.messages[len(self._opening) : len(self._opening) + 2]  # the oldest question and its answer
            prompt = self._prompts.ids(self.messages)
        answer = self._answer(prompt)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _answer(self, prompt: list[int]) -> str:
        writer, ids, text, shown = self._writer, list[int](), "", ""
        has_ended = False
        for (token,) in generate(
            writer.model, writer.longest, [prompt], self._stop, writer.max_new_tokens, writer.sampling
        ):
            assert token is not None
            if has_ended := token in self._stop:
                break
            ids.append(token)
            text = writer.tokenizer.decode(ids)
            if writer.shows and not text.endswith("\ufffd"):  # a character may take several tokens
                print(text[len(shown) :], end="", flush=True)
                shown = text
        if writer.shows:
            print(text[len(shown) :])
        if not has_ended:
            logger.info(f"the answer was cut after {writer.max_new_tokens} tokens; give a larger --max_new_tokens")
        return text.strip()


def answer_all(chat: Chat, questions: Iterable[str]) -> None:
    """Each question in a conversation of its own."""
    for question in questions:
        if not question.strip():
            raise Refusal("--prompt holds an empty text; leave it out")
        chat.begin_anew()
        chat.ask(question)


def talk(chat: Chat, lines: Iterable[str]) -> None:
    print("Type a message. An empty line begins anew; Ctrl-D ends.")
    for line in lines:
        if line.strip():
            chat.ask(line.strip())
        else:
            chat.begin_anew()
