"""Reading prepared tokens: another tokenizer, a newer format and damaged files are refused."""

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_prepare import TOKENIZER
from test_prepare import prepared as prepared
from test_prepare import tokenizer as tokenizer

from tests.recipe.data.small_corpus import ByteTokenizer
from torchtitan.data.prepared.tokens import PreparedTokens, token_dtype
from torchtitan.data.tokenizers.fingerprint import fingerprint
from torchtitan.data.tokenizers.tokenizer import build_tokenizer


def test_another_tokenizer_is_refused(prepared):
    with pytest.raises(ValueError, match="was prepared with another tokenizer .* this one has 258"):
        PreparedTokens(prepared[1], ByteTokenizer())


def test_the_fingerprint_is_of_the_file_and_of_what_the_tokenizer_does(tmp_path):
    class Other(ByteTokenizer):
        eos_id = 256

    assert fingerprint(ByteTokenizer()) == fingerprint(ByteTokenizer()) != fingerprint(Other())
    found = set()
    for swap in (False, True):
        content = json.loads(Path(TOKENIZER, "tokenizer.json").read_text())
        merges = content["model"]["merges"]
        if swap:  # two that no text of the probe needs
            merges[-1], merges[-2] = merges[-2], merges[-1]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        shutil.copy(Path(TOKENIZER, "tokenizer_config.json"), tmp_path)
        found.add(fingerprint(build_tokenizer(tmp_path)))
    assert len(found) == 2


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
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "format_version": 3}))
    with pytest.raises(ValueError, match="format 3, but this version reads 2"):
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
        (lambda meta: json.dumps({"format_version": 2}), "writes it: num_documents, num_tokens"),
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


def test_a_changed_token_is_found_when_its_document_is_read(prepared, tokenizer, tmp_path):
    for path in prepared[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = PreparedTokens(tmp_path, tokenizer)
    tokens = np.fromfile(tmp_path / "tokens.bin", "<u2")
    first = len(whole.tokens(0))
    tokens[first + 1] ^= 0x4000  # in document 1, far beyond the vocabulary
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    damaged = PreparedTokens(tmp_path, tokenizer)
    assert damaged.tokens(0).tolist() == tokens[:first].tolist() and len(damaged.tokens(2))
    with pytest.raises(ValueError, match=r"tokens\.bin, document 1: its tokens have changed; the folder is damaged"):
        damaged.tokens(1)
    checksums = np.fromfile(tmp_path / "checksums.bin", "<u4")
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert len(checksums) == len(whole) and meta["checksums_crc32"] == zlib.crc32(checksums.data)


def test_the_smallest_type_that_holds_the_vocabulary_is_used():
    assert [token_dtype(size) for size in (2048, 65_536, 65_537, 128_256)] == ["<u2", "<u2", "<u4", "<u4"]
    assert np.dtype(token_dtype(65_536)).type(65_535) == 65_535
