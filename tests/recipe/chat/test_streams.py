"""Conversations in streams: whole in a sequence, the same on every layout and after every resume, mixed with text."""

import gzip
import json
import random
from collections import Counter

import numpy as np
import pytest
import torch

from tests.recipe.chat.templates import CHATML, random_messages, shipped, write_tokenizer
from tests.recipe.data.small_corpus import equal, loader_of, make_texts, write_jsonl
from torchtitan.config.schema import DataSource, Model
from torchtitan.data.batch import OwnSlots, Shape
from torchtitan.data.chat.packing import ChatPacker
from torchtitan.data.chat.sources import with_encoders
from torchtitan.data.cursor import Order
from torchtitan.data.loader import Loader, open_sources
from torchtitan.data.texts import sharded_cursor
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.models.spec import IGNORED

SEQ_LEN, BATCH = 128, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "model", shipped(CHATML))


def rows(count=120, seed=0):
    draw = random.Random(seed)
    found = [random_messages(draw) for _ in range(count)]
    for messages in found[::3]:  # short ones
        answer = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
        messages[:] = messages[answer - 1 : answer + 1]
    return [{"messages": messages} for messages in found]


def write(path, found):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)


@pytest.fixture
def sources(request, tmp_path, monkeypatch):
    """Conversations that can be read in any order, or only forwards, or mixed with plain text."""
    monkeypatch.setattr(sharded_cursor, "SHUFFLE_BLOCK", 8)
    if request.param == "sharded":
        for number in range(3):
            write(tmp_path / f"{number}.jsonl.gz", rows()[number::3])
        return [DataSource(dataset="x", dataset_path=str(tmp_path / "*.gz"), chat="all")]
    write(tmp_path / "chats.jsonl", rows())
    given = [DataSource(dataset="x", dataset_path=str(tmp_path / "chats.jsonl"), chat="all", weight=2.0)]
    if request.param == "mixed":
        text = write_jsonl(tmp_path / "text.jsonl", make_texts(80))
        given.append(DataSource(dataset="x", dataset_path=text))
    return given


KINDS = pytest.mark.parametrize("sources", ["lines", "sharded", "mixed"], indirect=True)


def build(sources, folder, dp_rank=0, dp_size=1, epochs=-1, pads=None, seq_len=SEQ_LEN):
    tokenizer, layout = build_tokenizer(folder), OwnSlots(BATCH, BATCH, dp_rank, dp_size)
    given = with_encoders(sources, Model(hf_assets_path=str(folder)), seq_len, tokenizer)
    opened = open_sources(given, tokenizer, layout, epochs, divided=False, pads=pads is not None)
    shape = Shape(seq_len, tokenizer.eos_id, True, False, pads is not None, ChatPacker)
    return Loader(opened, tokenizer, layout, shape, Order(BATCH, 7, pads is None), pads)


def numbers(starts, seq_len):
    """The number of each position's document."""
    return (starts <= torch.arange(seq_len)[:, None]).sum(1) - 1


def take(loaders, count=10**6):
    """Global batches as [B, 3, S]: inputs, labels and document numbers, in slot order."""
    batches = []
    while len(batches) < count and all(parts := [loader.next() for loader in loaders]):
        found = {
            slot: torch.stack([p.inputs[row], p.labels[row], numbers(p.documents[row], p.inputs.shape[1])])
            for p in parts
            for row, slot in enumerate(p.origin.slots)
        }
        batches.append(torch.stack([found[slot] for slot in range(BATCH)]))
    return batches


@KINDS
def test_one_rank_and_two_get_the_same_batches_also_where_a_run_was_stopped(sources, folder):
    expected = take([build(sources, folder)], 40)
    assert equal(expected, take([build(sources, folder, rank, 2) for rank in range(2)], 40))
    for stopped_at in (1, 6, 17, 31):
        before = [build(sources, folder, rank, 2) for rank in range(2)]
        take(before, stopped_at)
        states = [loader.state_dict() for loader in before]
        merged = states[0] | {"streams": {n: stream for state in states for n, stream in state["streams"].items()}}
        after = [build(sources, folder, rank, 4) for rank in range(4)]
        for loader in after:
            loader.load_state_dict(json.loads(json.dumps(merged)))
        assert after[0].state_dict()["streams"]["0"] == merged["streams"]["0"]
        assert equal(take(after, 40 - stopped_at), expected[stopped_at:])


def documents(batches):
    """Inputs, labels of each document of each sequence."""
    for inputs, labels, ids in (row for batch in batches for row in batch.numpy()):
        for number in range(ids.max() + 1):
            yield inputs[ids == number], labels[ids == number]


