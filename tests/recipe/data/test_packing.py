"""Packing, against plain concatenation."""

import numpy as np
import pytest

from tests.recipe.data.small_corpus import BOS, EOS, ByteTokenizer, make_texts, write_jsonl
from torchtitan.data.cursor import Order, Source
from torchtitan.data.packing import Packer
from torchtitan.data.stream import Stream
from torchtitan.data.texts.sources import open_source
from torchtitan.models.spec import IGNORED

TEXTS = make_texts(60)


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "train.jsonl", TEXTS)


def build_packer(path, seq_len, epochs=1):
    source = Source("train", open_source("x", path, "text", ByteTokenizer()), epochs=epochs)
    return Packer(Stream([source], ByteTokenizer(), Order(1, 0, False), 0), seq_len, EOS)


def pack(packer, seq_len, block_causal=False):
    inputs, labels = np.zeros(seq_len, np.int64), np.zeros(seq_len, np.int64)
    ids = np.zeros(seq_len, np.int32) if block_causal else None
    return packer.pack(inputs, labels, ids), inputs, labels, ids


def reference_tokens():
    return [token for text in TEXTS for token in ByteTokenizer().encode(text, True, True)]


@pytest.mark.parametrize("seq_len", [1, 2, 31, 500, 100_000])
def test_sequences_overlap_by_one_token_so_that_every_token_is_a_label_once(path, seq_len):
    packer, inputs, labels = build_packer(path, seq_len), [], []
    while (sequence := pack(packer, seq_len))[0].num_labels:
        inputs += sequence[1][: sequence[0].num_labels].tolist()
        labels += sequence[2][sequence[2] != IGNORED].tolist()
    assert labels == reference_tokens()[1:]
    assert inputs == reference_tokens()[:-1]


def test_the_end_is_padded_with_ignored_labels(path):
    total = len(reference_tokens())
    sequence, inputs, labels, ids = pack(build_packer(path, total + 10), total + 10, block_causal=True)
    assert sequence.num_labels == total - 1
    assert (labels[total - 1 :] == IGNORED).all() and (inputs[total:] == EOS).all()
    assert (ids[total:] == len(TEXTS)).all()


@pytest.mark.parametrize("seq_len", [1, 7, 64, 700])
def test_documents_are_kept_apart_when_asked(path, seq_len):
    tokens = reference_tokens()
    packer = build_packer(path, seq_len)
    for begin in range(0, len(tokens) - seq_len, seq_len):
        _, inputs, labels, ids = pack(packer, seq_len, block_causal=True)
        assert inputs.tolist() == tokens[begin : begin + seq_len]
        number, expected = 0, []
        for position, token in enumerate(inputs):
            number += position > 0 and token == BOS
            expected.append(number)
        assert ids.tolist() == expected
        following = tokens[begin + 1 : begin + seq_len + 1]
        assert labels.tolist() == [IGNORED if token == BOS else token for token in following]


@pytest.mark.parametrize("seq_len", [1, 13, 300])
def test_a_packer_goes_on_from_any_saved_state(path, seq_len):
    first, states, sequences = build_packer(path, seq_len, epochs=2), [], []
    for _ in range(9):
        states.append(first.state())
        sequences.append(pack(first, seq_len)[1])
    for number, state in enumerate(states):
        resumed = build_packer(path, seq_len, epochs=2)
        resumed.load(state)
        for expected in sequences[number:]:
            assert np.array_equal(pack(resumed, seq_len)[1], expected)


def test_the_state_holds_no_token(path):
    packer = build_packer(path, 64)
    for _ in range(5):
        pack(packer, 64)
    state = packer.state()
    assert sorted(state) == ["cursors", "num_tokens", "offset"]
    flat = [*state["num_tokens"], *state["cursors"][0], state["offset"]]
    assert len(flat) == 4 and all(type(value) is int for value in flat)


def test_the_places_of_a_sequence_are_its_first_and_last_document(path):
    packer = build_packer(path, 300)
    first, second = pack(packer, 300)[0], pack(packer, 300)[0]
    assert first.first.position == (0,)
    assert second.first == first.last and second.last.position > second.first.position
