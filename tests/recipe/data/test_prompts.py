"""Prompts become the same ids here and in transformers, and an exported tokenizer does what training did."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipe.data.small_tokenizers import (
    SHIPPED,
    read_documents,
    shipped_json,
    train_sentencepiece,
    write_huggingface,
)
from tests.recipe.data.small_tokenizers import tiktoken_file as tiktoken_file
from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.data.cursor import Order, Source
from torchtitan.data.stream import Stream
from torchtitan.data.texts.sources import open_source
from torchtitan.data.tokenizers.models import TIKTOKEN_SPECIAL_TOKENS
from torchtitan.data.tokenizers.prompts import follow_training
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.weights.stored import open_model

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
NAMED = {"bos_token": BOS, "eos_token": EOS}
TEXTS = ("", "The module", "two\n\n  lines, naïve 日本語 👩‍🚀", "trailing ", "1234567 don't")
CHAT = f"{EOS}user{BOS} hello<start>{EOS}"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(first: bool = True, last: bool = False) -> dict[str, Any]:
    def control(token: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*([control(BOS)] if first else []), text, *([control(EOS)] if last else [])]
    special = {token: {"id": token, "ids": [number], "tokens": [token]} for number, token in enumerate((BOS, EOS))}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, text], "special_tokens": special}


def llama2(folder: Path) -> None:
    """A BPE of SentencePiece's kind: ▁ for a space, one more before a text, bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", "<s>", "</s>", *bytes_], max_token_length=8, show_progress=False
    )
    lines = [line for text in read_documents("validation.jsonl")[:8] for line in text.splitlines()]
    tokenizer.train_from_iterator([line.replace(" ", " ▁")[:40] for line in lines], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def hugging_face(config: dict[str, Any] | None, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: void(write_huggingface(folder, config, **changes))


def void(_: Any) -> None: ...


def gpt2(folder: Path) -> None:
    """One token both begins and ends a text; the post-processor adds neither."""
    config = {"bos_token": EOS, "eos_token": EOS, "add_bos_token": False, "tokenizer_class": "GPT2Tokenizer"}
    write_huggingface(folder, config, post_processor=BYTE_LEVEL)


def unlisted_bos(folder: Path) -> None:
    """A token that only tokenizer_config.json makes a control token."""
    model = shipped_json()["model"]
    model["vocab"]["<start>"] = len(model["vocab"])
    write_huggingface(folder, {"bos_token": "<start>", "eos_token": EOS}, model=model)


LLAMA3 = {"type": "Sequence", "processors": [BYTE_LEVEL, template()]}
QWEN = {"bos_token": None, "eos_token": EOS, "add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
FOLDERS: dict[str, Callable[[Path], None]] = {
    "no config": hugging_face(None),
    "nothing said": hugging_face(NAMED),
    "add_bos_token": hugging_face(NAMED | {"add_bos_token": True}),
    "add_bos_token false": hugging_face(NAMED | {"add_bos_token": False}),
    "template": hugging_face(NAMED, post_processor=template()),
    "template, no config": hugging_face(None, post_processor=template()),
    "template, add_bos_token": hugging_face(NAMED | {"add_bos_token": True}, post_processor=template()),
    "template, add_bos_token false": hugging_face(NAMED | {"add_bos_token": False}, post_processor=template()),
    "template with eos": hugging_face(NAMED | {"add_eos_token": True}, post_processor=template(last=True)),
    "template with eos alone": hugging_face(QWEN, post_processor=template(first=False, last=True)),
    "llama 3": hugging_face(NAMED | {"tokenizer_class": "PreTrainedTokenizerFast"}, post_processor=LLAMA3),
    "llama 2": llama2,
    "gpt2": gpt2,
    "qwen": hugging_face(QWEN, post_processor=BYTE_LEVEL),
    "control tokens as text": hugging_face(NAMED | {"split_special_tokens": True}, post_processor=template()),
    "bos outside added_tokens": unlisted_bos,
}
ALREADY = ("template", "template, no config", "template, add_bos_token", "llama 3", "llama 2", "qwen",
           "control tokens as text")  # fmt: skip


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer"
    path.mkdir()
    FOLDERS[request.param](path)
    return path


def theirs(folder: Path, text: str) -> list[int]:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    return ids


def beginning_in_training(folder: Path, text: str, scratch: Path) -> list[int]:
    """A document as a stream gives it, without the EOS at its end."""
    (scratch / "document.jsonl").write_text(json.dumps({"text": text}))
    tokenizer = build_tokenizer(folder)
    source = Source("a test", open_source("x", str(scratch / "document.jsonl"), "text", tokenizer))
    document = Stream([source], tokenizer, Order(num_streams=1, seed=0, shuffle=False), 0).next()
    assert document is not None
    *ids, eos = document[0].tolist()
    assert eos == tokenizer.eos_id
    return ids


def test_a_prompt_becomes_the_ids_that_transformers_gives_for_the_folder(folder: Path) -> None:
    tokenizer = build_tokenizer(folder)
    for text in (*TEXTS, CHAT):
        assert tokenizer.encode_prompt(text) == theirs(folder, text), text


def test_an_exported_tokenizer_begins_a_text_as_training_did(folder: Path, tmp_path: Path) -> None:
    before = build_tokenizer(folder)
    trained = {text: beginning_in_training(folder, text, tmp_path) for text in TEXTS}
    follow_training(folder)
    exported = build_tokenizer(folder)
    assert (exported.bos_id, exported.eos_id) == (before.bos_id, before.eos_id)
    for text in (*TEXTS, CHAT):
        prompt = before.encode_prompt(text, as_trained=True)
        assert prompt == exported.encode_prompt(text) == theirs(folder, text), text
        assert text == CHAT or prompt == trained[text]


def test_an_exported_tokenizer_splits_text_as_in_training_whatever_the_model_type(tmp_path: Path) -> None:
    write_huggingface(tmp_path)
    follow_training(tmp_path)
    expected = build_tokenizer(SHIPPED).encode(TEXTS[-1], bos=True, eos=False)
    for model_type in ("llama", "qwen3", "gpt2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert theirs(tmp_path, TEXTS[-1]) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_only_a_folder_that_does_not_follow_training_is_changed(name: str, tmp_path: Path) -> None:
    FOLDERS[name](tmp_path)

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    before = contents()
    follow_training(tmp_path)
    after = contents()
    assert (after == before) == (name in ALREADY)
    follow_training(tmp_path)
    assert contents() == after
    old, new = (json.loads(files["tokenizer.json"]) | {"post_processor": None} for files in (before, after))
    assert old == new


def test_a_bare_tokenizer_model_begins_prompts_with_bos_unless_its_config_says_not(
    tiktoken_file: Path, tmp_path: Path
) -> None:
    pieces = train_sentencepiece(tmp_path / "sentencepiece.model")
    for number, file in enumerate((tiktoken_file, pieces)):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(file, folder / "tokenizer.model")
        plain = build_tokenizer(folder).encode("The module", bos=False, eos=False)
        bos, eos = build_tokenizer(folder).bos_id, build_tokenizer(folder).eos_id
        assert build_tokenizer(folder).encode_prompt("The module") == [bos, *plain]
        (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
        assert build_tokenizer(folder).encode_prompt("The module") == [*plain, eos]
        assert build_tokenizer(folder).encode_prompt("The module", as_trained=True) == [bos, *plain]


def test_control_tokens_in_a_prompt_are_control_tokens_in_a_tiktoken_file(tiktoken_file: Path) -> None:
    tokenizer = build_tokenizer(tiktoken_file)
    header = tokenizer.vocab_size - len(TIKTOKEN_SPECIAL_TOKENS) + TIKTOKEN_SPECIAL_TOKENS.index("<|start_header_id|>")
    assert tokenizer.encode_prompt("<|start_header_id|>user")[:2] == [tokenizer.bos_id, header]


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
def test_an_exported_tokenizer_model_begins_a_text_as_training_did(
    kind: str, tiktoken_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    if kind == "tiktoken":
        shutil.copy(tiktoken_file, folder / "tokenizer.model")
    else:
        train_sentencepiece(folder / "tokenizer.model")
    texts = (*TEXTS, "a<|eot_id|>b" if kind == "tiktoken" else "a b")
    trained = {text: beginning_in_training(folder, text, tmp_path) for text in TEXTS}
    follow_training(folder)
    written = (folder / "tokenizer_config.json").read_bytes()
    for text in texts:
        prompt = build_tokenizer(folder).encode_prompt(text)
        assert prompt == theirs(folder, text), text
        assert prompt == trained.get(text, prompt)
    follow_training(folder)
    assert (folder / "tokenizer_config.json").read_bytes() == written


def test_a_trained_model_takes_its_prompts_to_transformers_and_an_imported_one_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    run = tmp_path / "run"
    keys: dict[str, Any] = {"training__steps": 1, "checkpoint__enable": True, "checkpoint__last_save_model_only": True}
    train_here(tiny_config(run, **keys, checkpoint__last_save_in_hf=True))
    main(["convert", str(run), str(tmp_path / "hf")])
    main(["convert", str(run), str(tmp_path / "moved"), "--to", "torchtitan"])
    shipped = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    expected = build_tokenizer(SHIPPED).encode("The module", bos=True, eos=False)
    assert open_model(str(run)).trained_here
    for folder in (tmp_path / "hf", run / "hf", tmp_path / "moved/tokenizer"):
        assert build_tokenizer(folder).encode_prompt("The module") == expected
        assert theirs(folder, "The module") == expected
    (tmp_path / "hf/tokenizer.json").write_bytes(shipped["tokenizer.json"])
    (tmp_path / "hf/tokenizer_config.json").write_bytes(shipped["tokenizer_config.json"])
    main(["convert", str(tmp_path / "hf"), str(tmp_path / "imported")])
    main(["convert", str(tmp_path / "imported"), str(tmp_path / "back")])
    assert not open_model(str(tmp_path / "imported")).trained_here
    assert {name: (tmp_path / "back" / name).read_bytes() for name in shipped} == shipped