@pytest.mark.parametrize("sources", ["lines", "sharded"], indirect=True)
def test_every_conversation_stands_whole_in_one_sequence_and_is_read_once(sources, folder):
    encoder = with_encoders(sources, Model(hf_assets_path=str(folder)), SEQ_LEN, build_tokenizer(folder))[
        0
    ].text_key.encoder
    own = [np.array(encoder.encode(encoder_row(row), False, False)) for row in rows()]
    expected = Counter()
    for tokens in own:
        if len(tokens):
            inputs, labels = np.where(tokens < 0, ~tokens, tokens), np.where(tokens < 0, IGNORED, tokens)
            last = [IGNORED] if len(tokens) <= SEQ_LEN else []  # of the longest, the last token is only a label
            expected[tuple(inputs[:SEQ_LEN]), (*labels[1:], *last)] += 1
    batches = take([build(sources, folder, epochs=1, pads=lambda goes_on: goes_on)])
    eos = build_tokenizer(folder).eos_id
    found = Counter(
        (tuple(inputs), tuple(labels)) for inputs, labels in documents(batches) if not (inputs == eos).all()
    )
    # The last document of a sequence may end where the sequence does: its last token is no input then.
    cut = found - expected
    for (inputs, labels), count in cut.items():
        whole = next(
            key for key in expected - found if key[0][: len(inputs)] == inputs and key[1][: len(labels)] == labels
        )
        assert len(whole[0]) == len(inputs) + 1
        expected[whole] -= count
    assert found - cut == +expected
    assert encoder.counts.cut > 5 and encoder.counts.dropped > 0


def encoder_row(row):
    from torchtitan.data.chat.rows import conversation

    return conversation(row, lambda: "here")


def test_sequences_are_nearly_full(tmp_path, folder):
    write(tmp_path / "chats.jsonl", rows(400))
    source = DataSource(dataset="x", dataset_path=str(tmp_path / "chats.jsonl"), chat="all")
    batches = take([build([source], folder, seq_len=512)], 20)
    eos = build_tokenizer(folder).eos_id
    padding = sum((batch[:, 0] == eos).sum() for batch in batches) / sum(batch[:, 0].numel() for batch in batches)
    assert padding < 0.03


@pytest.mark.parametrize("sources", ["mixed"], indirect=True)
def test_plain_text_fills_sequences_and_every_token_of_it_is_learned_once(sources, folder):
    batches = take([build(sources, folder, epochs=1)])
    eos, bos = build_tokenizer(folder).eos_id, build_tokenizer(folder).bos_id
    of_text = [(inputs, labels) for inputs, labels in documents(batches) if bos in inputs or (labels == eos).any()]
    assert len(of_text) > 20
    for _, labels in of_text:
        assert (labels[:-1] != IGNORED).all()  # but for the last token, whose next is another document's
    assert sum(len(labels) for _, labels in of_text) > 500


@pytest.mark.parametrize("sources", ["mixed"], indirect=True)
def test_changed_weights_hold_from_where_a_run_is_resumed_and_lose_no_conversation(sources, folder):
    loader = build(sources, folder)
    take([loader], 9)
    state = loader.state_dict()
    waiting = [[wait[:2] for wait in stream["waiting"]] for stream in state["streams"].values()]
    resumed = build([sources[0].model_copy(update={"weight": 0.1}), sources[1]], folder)
    resumed.load_state_dict(state)
    again = [[wait[:2] for wait in stream["waiting"]] for stream in resumed.state_dict()["streams"].values()]
    assert waiting == again
    assert len(take([resumed], 5)) == 5


def test_another_template_or_other_learned_parts_are_other_data(tmp_path, folder):
    write(tmp_path / "chats.jsonl", rows(20))
    source = DataSource(dataset="x", dataset_path=str(tmp_path / "chats.jsonl"), chat="all")
    state = build([source], folder).state_dict()
    with pytest.raises(ValueError, match="learned: last; template .*; resume with the same data"):
        build([source.model_copy(update={"chat": "last"})], folder).load_state_dict(state)
    other = write_tokenizer(tmp_path / "other", shipped(CHATML) + " ")
    with pytest.raises(ValueError, match="resume with the same data"):
        build([source], other).load_state_dict(state)


def test_parquet_and_saved_datasets_give_the_same_conversations_as_lines(tmp_path, folder):
    import datasets
    import pyarrow
    import pyarrow.parquet

    found = [{"messages": row["messages"], "id": n} for n, row in enumerate(rows(30))]
    write(tmp_path / "chats.jsonl", found)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), tmp_path / "chats.parquet")
    datasets.Dataset.from_list(found).save_to_disk(tmp_path / "saved")
    batches = []
    for path in ("chats.jsonl", "saved", "chats.parquet"):
        source = DataSource(dataset="x", dataset_path=str(tmp_path / path), chat="all")
        batches.append(take([build([source], folder, epochs=1, pads=lambda goes_on: goes_on)]))
    assert equal(batches[0], batches[1])
    learned = [sorted(batch[:, 1][batch[:, 1] != IGNORED].tolist()) for batch in map(torch.cat, batches)]
    assert learned[0] == learned[2]  # streams share the only row group in another way


def test_a_run_of_text_alone_loads_nothing_of_conversations(tmp_path):
    import subprocess
    import sys

    path = write_jsonl(tmp_path / "text.jsonl", make_texts(20))
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.recipe.data.small_corpus import small_loader, take\n"
        f"assert take(small_loader({path!r}), 2)\n"
        "assert not [name for name in sys.modules if '.chat' in name or name == 'jinja2.sandbox']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert loader_of  # the helper of plain text has no word of conversations
