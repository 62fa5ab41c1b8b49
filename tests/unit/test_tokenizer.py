"""The three tokenizer kinds, and the shipped tokenizer, corpus and the script that made them."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from torchtitan.data.tokenizer import LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, Tokenizer, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "tests" / "assets"
SHIPPED = ASSETS / "tokenizer"
KINDS = ("huggingface", "tiktoken", "sentencepiece")
UNUSUAL_TEXTS = (
    "",
    " ",
    "plain words",
    "  two spaces first,\ttab, and trailing spaces   ",
    "line\r\nline\n\n\n\rline\n",
    "control \x01\x02\x1b[0m\x7f characters",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and flags 🇨🇭",
    "naïve café; cafe\u0301 (combining); Ελληνικά; 日本語; العربية",
    "zero\u200bwidth, no\u00a0break, byte order \ufeff mark",
    "def f(x):\n        return x['s'] ** 2  # don't\n",
)


def read_documents(name: str) -> list[str]:
    with open(ASSETS / "pydocs" / name, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def shipped_json() -> dict:
    return json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))


def byte_level_tokens() -> list[bytes]:
    """The shipped vocabulary without its control tokens, in order, as bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    vocab = shipped_json()["model"]["vocab"]
    return [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)[2:]]


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiktoken") / "tokenizer.model"
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(byte_level_tokens())]
    path.write_bytes(b"".join(lines))
    return path


def train_sentencepiece(path: Path, **options: Any) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in read_documents("validation.jsonl") for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=512,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


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


def write_huggingface(folder: Path, config: dict | None = None, **changes: object) -> Path:
    """The shipped tokenizer.json with top-level keys replaced, and its tokenizer_config.json if one is given."""
    (folder / "tokenizer.json").write_text(json.dumps(shipped_json() | changes))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


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
        assert max(ids) < tokenizer.vocab_size - len(LLAMA3_SPECIAL_TOKENS)
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
    start = time.perf_counter()
    ids = tokenizer.encode(text, bos=False, eos=False)
    assert time.perf_counter() - start < 10
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
    assert "Hugging Face tokenizer.json, or Llama 3's (tiktoken) or Llama 2's (SentencePiece)" in str(error.value)


def test_a_missing_tokenizer_names_every_place_looked_at_and_the_fix(tmp_path: Path) -> None:
    for path, looked in ((tmp_path, "original/tokenizer.model"), (tmp_path / "absent", "absent")):
        with pytest.raises(ValueError, match=f"no tokenizer at .*looked for .*{looked}.*model.hf_assets_path"):
            build_tokenizer(path)


def test_damaged_json_is_named_with_the_place(tmp_path: Path) -> None:
    whole = (SHIPPED / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tokenizer.json is not valid JSON \(.*line \d+"):
        build_tokenizer(tmp_path)


# Hugging Face


def test_a_post_processor_does_not_add_a_second_bos(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]}
        },
    }
    tokenizer = build_tokenizer(write_huggingface(tmp_path, post_processor=template))
    shipped = build_tokenizer(SHIPPED)
    for bos in (False, True):
        assert tokenizer.encode("text", bos, eos=True) == shipped.encode("text", bos, eos=True)
        assert tokenizer.encode_batch(["text"], bos, eos=True) == shipped.encode_batch(["text"], bos, eos=True)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|begin_of_text|>",
    }  # fmt: skip
    tokenizer = build_tokenizer(write_huggingface(tmp_path, truncation=truncation, padding=padding))
    texts = ["short", "a text of more than four tokens, surely"]
    assert tokenizer.encode_batch(texts, False, False) == build_tokenizer(SHIPPED).encode_batch(texts, False, False)


