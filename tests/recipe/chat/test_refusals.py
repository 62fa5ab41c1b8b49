"""What is refused of conversations: each message names the row, the value, the rule and the fix."""

import json
import re

import pytest

from tests.recipe.chat.templates import CHATML, FOLDED, LLAMA3, build_encoder, example, shipped, write_tokenizer
from tests.recipe.data.small_tokenizers import sentencepiece_file  # noqa: F401
from torchtitan.config.load import ConfigError, check_text
from torchtitan.config.schema import DataSource, Model
from torchtitan.data.chat.rows import conversation, fields_of
from torchtitan.data.chat.sources import open_template, with_encoders
from torchtitan.data.chat.spelling import build_speller
from torchtitan.data.chat.template import find_template
from torchtitan.data.texts.sources import open_source
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.refusal import Refusal

ASKED, ANSWERED = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}


def refused(match, call, *args, **options):
    with pytest.raises(Refusal, match=re.escape(match)):
        call(*args, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "here: the fields 'text' hold no conversation; expected 'messages', 'prompt' and 'completion'"),
        ({"conversations": []}, "rename 'conversations' to 'messages', and in it 'from' and 'value' to 'role'"),
        ({"messages": []}, "here: 'messages' holds an empty list, not a list of messages with role and content"),
        ({"messages": "hello"}, "here: 'messages' holds str, not a list of messages"),
        ({"messages": None, "prompt": 3, "completion": "a"}, "here: 'prompt' holds int, not a list of messages"),
        ({"instruction": [ASKED], "output": "a"}, "here: 'instruction' holds list, not a text"),
        ({"instruction": "a", "input": 3, "output": "a"}, "here: 'input' holds int, not a text"),
        ({"messages": [{"from": "human", "value": "a"}]}, "here, message 1: no role (its keys: 'from', 'value')"),
        (
            {"messages": [ASKED, {"role": "assistant"}]},
            "message 2: the message of 'assistant' has neither content nor tool",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1: its content holds 'image', and"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1: its content holds 'dict', and only text can"),
        ({"messages": [ASKED | {"tool_calls": [3]}]}, "message 1: its tool_calls are no list of objects"),
        ({"messages": [ASKED], "chat_template_kwargs": [1]}, "here: 'chat_template_kwargs' holds list, not an object"),
        ({"messages": [ASKED], "tools": "[{"}, "here: Expecting property name enclosed in double quotes"),
        ({"messages": [ASKED | {"seen": {1, 2}}]}, "here: Object of type set is not JSON serializable"),
    ],
)
def test_a_row_that_is_no_conversation(row, message):
    refused(message, conversation, row, lambda: "here")


def test_columns_that_hold_no_conversation():
    refused("chats.parquet: the fields none hold no conversation", fields_of, [], lambda: "chats.parquet")


OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


