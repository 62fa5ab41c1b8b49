"""Tokens and labels of conversations, beside transformers with {% generation %} marks and beside thirty plain lines."""

import json
import random
import re

import pytest

from tests.recipe.chat.templates import (
    CHATML,
    LLAMA3,
    QWEN3,
    TEMPLATES,
    THINKING,
    build_encoder,
    example,
    random_messages,
    shipped,
    with_marks,
    write_tokenizer,
)
from tests.recipe.data.small_tokenizers import byte_level_tokens, tiktoken_file  # noqa: F401
from torchtitan.config.schema import Model
from torchtitan.data.chat.encoder import ChatEncoder
from torchtitan.data.chat.sources import open_finder, open_template
from torchtitan.data.tokenizers.tokenizer import build_tokenizer

NUM_CONVERSATIONS = 100  # of each template


def conversations(name, seed=0, count=NUM_CONVERSATIONS):
    draw = random.Random(f"{name} {seed}")
    found = [random_messages(draw, with_tools=name == "qwen3") for _ in range(count)]
    if name == "thinking":  # "<think>\n" at the head of an answer would be what its prompt ends with
        found = [[m | {"content": m["content"].replace("<think>\n", "")} for m in messages] for messages in found]
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_labels_are_those_of_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "model", shipped(TEMPLATES[name]))
    encoder, reference = build_encoder(folder), AutoTokenizer.from_pretrained(folder)
    marked = with_marks(TEMPLATES[name])
    num_straddling = num_learned = 0
    for messages in conversations(name):
        own = example(encoder, {"messages": messages})
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        theirs = reference.apply_chat_template(messages, chat_template=marked, **options)
        assert own.ids == theirs["input_ids"] == reference.apply_chat_template(messages)["input_ids"]
        assert own.learned == [bool(learned) for learned in theirs["assistant_masks"]]
        num_straddling, num_learned = num_straddling + own.num_straddling, num_learned + sum(own.learned)
    assert num_learned > 1000
    # A header that ends with a line break melts with an answer that begins with one.
    assert num_straddling > 0 if name in ("chatml", "qwen3", "thinking") else num_straddling == 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_with_generation_marks_gives_the_same_labels_as_without(tmp_path, name):
    with_them = build_encoder(write_tokenizer(tmp_path / "a", with_marks(TEMPLATES[name])))
    without = build_encoder(write_tokenizer(tmp_path / "b", shipped(TEMPLATES[name])))
    for learn in ("all", "last"):
        with_them.finder.learn = without.finder.learn = learn
        for messages in conversations(name, seed=1, count=40):
            a, b = (example(encoder, {"messages": messages}) for encoder in (with_them, without))
            assert (a.ids, a.learned) == (b.ids, b.learned)


def plain_parts(name, messages, learned):
    """The text of a conversation in parts, and whether each is learned: two formats, written down by hand."""
    parts = []
    if name == "llama3":
        parts.append(("<|begin_of_text|>", False))
        for number, message in enumerate(messages):
            parts.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
            parts.append((message["content"].strip() + "<|eot_id|>", number in learned))
    else:
        if messages[0]["role"] != "system":
            parts.append(("<|im_start|>system\nBe brief.<|im_end|>\n", False))
        for number, message in enumerate(messages):
            parts.append((f"<|im_start|>{message['role']}\n", False))
            parts.append((message["content"] + "<|im_end|>", number in learned))
            parts.append(("\n", False))
    return parts


def plain_labels(encoding, parts):
    """A token is learned if it holds a character of a learned part."""
    of_character = [is_learned for text, is_learned in parts for _ in text]
    return [any(of_character[begin:end]) for begin, end in encoding.offsets]


@pytest.mark.parametrize("learn", ["all", "last", "user,assistant", "system"])
@pytest.mark.parametrize("name", ["llama3", "chatml"])
def test_tokens_and_labels_are_those_of_the_format_written_down(tmp_path, name, learn):
    import tokenizers

    folder = write_tokenizer(tmp_path / "model", shipped(TEMPLATES[name]))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder = build_encoder(folder, learn)
    roles = {"assistant"} if learn in ("all", "last") else set(learn.split(","))
    for messages in conversations(name, seed=2):
        chosen = [n for n, message in enumerate(messages) if message["role"] in roles]
        if not chosen:
            continue
        parts = plain_parts(name, messages, chosen[-1:] if learn == "last" else chosen)
        encoding = tokenizer.encode("".join(text for text, _ in parts), add_special_tokens=False)
        own, learned = example(encoder, {"messages": messages}), plain_labels(encoding, parts)
        if roles != {"assistant"}:  # what is learned of others begins with their first visible character
            left_out = [i for i, a, b in zip(own.ids, own.learned, learned, strict=True) if b and not a]
            assert not encoder.speller.decode(left_out).strip()
            own = own._replace(learned=[a or b for a, b in zip(own.learned, learned, strict=True)])
        assert (own.ids, own.learned) == (encoding.ids, learned)