def test_bos_and_eos_come_from_the_config_as_text_or_as_an_object(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|end_of_text|>", "lstrip": False}, "eos_token": "<|begin_of_text|>"}
    tokenizer = build_tokenizer(write_huggingface(tmp_path, config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)


def test_bos_and_eos_are_found_by_name_without_a_config(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_huggingface(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_a_tokenizer_without_bos_begins_documents_with_nothing(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_huggingface(tmp_path, {"bos_token": None, "eos_token": "<|end_of_text|>"}))
    assert tokenizer.bos_id is None
    assert tokenizer.encode("text", bos=True, eos=True) == tokenizer.encode("text", bos=False, eos=True)


def test_a_bos_that_the_file_does_not_mark_special_is_not_injected_either(tmp_path: Path) -> None:
    added = [token | {"special": False} for token in shipped_json()["added_tokens"]]
    tokenizer = build_tokenizer(write_huggingface(tmp_path, added_tokens=added))
    assert not {0, 1} & set(tokenizer.encode("<|begin_of_text|>x<|end_of_text|>", bos=False, eos=False))


def test_added_tokens_count_in_the_vocab_size(tmp_path: Path) -> None:
    extra = shipped_json()["added_tokens"][0] | {"id": 2048, "content": "<|extra|>"}
    added = [*shipped_json()["added_tokens"], extra]
    assert build_tokenizer(write_huggingface(tmp_path, added_tokens=added)).vocab_size == 2049


def test_vocab_size_is_the_largest_id_plus_one_where_ids_have_gaps(tmp_path: Path) -> None:
    model = shipped_json()["model"]
    model["vocab"]["Que"] = 2999
    assert build_tokenizer(write_huggingface(tmp_path, model=model)).vocab_size == 3000


def test_no_eos_is_refused_with_the_fix(tmp_path: Path) -> None:
    fix = r'; write \{"eos_token": "..."\} to .*tokenizer_config.json'
    with pytest.raises(ValueError, match=r"no end-of-text token: .*_config.json names null as eos_token" + fix):
        build_tokenizer(write_huggingface(tmp_path, {"eos_token": None}))
    with pytest.raises(ValueError, match=r"names no eos_token and none of .* is among the added tokens" + fix):
        build_tokenizer(write_huggingface(tmp_path, {}, added_tokens=[]))


def test_an_eos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config.json names '<eos>', which is not in .*tokenizer.json"):
        build_tokenizer(write_huggingface(tmp_path, {"eos_token": "<eos>"}))


def test_a_model_the_library_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json: tokenizers \S+ cannot read it"):
        build_tokenizer(write_huggingface(tmp_path, model={"type": "NoSuchModel"}))


def test_a_vocabulary_that_spells_eos_as_text_is_refused(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "word": 1, "?": 2}, "unk_token": "?"}
    path = write_huggingface(tmp_path, model=model, added_tokens=[], pre_tokenizer=None, decoder=None)
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="a document could end itself"):
        build_tokenizer(path)


# tiktoken


def test_llama3_control_tokens_follow_the_ranks_at_their_published_places(tiktoken_file: Path) -> None:
    tokenizer = build_tokenizer(tiktoken_file)
    num_ranks = len(byte_level_tokens())
    assert tokenizer.vocab_size == num_ranks + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (num_ranks, num_ranks + 1)
    assert len(set(LLAMA3_SPECIAL_TOKENS)) == 256
    # Llama 3.1's ids less its 128,000 ranks
    places = {"<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6, "<|end_header_id|>": 7, "<|eom_id|>": 8}
    places |= {"<|eot_id|>": 9, "<|python_tag|>": 10, "<|reserved_special_token_247|>": 255}
    assert {token: LLAMA3_SPECIAL_TOKENS.index(token) for token in places} == places


def test_a_tiktoken_file_and_its_hugging_face_conversion_give_the_same_ids(tiktoken_file: Path, tmp_path: Path) -> None:
    model = shipped_json()["model"]
    model["vocab"] = {token: rank - 2 for token, rank in model["vocab"].items() if rank >= 2} | {
        token: len(model["vocab"]) - 2 + i for i, token in enumerate(LLAMA3_SPECIAL_TOKENS[:2])
    }
    added = [token | {"id": model["vocab"][token["content"]]} for token in shipped_json()["added_tokens"]]
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    converted = write_huggingface(
        tmp_path,
        model=model | {"ignore_merges": True},
        added_tokens=added,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, to_bytes]},
    )
    texts = [*UNUSUAL_TEXTS, *read_documents("validation.jsonl")]
    ours, reference = build_tokenizer(tiktoken_file), build_tokenizer(converted)
    assert ours.encode_batch(texts, bos=True, eos=True) == reference.encode_batch(texts, bos=True, eos=True)


def test_a_damaged_tiktoken_line_is_named(tiktoken_file: Path, tmp_path: Path) -> None:
    lines = tiktoken_file.read_bytes().splitlines(keepends=True)
    for bad in (b"IQ== \n", b"!!! 5\n", b"IQ\n"):
        (tmp_path / "tokenizer.model").write_bytes(b"".join([*lines[:4], bad, *lines[5:]]))
        with pytest.raises(ValueError, match="tokenizer.model, line 5: .* is not a base64 token and its rank"):
            build_tokenizer(tmp_path)


def test_a_tiktoken_file_with_a_gap_or_without_some_byte_is_refused(tiktoken_file: Path, tmp_path: Path) -> None:
    lines = tiktoken_file.read_bytes().splitlines(keepends=True)
    without_a_byte = [line.split()[0] + f" {rank}\n".encode() for rank, line in enumerate(lines[:7] + lines[8:])]
    for damaged in (lines[:1000] + lines[1001:], without_a_byte):
        (tmp_path / "tokenizer.model").write_bytes(b"".join(damaged))
        with pytest.raises(ValueError, match="2045 ranks, which should be 0, 1, 2 ... without a gap and include every"):
            build_tokenizer(tmp_path)


# SentencePiece


def test_sentencepiece_ids_are_those_of_the_library(sentencepiece_file: Path) -> None:
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    tokenizer = build_tokenizer(sentencepiece_file)
    text = read_documents("validation.jsonl")[0]
    assert tokenizer.vocab_size == 512
    assert tokenizer.encode(text, bos=True, eos=True) == reference.encode(text, add_bos=True, add_eos=True)


def test_a_truncated_sentencepiece_model_is_refused(sentencepiece_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes()[:3001])
    with pytest.raises(ValueError, match="tokenizer.model is a damaged SentencePiece model"):
        build_tokenizer(tmp_path)


def test_sentencepiece_without_eos_is_refused_and_without_bos_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without an EOS piece"):
        build_tokenizer(train_sentencepiece(tmp_path / "a.model", eos_id=-1))
    assert build_tokenizer(train_sentencepiece(tmp_path / "b.model", bos_id=-1, eos_id=1)).bos_id is None


# What ships


def test_the_shipped_tokenizer_has_2048_tokens_and_both_control_tokens() -> None:
    tokenizer = build_tokenizer(SHIPPED)
    assert (tokenizer.kind, tokenizer.vocab_size) == ("huggingface", 2048)
    assert shipped_json()["model"]["vocab"]["<|begin_of_text|>"] == tokenizer.bos_id
    assert shipped_json()["model"]["vocab"]["<|end_of_text|>"] == tokenizer.eos_id


def test_the_shipped_tokenizer_round_trips_the_whole_corpus() -> None:
    tokenizer = build_tokenizer(SHIPPED)
    texts = read_documents("train.jsonl")
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts, bos=True, eos=True)] == texts


