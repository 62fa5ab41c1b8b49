"""Chat templates: finds one, and renders it in the same sandbox with the same functions as transformers does.

A template comes from a download and is foreign code: it sees plain data alone, and its sandbox forbids the rest.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.data.tokenizers.files import load_config, load_json
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_LEAST_JINJA = (3, 1, 6)  # older ones have known ways out of the sandbox
_OPEN, _CLOSE = "\U0010fffc", "\U0010fffd"  # around what {% generation %} encloses; of no other use
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Found(NamedTuple):
    """A template's text, and where it stood."""

    text: str
    origin: str


def find_template(path: str | None, folder: Path) -> Found:
    """The template of `path`, or of the tokenizer's folder."""
    if path is not None:
        if not Path(path).expanduser().is_file():
            raise Refusal(f"model.chat_template = {path!r} is no file (looked from {Path.cwd()}); correct it")
        return Found(_read(Path(path).expanduser()), path)
    if (file := folder / "chat_template.jinja").is_file():
        return Found(_read(file), str(file))
    config_file, config = load_config(folder)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    if not isinstance(template, str):
        raise Refusal(
            f"conversations need a chat template, and {folder} has neither chat_template.jinja nor a chat_template in "
            f"{config_file.name}; download the tokenizer of a chat model, or set model.chat_template to a file"
        )
    return Found(template, str(config_file))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{file} cannot be read as a chat template: {error}; write it in UTF-8") from None


def named_tokens(folder: Path, bos: str | None, eos: str) -> dict[str, str]:
    """What a template knows by name: bos_token and its like, as the tokenizer's folder names them."""
    names: dict[str, str] = {"eos_token": eos} | ({} if bos is None else {"bos_token": bos})
    older = folder / "special_tokens_map.json"
    for content in (load_json(older) if older.is_file() else {}, load_config(folder)[1]):
        for key, value in content.items():
            value = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(value, str):
                names[key] = value
    return names


class ChatTemplate:
    """A compiled template. One thread at a time may use it."""

    def __init__(self, found: Found, names: dict[str, str]) -> None:
        import jinja2

        self.origin, self.names, self._brackets = found.origin, names, False
        environment = _environment(self)
        try:
            self._template = environment.from_string(found.text)
            tree = environment.parse(found.text)
        except jinja2.TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise Refusal(f"{found.origin}{line}: no Jinja template: {error}; correct it") from None
        constants = [node.value for node in tree.find_all(jinja2.nodes.Const)]
        self.words = {word for word in constants if isinstance(word, str)}  # among them, the roles that it knows
        self.has_marks = re.search(r"\{%-?\s*generation\s*-?%\}", found.text) is not None
        self.asks = "add_generation_prompt" in found.text

    def render(self, messages: Sequence[dict[str, Any]], conversation: dict[str, Any], prompt: bool = False) -> str:
        """The text of the messages; with `prompt`, and the header of an answer. Raises Refusal with the row's place."""
        values = {**self.names, **conversation["values"]}
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=conversation["tools"],
                documents=None,
                add_generation_prompt=prompt,
                **values,
            )
        except Exception as error:  # it is foreign code, and may do anything that its sandbox allows
            part = (
                f" on its first {len(messages)} messages alone" if len(messages) < len(conversation["messages"]) else ""
            )
            raise Refusal(
                f"{conversation['where']}: the chat template ({self.origin}) fails{part}: {error}; correct the "
                "conversation or the template"
            ) from None

    def render_marked(self, conversation: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the parts of it that {% generation %} encloses."""
        self._brackets = True
        try:
            text = self.render(conversation["messages"], conversation)
        finally:
            self._brackets = False
        spans, plain, begin = [], "", 0
        for piece in re.split(f"([{_OPEN}{_CLOSE}])", text):
            if piece == _OPEN:
                begin = len(plain)
            elif piece == _CLOSE:
                spans.append((begin, len(plain)))
            else:
                plain += piece
        return plain, spans

    def enclose(self, text: str) -> str:
        return f"{_OPEN}{text}{_CLOSE}" if self._brackets else text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning goes by three names; a template gets it by all that it may know."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _environment(template: ChatTemplate) -> Any:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < _LEAST_JINJA:
        raise Refusal(
            f"jinja2 {jinja2.__version__} does not keep a template in its sandbox; pip install 'jinja2>=3.1.6'"
        )

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Any) -> str:
            return template.enclose(caller())

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **values: Any) -> None:
            jinja2.utils.Namespace.__init__(*args, **values)
            for name in dict(*args[1:], **values):
                Namespace._allow(name)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._allow(name)
            super().__setitem__(name, value)

        @staticmethod
        def _allow(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form: str) -> str:
        if not getattr(template, "wrote_date", False):
            template.wrote_date = True  # type: ignore[attr-defined]
            logger.info(f"{template.origin} writes today's date, so the tokens of a conversation depend on the day")
        return datetime.now().strftime(form)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # Jinja's own is for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": Namespace,
    }
    return environment
