"""`tokenizer train`: a tokenizer of one's own, which the recipe reads."""

from pathlib import Path

import pytest

from tests.recipe.data.small_corpus import make_texts, write_jsonl
from torchtitan.__main__ import main
from torchtitan.data.tokenizers.tokenizer import build_tokenizer


def test_a_trained_tokenizer_is_read_and_gives_every_text_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [f"def f{i}(x): return x ** {i}  # naïve" for i in range(300)])
    words = ["tokenizer", "train", "--data", data, "--vocab_size", "300", "--out", str(tmp_path / "mine")]
    main(words)
    said = capsys.readouterr().out
    assert "on 15 held-out documents" in said and said.count("tests/assets/tokenizer") == 1
    tokenizer = build_tokenizer(tmp_path / "mine")
    assert tokenizer.vocab_size == 300 and tokenizer.bos_id is not None
    for text in ("def f(x):", "naïve 🙂\n\n\tx", "<|end_of_text|>"):
        ids = tokenizer.encode(text, bos=True, eos=True)
        assert tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_id != ids[-2]
    assert len(tokenizer.encode("def f9(x): return x", bos=False, eos=False)) < 12
    with pytest.raises(SystemExit, match="mine is there already"):
        main(words)
    with pytest.raises(SystemExit, match="--vocab_size 100 is too small; use 258 or more"):
        main([*words[:5], "100", *words[6:]])


def test_a_text_that_gives_fewer_tokens_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    main(["tokenizer", "train", "--data", data, "--vocab_size", "5000", "--out", str(tmp_path / "mine")])
    said = capsys.readouterr().out
    assert "the text gives only" in said and "fewer than 20 documents: none is held out" in said