def test_train_and_validation_share_no_document() -> None:
    train, validation = read_documents("train.jsonl"), read_documents("validation.jsonl")
    assert len(set(train) | set(validation)) == len(train) + len(validation)
    assert all(1_000 <= len(text.encode()) < 45_000 for text in train + validation)


@pytest.fixture(scope="module")
def script():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("make_test_assets", ROOT / "scripts" / "make_test_assets.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_the_shipped_tokenizer_from_the_shipped_corpus(script) -> None:  # type: ignore[no-untyped-def]
    assert json.loads(script.train_tokenizer(read_documents("train.jsonl")))["model"] == shipped_json()["model"]


def test_the_script_gives_identical_files_twice(script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    sources = tmp_path / "sources"
    texts = read_documents("train.jsonl")[:80]
    for i, text in enumerate(texts):
        page = sources / script.CHAPTERS[i % len(script.CHAPTERS)] / f"page_{i}.rst.txt"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(".. sectionauthor:: Someone <someone@example.org>\n\n" + text, encoding="utf-8")
    (sources / "copyright.rst.txt").write_text("Copyright, whoever\n")
    (sources / "license.rst.txt").write_text(
        "Terms and conditions for accessing or otherwise using Python\n\nfor |release|\n\n.. _OtherLicenses:\n"
    )
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        script.make_assets(sources, out, "3.11.2")
    first, second = ({p.relative_to(o): p.read_bytes() for p in o.rglob("*") if p.is_file()} for o in outs)
    assert first == second
    shipped = {p.relative_to(ASSETS) for f in ("pydocs", "tokenizer") for p in (ASSETS / f).iterdir()}
    assert set(first) == shipped | {Path("README.md")}
    corpus = first[Path("pydocs/train.jsonl")].decode()
    assert all(set(json.loads(line)) == {"text"} for line in corpus.splitlines())
    assert "someone@example.org" not in corpus
    assert "for 3.11.2" in first[Path("pydocs/LICENSE")].decode()


def test_the_script_refuses_a_folder_that_is_not_the_documentation(script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="has no faq, howto, library, reference, tutorial, license.rst.txt"):
        script.make_assets(tmp_path, tmp_path / "out", "3.11.2")


def test_the_tokenizer_module_imports_neither_torch_nor_a_tokenizer_library() -> None:
    code = "import sys, torchtitan.data.tokenizer; print([m for m in sys.argv[1:] if m in sys.modules])"
    command = [sys.executable, "-c", code, "torch", "tokenizers", "tiktoken", "sentencepiece"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"
