"""Prepared tokens, against the text they were made from; and a preparation that was stopped."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_corpus import ByteTokenizer, make_texts, write_jsonl

from torchtitan.config.schema import DataSource
from torchtitan.data import prepare as prepare_module
from torchtitan.data.loader import build_loader
from torchtitan.data.prepare import add_arguments, plan_chunks, prepare, read_chunk, run
from torchtitan.data.prepared import PreparedTokens, fingerprint, token_dtype
from torchtitan.data.sources import locate_text
from torchtitan.data.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = str(ROOT / "tests" / "assets" / "tokenizer")
TEXTS = make_texts(3000)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TOKENIZER)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Text in two files, and the folder that `python -m torchtitan prepare` makes of them with two workers."""
    folder = tmp_path_factory.mktemp("prepared")
    write_jsonl(folder / "a.jsonl", TEXTS[:1000])
    write_jsonl(folder / "b.jsonl", TEXTS[1000:])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text, out = str(folder / "*.jsonl"), str(folder / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "CHUNK_BYTES", 20_000)
        options = ["--dataset_path", text, "--tokenizer", TOKENIZER, "--out", out, "--workers", "2"]
        assert run(parser.parse_args(options)) == 0
    return text, Path(out)


def batches(path, tokenizer):
    source = DataSource(dataset="x", dataset_path=str(path))
    loader = build_loader(
        [source], tokenizer, seq_len=64, global_batch_size=8, num_streams=8, dp_rank=0, dp_size=1, seed=3, epochs=2,
        shuffle=True, block_causal=True, agree=lambda ready: ready,
    )  # fmt: skip
    while (batch := loader.next()) is not None:
        yield batch


def test_prepared_tokens_and_raw_text_give_identical_batches(prepared, tokenizer):
    text, out = prepared
    pairs = list(zip(batches(text, tokenizer), batches(out, tokenizer), strict=True))
    assert len(pairs) > 50
    for raw, ready in pairs:
        assert (raw.inputs == ready.inputs).all() and (raw.labels == ready.labels).all()
        assert (raw.document_ids == ready.document_ids).all()
    assert f"{out} document " in pairs[0][1].origin.describe()


def test_documents_keep_their_order_and_nothing_but_the_result_remains(prepared, tokenizer):
    _, out = prepared
    source = PreparedTokens(out, tokenizer)
    assert [tokenizer.decode(source.tokens(i)) for i in range(len(source))] == TEXTS
    assert sorted(path.name for path in out.iterdir()) == ["documents.bin", "meta.json", "plan.json", "tokens.bin"]
    assert source.meta.num_tokens * 2 == (out / "tokens.bin").stat().st_size and source.meta.dtype == "<u2"