def test_every_kind_of_row_is_the_same_conversation(tmp_path):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(CHATML)))
    asked, answered = {"role": "user", "content": "Add 1\n2"}, {"role": "assistant", "content": "3"}
    expected = example(encoder, {"messages": [asked, answered]})
    assert expected == example(encoder, {"prompt": "Add 1\n2", "completion": "3", "id": 4})
    assert expected == example(encoder, {"prompt": [asked], "completion": [answered]})
    assert expected == example(encoder, {"prompt": [asked], "completion": "3"})
    assert expected == example(encoder, {"instruction": "Add 1", "input": "2", "output": "3"})
    assert expected == example(encoder, {"instruction": "Add 1\n2", "input": "", "output": "3"})
    assert expected == example(encoder, {"messages": [asked | {"tool_calls": None}, answered | {"name": None}]})
    parts = [{"type": "text", "text": "Add 1\n2"}]
    listed = "{% for m in messages %}{% set c = m.content if m.content is string else m.content[0].text %}"
    folder = write_tokenizer(tmp_path / "parts", listed + "{{ m.role + '\n' + c + '<|im_end|>' }}{% endfor %}"
                             "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}")  # fmt: skip
    encoder = build_encoder(folder)
    assert example(encoder, {"messages": [asked, answered]}) == example(
        encoder, {"messages": [asked | {"content": parts}, answered]}
    )


def learned_text(encoder, row):
    found = example(encoder, row)
    return encoder.speller.decode([i for i, learned in zip(found.ids, found.learned, strict=True) if learned])


def test_of_a_prompt_with_a_completion_only_the_completion_is_learned(tmp_path):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(CHATML)))
    said = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    assert learned_text(encoder, {"prompt": said[:3], "completion": said[3:]}) == (
        "assistant 1<|im_end|>assistant 2<|im_end|>"
    )


def test_tools_and_other_values_of_a_row_reach_the_template(tmp_path):
    template = "{{ tools | tojson }}{{ ending }}" + shipped(CHATML)
    encoder = build_encoder(write_tokenizer(tmp_path / "model", template))
    tools = [{"type": "function", "function": {"name": "größer", "parameters": {"a": "<b>"}}}]
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    values = {"tools": tools, "chat_template_kwargs": {"ending": "!"}}
    text = encoder.speller.decode(example(encoder, row | values).ids)
    assert text.startswith(json.dumps(tools, ensure_ascii=False) + "!<|im_start|>system")
    assert example(encoder, row | values) == example(encoder, row | values | {"tools": json.dumps(tools)})


def test_reasoning_that_the_template_leaves_out_is_not_learned_and_is_learned_where_it_stands(tmp_path):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(QWEN3)))
    row = {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "<think>\nfirst\n</think>\n\n1"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "reasoning": "second", "content": "2"},
        ]
    }
    assert learned_text(encoder, row) == "1<|im_end|><think>\nsecond\n</think>\n\n2<|im_end|>"


def test_an_answer_that_opens_otherwise_than_its_prompt_is_learned_from_where_they_part_and_counted(tmp_path):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(THINKING)))
    said = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    found = example(encoder, {"messages": said})
    assert found.others_open == 1
    assert learned_text(encoder, {"messages": said}) == ("assistant 0<|im_end|>Hm.\n</think>\n\nassistant 1<|im_end|>")


def test_tiktokens_tokens_and_labels_are_those_of_the_format_written_down(tmp_path, tiktoken_file):  # noqa: F811
    import tiktoken

    (tmp_path / "tokenizer.model").write_bytes(tiktoken_file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(shipped(LLAMA3))
    tokenizer, model = build_tokenizer(tmp_path), Model(hf_assets_path=str(tmp_path))
    _, template = open_template(model, tokenizer)
    encoder = ChatEncoder("chats", tokenizer, *open_finder(model, tokenizer, template), 10**6)
    encoding = tokenizer._encoding
    assert isinstance(encoding, tiktoken.Encoding) and len(byte_level_tokens()) == encoding.n_vocab - 256
    for messages in conversations("llama3", seed=3):
        parts = plain_parts("llama3", messages, [n for n, m in enumerate(messages) if m["role"] == "assistant"])
        own = example(encoder, {"messages": messages})
        pieces = [encoding.encode(text, allowed_special="all") for text, _ in parts]  # control tokens stand at each cut
        assert own.ids == [token for piece in pieces for token in piece]
        assert own.learned == [is_learned for piece, (_, is_learned) in zip(pieces, parts, strict=True) for _ in piece]


def test_the_template_comes_from_the_config_the_tokenizers_folder_or_its_config(tmp_path):
    def text(folder, **options):
        model, tokenizer = Model(hf_assets_path=str(folder), **options), build_tokenizer(folder)
        return re.sub(r".*/", "", open_template(model, tokenizer)[0].origin)

    folder = write_tokenizer(tmp_path / "a", shipped(CHATML))
    assert text(folder) == "chat_template.jinja"
    (tmp_path / "own.jinja").write_text(shipped(LLAMA3))
    assert text(folder, chat_template=str(tmp_path / "own.jinja")) == "own.jinja"
    folder = write_tokenizer(tmp_path / "b")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for template in ("{{ messages }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "x"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        assert text(folder) == "tokenizer_config.json"


def test_a_template_that_writes_the_date_is_said_once(tmp_path, caplog):
    caplog.set_level("INFO")
    encoder = build_encoder(write_tokenizer(tmp_path / "model", "{{ strftime_now('%Y') }}" + shipped(CHATML)))
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert re.match(r"\d{4}<\|im_start\|>system", encoder.speller.decode(example(encoder, row).ids))
    assert caplog.text.count("writes today's date, so the tokens of a conversation depend on the day") == 1