BOTH = [ASKED, ANSWERED]
ENDLESS = LOOP.replace("<|im_end|>", "") + OPENING
INNER = LOOP.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'")
INNER = INNER.replace(" + '<|im_end|>\n' }}", " }}{% endgeneration %}{{ '<|im_end|>\n' }}")
AS_A_VALUE = (
    "{% for m in messages %}{% set t %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
    "{{ t | length if '\U0010fffc' in t else t }}{{ '<|im_end|>' }}{% endfor %}"
)
STARTS = LOOP.replace("m.content", "(m.content + ('' if m.content[:1] == '1' else '!'))")
TIMES = LOOP.replace("m.content", "(m.content | length | string)")
UNPROVEN = [
    (shipped(CHATML), "all", [ASKED], "no message of assistant to learn (its roles: user); leave the row out"),
    (shipped(CHATML), "tool,system", BOTH, "no message of system or tool to learn (its roles: user, assistant)"),
    (shipped(CHATML), "all", [ASKED, {"role": "bot", "content": "a"}], "message 2: role 'bot' is unknown, and not"),
    (shipped(CHATML), "all", [ASKED, ANSWERED | {"content": " \n"}], "message 2: the assistant's message is empty"),
    (shipped(CHATML), "all", [ANSWERED, ASKED], "fails on its first 0 messages alone: list object has no element"),
    ("{{ raise_exception('Only users!') }}", "all", BOTH, "chat_template.jinja) fails: Only users!;"),
    (LOOP.replace("in messages", "in messages[1:]") + OPENING, "all", BOTH, "message 1: the chat template"),
    (LOOP.replace("in messages", "in messages[1:]") + OPENING, "all", BOTH, "drops the user's message; correct"),
    (LOOP.replace("in messages", "in messages | reverse") + OPENING, "all", BOTH, "puts the messages into another"),
    (TIMES, "all", BOTH, "writes another text, from '"),
    (ENDLESS, "all", BOTH, "message 2: the chat template"),
    (ENDLESS, "all", [ASKED, ANSWERED, ASKED], "writes no end mark (a control token) behind the assistant's text"),
    (LOOP, "all", BOTH, "knows no add_generation_prompt, so an answer's header would be learned; add it to the"),
    (LOOP + OPENING.replace("im_start", "call"), "all", BOTH, "opens the answer by '<|im_end|>"),
    (STARTS, "user", BOTH, "message 1: where it begins cannot be found"),
    (INNER, "all", BOTH, "is not behind the end mark '<|im_end|>'"),
    (AS_A_VALUE, "all", BOTH, "changes what {% generation %} encloses"),
    ("{% set n = namespace(a=1) %}{% set n._b = 1 %}" + LOOP, "all", BOTH, "a namespace cannot hold '_b'"),
    ("{{ namespace(_a=1) }}" + LOOP, "all", BOTH, "a namespace cannot hold '_a'"),
    ("{{ ''.__class__.__mro__ }}" + LOOP, "all", BOTH, "fails: access to attribute '__class__'"),
]


@pytest.mark.parametrize(("template", "learn", "messages", "message"), UNPROVEN)
def test_a_conversation_whose_learned_parts_cannot_be_proven(tmp_path, template, learn, messages, message):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", template), learn)
    with pytest.raises(Refusal, match=re.escape(message)) as error:
        example(encoder, {"messages": messages})
    assert str(error.value).startswith("chats.jsonl:7")


def test_a_message_that_the_template_shows_in_a_prompt_and_drops_later(tmp_path):
    template = (
        "{% for m in messages %}{% if add_generation_prompt or m.role != 'tool' %}"
        "{{ m.role + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    encoder = build_encoder(write_tokenizer(tmp_path / "model", template))
    tool = {"role": "tool", "content": "a"}
    refused("message 2: the chat template", example, encoder, {"messages": [ASKED, tool, ANSWERED]})


def test_a_conversation_that_uses_all_that_marks_are_made_of(tmp_path):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(CHATML)))
    first = example(encoder, {"messages": [ASKED | {"content": "\U000f0000"}, ANSWERED]})  # there is a second set
    assert sum(first.learned) == 2
    both = {"messages": [ASKED | {"content": "\U000f0000 \U00100001"}, ANSWERED]}
    refused("chats.jsonl:7: the conversation uses characters for private use of both planes", example, encoder, both)


def test_an_answer_without_an_end_mark_in_the_middle_is_refused_and_its_last_one_is_learned(tmp_path):
    ends_once = shipped(FOLDED).replace("+ ' ' + eos_token", "+ (eos_token if loop.last else '')")
    folder = write_tokenizer(tmp_path / "model", ends_once)
    row = {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}
    refused("message 2: the chat template", example, build_encoder(folder), row)
    assert sum(example(build_encoder(folder, "last"), row).learned) == 2


def opened(folder, **options):
    return open_template(Model(hf_assets_path=str(folder), **options), build_tokenizer(folder))


def test_templates_that_are_none(tmp_path):
    folder = write_tokenizer(tmp_path / "model")
    refused("has neither chat_template.jinja nor a chat_template in tokenizer_config.json", opened, folder)
    refused("model.chat_template = 'none.jinja' is no file (looked from", opened, folder, chat_template="none.jinja")
    (tmp_path / "own.jinja").write_text("a\n{% for %}")
    refused("own.jinja, line 2: no Jinja template: ", opened, folder, chat_template=str(tmp_path / "own.jinja"))
    (tmp_path / "own.jinja").write_bytes(b"\xff\xfe")
    refused("own.jinja cannot be read as a chat template", find_template, str(tmp_path / "own.jinja"), tmp_path)


