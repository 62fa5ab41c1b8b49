"""Shared by the tests of conversations: a tokenizer with control tokens, templates, and random conversations.

A template stands on one line. GEN and END are where {% generation %} marks would stand: with them it is what
transformers masks by, without them it is as models ship it.
"""

import json
import random
from pathlib import Path
from typing import Any

from tests.recipe.data.small_tokenizers import shipped_json
from torchtitan.config.schema import Model
from torchtitan.data.chat.encoder import ChatEncoder, Example
from torchtitan.data.chat.rows import conversation
from torchtitan.data.chat.sources import open_finder, open_template
from torchtitan.data.tokenizers.tokenizer import build_tokenizer

CONTROL = (
    "<|start_header_id|> <|end_header_id|> <|eot_id|> <|im_start|> <|im_end|> [INST] [/INST] <start_of_turn> "
    "<end_of_turn> <|call|>"
).split()
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, and no control tokens, as Qwen3 has them

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}GEN{{ m['content'] | trim + '<|eot_id|>' }}END"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (  # with a system message of its own
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}GEN{{ m.content + '<|im_end|>' }}END{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (  # reasoning stays behind the last question only; calls of tools, and their answers as a user's turn
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content or '' %}{% set reason = '' %}"
    "{% if m.reasoning_content is string %}{% set reason = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reason = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}GEN"
    "{% if loop.index0 > ns.last and (loop.last or reason) %}"
    "{{ '<think>\n' + reason.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    '{{ \'\n<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}END{{ '\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FOLDED = (  # no header: the system message stands in the last question, answers end with EOS, which a prompt lacks
    "{{ bos_token }}{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}GEN{{ ' ' + m.content.strip() + ' ' + eos_token }}END{% endif %}{% endfor %}"
)
THINKING = (  # the prompt opens a reasoning; answers before the last one have none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% if loop.last %}{{ '<think>\n' }}GEN"
    "{{ m.reasoning_content | default('Hm.') + '\n</think>\n\n' + m.content + '<|im_end|>' }}END"
    "{% else %}GEN{{ m.content + '<|im_end|>' }}END{% endif %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
RENAMED = (  # roles by other names, a macro, a block that is kept as a value, and a loop that is left early
    "{% macro turn(who, text) %}{{ '<start_of_turn>' + who + '\n' + text | trim + '<end_of_turn>\n' }}{% endmacro %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ turn('developer', m.content) }}"
    "{% continue %}{% endif %}{% if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}"
    "GEN{{ m.content | trim + '<end_of_turn>' }}END{{ '\n' }}"
    "{% else %}{% set said %}{{ turn('user', m.content) }}{% endset %}{{ said }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "qwen3": QWEN3,
    "folded": FOLDED,
    "thinking": THINKING,
    "renamed": RENAMED,
}


def shipped(template: str) -> str:
    return template.replace("GEN", "").replace("END", "")


def with_marks(template: str) -> str:
    return template.replace("GEN", "{% generation %}").replace("END", "{% endgeneration %}")


def write_tokenizer(folder: Path, template: str | None = None) -> Path:
    """The shipped tokenizer with control tokens, and the template in the folder."""
    content = shipped_json()
    first = max(content["model"]["vocab"].values()) + 1
    for number, token in enumerate([*CONTROL, *PLAIN_ADDED], start=first):
        content["added_tokens"].append(
            {"id": number, "content": token, "special": token in CONTROL, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def build_encoder(folder: Path, learn: str = "all", seq_len: int = 100_000) -> ChatEncoder:
    model, tokenizer = Model(hf_assets_path=str(folder)), build_tokenizer(folder)
    _, template = open_template(model, tokenizer)
    return ChatEncoder("chats", tokenizer, *open_finder(model, tokenizer, template, learn), seq_len)


def example(encoder: ChatEncoder, row: dict[str, Any], where: str = "chats.jsonl:7") -> Example:
    return encoder.example(conversation(row, lambda: where))


PIECES = (
    *(
        "the",
        "module",
        "import",
        "naïve",
        "日本語",
        "👩‍🚀",
        "x = 1",
        "1234567",
        "<b>",
        "don't",
        "\n",
        "\n\n",
        "  ",
        "\t",
    ),
    *('"quoted"', "{{ braces }}", "{% if %}", "assistant", "user", "<think>", "system\n", "\\n", "ü", "."),
)


def random_text(draw: random.Random) -> str:
    text = ("" if draw.random() < 0.3 else " ").join(draw.choices(PIECES, k=draw.randint(1, 25)))
    return text if text.strip() else "x"


def random_messages(draw: random.Random, with_tools: bool = False) -> list[dict[str, Any]]:
    """A system message, questions and answers, reasoning, calls of tools; at times the last question is open."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": random_text(draw)})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": random_text(draw)})
        answer = {"role": "assistant", "content": random_text(draw).replace("<think>", "think")}
        if draw.random() < 0.3:
            answer["reasoning_content"] = random_text(draw)
        elif draw.random() < 0.2:
            answer["content"] = f"<think>\n{random_text(draw)}\n</think>\n\n{answer['content']}"
        messages.append(answer)
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": random_text(draw)})
    for place in [n for n, message in enumerate(messages) if message["role"] == "assistant"][::-1]:
        if with_tools and draw.random() < 0.5:
            called = {
                "name": "look_up",
                "arguments": draw.choice([{"word": random_text(draw)}, {"n": 3}, '{"a": "b"}']),
            }
            call = {
                "role": "assistant",
                "content": draw.choice(["", "Let me see."]),
                "tool_calls": [{"function": called}],
            }
            if draw.random() < 0.5:
                call["reasoning_content"] = random_text(draw)
            answers = [{"role": "tool", "content": random_text(draw)} for _ in range(draw.randint(1, 2))]
            messages[place:place] = [call, *answers]
    return messages
