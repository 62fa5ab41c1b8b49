"""Reading prepared tokens: another tokenizer, a newer format and damaged files are refused."""

import json

import numpy as np
import pytest
from small_corpus import ByteTokenizer
from test_prepare import prepared as prepared
from test_prepare import tokenizer as tokenizer

from torchtitan.data.fingerprint import fingerprint
from torchtitan.data.prepared import PreparedTokens, token_dtype


def test_another_tokenizer_is_refused(prepared):
    with pytest.raises(ValueError, match="was prepared with another tokenizer .* this one has 258"):
        PreparedTokens(prepared[1], ByteTokenizer())


def test_the_fingerprint_is_of_what_a_tokenizer_does():
    class Other(ByteTokenizer):
        eos_id = 256

    assert fingerprint(ByteTokenizer()) == fingerprint(ByteTokenizer()) != fingerprint(Other())


def test_damaged_or_newer_folders_are_refused(prepared, tokenizer, tmp_path):
    for path in prepared[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens\.bin has [\d,]+ bytes, expected [\d,]+; the folder is damaged"):
        PreparedTokens(tmp_path, tokenizer)
    (tmp_path / "documents.bin").unlink()
    with pytest.raises(ValueError, match=r"documents\.bin is missing"):
        PreparedTokens(tmp_path, tokenizer)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "format_version": 2}))
    with pytest.raises(ValueError, match="format 2, but this version reads 1"):
        PreparedTokens(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: "", "is not a JSON object"),
        (lambda meta: json.dumps(meta)[:50], "is not a JSON object"),
        (lambda meta: "[]", "is not a JSON object"),
        (lambda meta: json.dumps({**meta, "dtype": "bogus"}), "not as `prepare` writes it: dtype"),
        (lambda meta: json.dumps({**meta, "dtype": "<i2"}), "not as `prepare` writes it: dtype"),
        (lambda meta: json.dumps({**meta, "num_tokens": "5", "more": 1}), "writes it: num_tokens, more"),
        (lambda meta: json.dumps({"format_version": 1}), "writes it: num_documents, num_tokens"),
    ],
)
def test_a_damaged_description_is_named_with_the_fix(prepared, tokenizer, tmp_path, change, message):
    meta = json.loads((prepared[1] / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(change(meta))
    with pytest.raises(ValueError, match=rf"meta\.json.*{message}.*; the folder is damaged: copy it again or"):
        PreparedTokens(tmp_path, tokenizer)


def test_offsets_and_ids_that_cannot_be_are_refused(prepared, tokenizer, tmp_path):
    for path in prepared[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    offsets = np.fromfile(tmp_path / "documents.bin", "<i8")
    for place, value in ((0, 1), (-1, offsets[-1] - 1), (7, offsets[9])):
        damaged = offsets.copy()
        damaged[place] = value
        (tmp_path / "documents.bin").write_bytes(damaged.tobytes())
        with pytest.raises(ValueError, match=r"documents\.bin does not rise from 0 to [\d,]+; the folder is damaged"):
            PreparedTokens(tmp_path, tokenizer)
    meta = json.loads((tmp_path / "meta.json").read_text())
    tokens = np.fromfile(tmp_path / "tokens.bin", "<u2")
    assert meta["largest_id"] == tokens.max() < tokenizer.vocab_size
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "largest_id": 60_000}))
    with pytest.raises(ValueError, match="holds the id 60000, but the tokenizer has only 2048"):
        PreparedTokens(tmp_path, tokenizer)


def test_the_smallest_type_that_holds_the_vocabulary_is_used():
    assert [token_dtype(size) for size in (2048, 65_536, 65_537, 128_256)] == ["<u2", "<u2", "<u4", "<u4"]
    assert np.dtype(token_dtype(65_536)).type(65_535) == 65_535