def test_an_old_jinja_is_refused_because_templates_could_leave_its_sandbox(tmp_path, monkeypatch):
    import jinja2

    monkeypatch.setattr(jinja2, "__version__", "3.1.4")
    refused("jinja2 3.1.4 does not keep a template in its sandbox", opened, write_tokenizer(tmp_path / "a", LLAMA3))


def test_sentencepiece_is_refused_because_it_has_no_control_tokens_in_a_text(sentencepiece_file):  # noqa: F811
    refused("of the kind sentencepiece, which takes the control", build_speller, build_tokenizer(sentencepiece_file))


def test_sources_without_rows(tmp_path):
    folder = write_tokenizer(tmp_path / "model", shipped(CHATML))
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "meta.json").write_text("{}")
    for name, why in (
        ("a.txt", "a text file has no rows"),
        ("prepared", "prepared tokens do not say which are learned"),
    ):
        source = DataSource(dataset="x", dataset_path=str(tmp_path / name), chat="all")
        given = [source], Model(hf_assets_path=str(folder)), 64, build_tokenizer(folder)
        refused(f"{name}: chat = 'all' needs conversations, but {why}", with_encoders, *given)


def test_a_bad_row_is_named_by_file_and_line(tmp_path):
    folder = write_tokenizer(tmp_path / "model", shipped(CHATML))
    lines = [json.dumps({"messages": [ASKED, ANSWERED]}), "", json.dumps({"messages": [ASKED]}), "{", "[1]"]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    source = DataSource(dataset="x", dataset_path=str(tmp_path / "chats.jsonl"), chat="all")
    tokenizer = build_tokenizer(folder)
    (source,) = with_encoders([source], Model(hf_assets_path=str(folder)), 64, tokenizer)
    data = open_source(source.dataset, source.dataset_path, source.text_key, tokenizer)
    assert len(data.tokens(0)) > 10
    refused("chats.jsonl:3: no message of assistant to learn (its roles: user); leave the row out", data.tokens, 1)
    refused("chats.jsonl:4: not JSON (", data.tokens, 2)
    refused("chats.jsonl:5: expected a JSON object with the key 'messages', found list", data.tokens, 3)


def test_data_of_which_nothing_is_left_ends_the_run(tmp_path):
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(CHATML)), seq_len=8)
    text = conversation({"messages": [ASKED | {"content": "long " * 20}, ANSWERED]}, lambda: "here")
    for _ in range(999):
        assert encoder.encode(text, False, False) == []
    refused("chats: 1,000 conversations in a row lost all that is learned", encoder.encode, text, False, False)


def test_what_is_cut_or_dropped_is_counted_and_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    encoder = build_encoder(write_tokenizer(tmp_path / "model", shipped(CHATML)), seq_len=40)
    long, short = ("word " * 60).strip(), "word"
    for asked, answered in ((short, short), (short, long), (long, short)):
        row = {"messages": [ASKED | {"content": asked}, ANSWERED | {"content": answered}]}
        encoder.encode(conversation(row, lambda: "here"), False, False)
    assert (encoder.counts.conversations, encoder.counts.cut, encoder.counts.dropped) == (3, 1, 1)
    assert (
        "chats: of 3 conversations so far, 1 were cut after 40 tokens, so that an answer lacks its end, and 1 were"
        in (caplog.text)
    )
    whole = example(encoder, {"messages": [ASKED, ANSWERED]})
    assert not whole.is_cut and whole.ids[-2] == encoder.speller.control["<|im_end|>"] and whole.learned[-2]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            '[training]\nchat = "all"',
            'model.attn_mask_type = "causal" with conversations (chat): one conversation would',
        ),
        ('[training]\nchat = "all, last"', "training.chat"),
        (
            '[model]\nattn_mask_type = "block_causal"\n[training]\nchat = "all"\n[[training.sources]]\ndataset = "a/b"',
            "training.chat is set beside [[training.sources]]; set chat in each source",
        ),
    ],
)
def test_configurations(toml, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_text(toml, "run.toml")
