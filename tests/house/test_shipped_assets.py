"""The tokenizer and the corpus that ship with the repository, and the script that made them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.recipe.data.small_tokenizers import ASSETS, ROOT, SHIPPED, read_documents, shipped_json
from torchtitan.data.tokenizers.tokenizer import build_tokenizer


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
