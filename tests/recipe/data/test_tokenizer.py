"""What all kinds of tokenizers have in common: encoding, and how a file's kind is found."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.recipe.data.small_tokenizers import KINDS, ROOT, SHIPPED, UNUSUAL_TEXTS, read_documents, write_huggingface
from tests.recipe.data.small_tokenizers import sentencepiece_file as sentencepiece_file
from tests.recipe.data.small_tokenizers import tiktoken_file as tiktoken_file
from torchtitan.data.tokenizers import interface as tokenizer_interface
from torchtitan.data.tokenizers.models import TIKTOKEN_SPECIAL_TOKENS
from torchtitan.data.tokenizers.tokenizer import Tokenizer, build_tokenizer


@pytest.fixture(scope="module")
def files(tiktoken_file: Path, sentencepiece_file: Path) -> dict[str, Path]:
    return {
        "huggingface": SHIPPED / "tokenizer.json",
        "tiktoken": tiktoken_file,
        "sentencepiece": sentencepiece_file,
    }


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, files: dict[str, Path]) -> Tokenizer:
    return build_tokenizer(files[request.param])


# Encoding


@pytest.mark.parametrize("text", UNUSUAL_TEXTS)
def test_decoding_returns_the_encoded_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == text
    assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=True)) == text


def test_bos_and_eos_are_added_exactly_once(tokenizer: Tokenizer) -> None:
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    plain = tokenizer.encode("some text", bos=False, eos=False)
    assert bos not in plain and eos not in plain
    assert tokenizer.encode("some text", bos=True, eos=False) == [bos, *plain]
    assert tokenizer.encode("some text", bos=False, eos=True) == [*plain, eos]
    assert tokenizer.encode("some text", bos=True, eos=True) == [bos, *plain, eos]


def test_control_tokens_in_text_are_encoded_as_text(tokenizer: Tokenizer) -> None:
    text = "a<|begin_of_text|><|end_of_text|><|eot_id|><|reserved_special_token_9|><s></s><unk>b"
    ids = tokenizer.encode(text, bos=False, eos=False)
    assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids
    if tokenizer.kind == "tiktoken":
        assert max(ids) < tokenizer.vocab_size - len(TIKTOKEN_SPECIAL_TOKENS)
    assert tokenizer.decode(ids) == text


def test_encode_batch_equals_encode_of_each(tokenizer: Tokenizer) -> None:
    texts = [*UNUSUAL_TEXTS, *read_documents("validation.jsonl")[:5], "x<|end_of_text|>"]
    for bos, eos in ((True, True), (False, True), (False, False)):
        assert tokenizer.encode_batch(texts, bos, eos) == [tokenizer.encode(text, bos, eos) for text in texts]
    assert tokenizer.encode_batch([], bos=True, eos=True) == []


def test_every_id_is_below_the_vocab_size(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(read_documents("validation.jsonl"), bos=True, eos=True)
    assert max(map(max, ids)) < tokenizer.vocab_size


def test_half_a_surrogate_pair_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    text = json.loads('"whole \\ud83d\\ude00, half \\ud83d."')
    for ids in (tokenizer.encode(text, bos=False, eos=False), tokenizer.encode_batch([text], False, False)[0]):
        assert tokenizer.decode(ids) == "whole 😀, half \ufffd."


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "=" * 450_000 + "end"], ids=["a", "space", "="])
def test_a_long_run_without_a_word_border_is_encoded_in_seconds(tokenizer: Tokenizer, text: str) -> None:
    start = time.process_time()
    ids = tokenizer.encode(text, bos=False, eos=False)
    assert time.process_time() - start < 10
    assert tokenizer.decode(ids) == text


def test_threads_that_share_a_tokenizer_get_the_same_ids(tokenizer: Tokenizer) -> None:
    texts = read_documents("validation.jsonl")[:6]
    expected = tokenizer.encode_batch(texts, bos=True, eos=True)
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(tokenizer.encode_batch(texts, bos=True, eos=True)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# Detection


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "original/tokenizer.model"])
def test_detection_does_not_depend_on_the_file_name(
    kind: str, name: str, files: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(files[kind].read_bytes())
    assert build_tokenizer(path).kind == build_tokenizer(tmp_path).kind == kind


def test_in_a_folder_tokenizer_json_comes_first(sentencepiece_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    assert build_tokenizer(str(tmp_path)).kind == "sentencepiece"
    write_huggingface(tmp_path)
    assert build_tokenizer(tmp_path).kind == "huggingface"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b" \n\n", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html>\n<html><title>Log in</title></html>", "an HTML page"),
        (b'{"error": "gated", "url": "x"}', "JSON without a 'model' key (its keys: error, url)"),
        (b"{}", "JSON without a 'model' key (its keys: none)"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}', "a safetensors file"),
        (b"PK\x03\x04\x00\x00", "a zip archive, such as a PyTorch checkpoint"),
        (b"Access to this model is restricted.", "text that begins with 'Access to this model is restricted.'"),
        (b"GGUF\x03\x00\x00\x00", "a binary file that begins with 47 47 55 46"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_is_no_tokenizer_is_named_by_what_it_is(
    name: str, content: bytes, found: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        build_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(error.value)
    assert found in str(error.value)
    assert "Hugging Face tokenizer.json, or a tiktoken or SentencePiece tokenizer.model" in str(error.value)


def test_a_missing_tokenizer_names_every_place_looked_at_and_the_fix(tmp_path: Path) -> None:
    for path, looked in ((tmp_path, "original/tokenizer.model"), (tmp_path / "absent", "absent")):
        with pytest.raises(ValueError, match=f"no tokenizer at .*looked for .*{looked}.*model.hf_assets_path"):
            build_tokenizer(path)


def test_a_name_of_the_hub_is_looked_up_in_the_download_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="looked for gpt2, assets/hf/gpt2/tok.* download tokenizer gpt2`"):
        build_tokenizer("gpt2")
    shutil.copytree(SHIPPED, tmp_path / "assets/hf/gpt2")
    assert build_tokenizer("gpt2").vocab_size == build_tokenizer("openai/gpt2").vocab_size == 2048
    with pytest.raises(ValueError, match="no tokenizer at elsewhere/assets/gpt2"):
        build_tokenizer("elsewhere/assets/gpt2")


def test_damaged_json_is_named_with_the_place(tmp_path: Path) -> None:
    whole = (SHIPPED / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tokenizer.json is not valid JSON \(.*line \d+"):
        build_tokenizer(tmp_path)


def test_the_tokenizer_module_imports_neither_torch_nor_a_tokenizer_library() -> None:
    code = "import sys, torchtitan.data.tokenizers.tokenizer; print([m for m in sys.argv[1:] if m in sys.modules])"
    command = [sys.executable, "-c", code, "torch", "tokenizers", "tiktoken", "sentencepiece"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_long_text_is_encoded_in_pieces_with_the_same_ids(monkeypatch):
    tokenizer = build_tokenizer(SHIPPED)
    text = "\n".join(f"def f_{i}(x):\n\n    return x ** {i}  # naïve" for i in range(400))
    whole = tokenizer.encode(text, bos=True, eos=True)
    batch = tokenizer.encode_batch([text, "short"], bos=True, eos=True)
    monkeypatch.setattr(tokenizer_interface, "PIECE_CHARS", 700)
    monkeypatch.setattr(tokenizer_interface, "_LAST_CHARS", 300)
    parts = list(tokenizer_interface.pieces(text))
    assert "".join(parts) == text and len(parts) > 20 and max(map(len, parts)) <= 700
    assert tokenizer.encode(text, bos=True, eos=True) == whole
    assert tokenizer.encode_batch([text, "short"], bos=True, eos=True) == batch
    assert "".join(tokenizer_interface.pieces("x" * 5000)) == "x" * 5000
