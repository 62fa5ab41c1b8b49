"""What is peculiar to each kind of tokenizer file, against the kind's own library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe.data.small_tokenizers import (
    SHIPPED,
    UNUSUAL_TEXTS,
    byte_level_tokens,
    read_documents,
    shipped_json,
    train_sentencepiece,
    write_huggingface,
)
from tests.recipe.data.small_tokenizers import sentencepiece_file as sentencepiece_file
from tests.recipe.data.small_tokenizers import tiktoken_file as tiktoken_file
from torchtitan.data.tokenizers.models import TIKTOKEN_PATTERN, TIKTOKEN_SPECIAL_TOKENS
from torchtitan.data.tokenizers.tokenizer import build_tokenizer

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
    assert len(set(TIKTOKEN_SPECIAL_TOKENS)) == 256
    # Llama 3.1's ids less its 128,000 ranks
    places = {"<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6, "<|end_header_id|>": 7, "<|eom_id|>": 8}
    places |= {"<|eot_id|>": 9, "<|python_tag|>": 10, "<|reserved_special_token_247|>": 255}
    assert {token: TIKTOKEN_SPECIAL_TOKENS.index(token) for token in places} == places


def test_a_tiktoken_file_and_its_hugging_face_conversion_give_the_same_ids(tiktoken_file: Path, tmp_path: Path) -> None:
    model = shipped_json()["model"]
    model["vocab"] = {token: rank - 2 for token, rank in model["vocab"].items() if rank >= 2} | {
        token: len(model["vocab"]) - 2 + i for i, token in enumerate(TIKTOKEN_SPECIAL_TOKENS[:2])
    }
    added = [token | {"id": model["vocab"][token["content"]]} for token in shipped_json()["added_tokens"]]
    split = {"type": "Split", "pattern": {"Regex": TIKTOKEN_PATTERN}, "behavior": "Isolated", "invert": False}
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