def test_a_finished_preparation_is_not_done_again_and_other_text_is_refused(prepared, tmp_path):
    text, out = prepared
    before = (out / "meta.json").stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "CHUNK_BYTES", 20_000)
        prepare("x", text, TOKENIZER, str(out))
    assert (out / "meta.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="begun from other text, text_key or tokenizer"):
        prepare("x", text, TOKENIZER, str(out), text_key="body")
    (tmp_path / "mine").write_text("something else")
    with pytest.raises(ValueError, match="exists and holds something else; give a new folder"):
        prepare("x", text, TOKENIZER, str(tmp_path))
    with pytest.raises(ValueError, match="is prepared already; give dataset_path the text"):
        prepare("x", str(out), TOKENIZER, str(tmp_path / "again"))


def test_a_killed_preparation_is_refused_goes_on_and_ends_the_same(prepared, tokenizer, tmp_path, monkeypatch):
    text, reference = prepared
    out = tmp_path / "out"
    program = (
        "from torchtitan.data import prepare\n"
        "if __name__ == '__main__':\n"
        "    prepare.CHUNK_BYTES = 20_000\n"
        f"    prepare.prepare('x', {text!r}, {TOKENIZER!r}, {str(out)!r}, workers=1)\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, tmp_path / "program.py"], env=environment)
    deadline = time.time() + 30
    while not list(out.glob("*.lengths")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    process.kill()
    process.wait()
    time.sleep(0.3)
    left = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    time.sleep(0.3)
    assert left == {path: path.stat().st_mtime_ns for path in out.iterdir()}, "a worker outlived its parent"
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.lengths")}
    assert finished and not (out / "meta.json").is_file()
    with pytest.raises(ValueError, match=r"prepared only in part \(meta.json is missing\)"):
        PreparedTokens(out, tokenizer)

    # One chunk cut short, as by a full disk: it alone is made again.
    cut = sorted(finished)[0].with_suffix(".tokens")
    cut.write_bytes(cut.read_bytes()[:-2])
    seen = []
    monkeypatch.setattr(prepare_module, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(prepare_module, "_join", lambda *args: seen.append(True))
    with pytest.raises(ValueError, match="only in part"):
        prepare("x", text, TOKENIZER, str(out), workers=1)
    redone = [path for path, mtime in finished.items() if path.stat().st_mtime_ns != mtime]
    assert seen and redone == [cut.with_suffix(".lengths")]
    monkeypatch.undo()

    # Stopped once more, while the chunks are being joined.
    monkeypatch.setattr(prepare_module, "CHUNK_BYTES", 20_000)
    copy, copied = prepare_module.shutil.copyfileobj, []

    def copy_some(source, target, length):
        if len(copied) == 2:
            target.write(source.read(10))
            target.flush()
            raise KeyboardInterrupt
        copied.append(True)
        copy(source, target, length)

    monkeypatch.setattr(prepare_module.shutil, "copyfileobj", copy_some)
    with pytest.raises(KeyboardInterrupt):
        prepare("x", text, TOKENIZER, str(out))
    monkeypatch.setattr(prepare_module.shutil, "copyfileobj", copy)
    prepare("x", text, TOKENIZER, str(out))
    for name in ("tokens.bin", "documents.bin", "meta.json"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()


def test_a_bad_line_stops_the_preparation_and_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    write_jsonl(path, ["fine"] * 5)
    with path.open("a") as file:
        file.write("{oops\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:6: not JSON"):
        prepare("x", str(path), TOKENIZER, str(tmp_path / "out"), workers=1)


@pytest.mark.parametrize("chunk_bytes", [1, 17, 100, 10**6])
def test_chunks_of_any_size_hold_every_line_once_in_order(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(prepare_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(prepare_module, "MAX_CHUNKS", 10**6)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:9]) + "\n\n  \n")
    (tmp_path / "b.jsonl").write_text("\n" + "\n".join(json.dumps({"text": text}) for text in TEXTS[9:20]))
    assert read_all(str(tmp_path / "*.jsonl"), tmp_path) == TEXTS[:20]


def read_all(path, tmp_path):
    location = locate_text("x", path)
    job = prepare_module.Job(location, "text", TOKENIZER, tmp_path / "out", "<u2")
    opened = None if location.kind == "jsonl" else prepare_module.open_texts(location, "text")
    return [text for chunk in plan_chunks(location, "text") for text in read_chunk(job, chunk, opened)]


def test_other_kinds_of_text_are_read_in_order_too(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(prepare_module, "CHUNK_DOCUMENTS", 7)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:50]}), tmp_path / "a.parquet", row_group_size=9)
    assert read_all(str(tmp_path / "a.parquet"), tmp_path) == TEXTS[:50]
    (tmp_path / "files").mkdir()
    for number in range(20):
        (tmp_path / "files" / f"{number:02d}.txt").write_text(TEXTS[number])
    assert read_all(str(tmp_path / "files"), tmp_path) == TEXTS[:20]


def test_text_without_a_document_is_refused(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="blank.jsonl holds no document"):
        prepare("x", str(tmp_path / "blank.jsonl"), TOKENIZER, str(tmp_path / "out"), workers=1)


def test_another_tokenizer_is_refused(prepared):
    with pytest.raises(ValueError, match="was prepared with another tokenizer .* here 258"):
        PreparedTokens(prepared[1], ByteTokenizer())


def test_the_fingerprint_is_of_what_a_tokenizer_does():
    class Other(ByteTokenizer):
        eos_id = 256

    assert fingerprint(ByteTokenizer()) == fingerprint(ByteTokenizer()) != fingerprint(Other())


def test_damaged_or_newer_folders_are_refused(prepared, tokenizer, tmp_path):
    for path in prepared[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens\.bin has [\d,]+ bytes, expected [\d,]+; the copy is damaged"):
        PreparedTokens(tmp_path, tokenizer)
    (tmp_path / "documents.bin").unlink()
    with pytest.raises(ValueError, match=r"documents\.bin is missing"):
        PreparedTokens(tmp_path, tokenizer)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "format_version": 2}))
    with pytest.raises(ValueError, match="format 2, and this version reads 1"):
        PreparedTokens(tmp_path, tokenizer)


def test_the_smallest_type_that_holds_the_vocabulary_is_used():
    assert [token_dtype(size) for size in (2048, 65_536, 65_537, 128_256)] == ["<u2", "<u2", "<u4", "<u4"]
    assert np.dtype(token_dtype(65_536)).type(65_535) == 65_535


def test_preparing_imports_no_torch():
    code = "import sys, torchtitan.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
