"""Prepared tokens, against the text they were made from; and a preparation that was stopped."""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipe.data.small_corpus import loader_of, make_texts, write_jsonl
from torchtitan.config.schema import DataSource
from torchtitan.data.prepared import chunks
from torchtitan.data.prepared import prepare as prepare_module
from torchtitan.data.prepared.chunks import Preparation, plan_chunks, read_chunk
from torchtitan.data.prepared.prepare import add_arguments, prepare, run
from torchtitan.data.prepared.tokens import PreparedTokens
from torchtitan.data.texts.sources import locate_text, open_texts
from torchtitan.data.tokenizers.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[3]
TOKENIZER = str(ROOT / "tests" / "assets" / "tokenizer")
TEXTS = make_texts(3000)
FILES = ["checksums.bin", "documents.bin", "meta.json", "plan.json", "tokens.bin"]


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
        patch.setattr(chunks, "CHUNK_BYTES", 20_000)
        options = ["--dataset_path", text, "--tokenizer", TOKENIZER, "--out", out, "--workers", "2"]
        run(parser.parse_args(options), [])
    return text, Path(out)


def batches(path, tokenizer):
    source = DataSource(dataset="x", dataset_path=str(path))
    loader = loader_of(
        [source], tokenizer, seq_len=64, global_batch_size=8, num_streams=8, seed=3, epochs=2, shuffle=True,
        block_causal=True,
    )  # fmt: skip
    while (batch := loader.next()) is not None:
        yield batch


def test_prepared_tokens_and_raw_text_give_identical_batches(prepared, tokenizer):
    text, out = prepared
    pairs = list(zip(batches(text, tokenizer), batches(out, tokenizer), strict=True))
    assert len(pairs) > 50
    for raw, ready in pairs:
        assert (raw.inputs == ready.inputs).all() and (raw.labels == ready.labels).all()
        assert (raw.documents == ready.documents).all()
    assert f"{out} document " in pairs[0][1].origin.describe()


def test_documents_keep_their_order_and_nothing_but_the_result_remains(prepared, tokenizer):
    _, out = prepared
    source = PreparedTokens(out, tokenizer)
    assert [tokenizer.decode(source.tokens(i)) for i in range(len(source))] == TEXTS
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert source.meta.num_tokens * 2 == (out / "tokens.bin").stat().st_size and source.meta.dtype == "<u2"


def test_a_finished_preparation_is_not_done_again_and_other_text_is_refused(prepared, tmp_path):
    text, out = prepared
    before = (out / "meta.json").stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 20_000)
        prepare("x", text, TOKENIZER, str(out))
    assert (out / "meta.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="begun with another text, text_key or tokenizer"):
        prepare("x", text, TOKENIZER, str(out), text_key="body")
    (tmp_path / "mine").write_text("something else")
    with pytest.raises(ValueError, match="exists and has files that `prepare` did not write; give a new folder"):
        prepare("x", text, TOKENIZER, str(tmp_path))
    with pytest.raises(ValueError, match="is already prepared; set dataset_path to the text"):
        prepare("x", str(out), TOKENIZER, str(tmp_path / "again"))


def test_a_killed_preparation_is_refused_goes_on_and_ends_the_same(prepared, tokenizer, tmp_path, monkeypatch):
    text, reference = prepared
    out = tmp_path / "out"
    program = (
        "from torchtitan.data.prepared import chunks, prepare\n"
        "if __name__ == '__main__':\n"
        "    chunks.CHUNK_BYTES = 20_000\n"
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
    with pytest.raises(ValueError, match=r"only partly prepared \(meta.json is missing\)"):
        PreparedTokens(out, tokenizer)

    # One chunk cut short, as by a full disk: it alone is made again.
    cut = sorted(finished)[0].with_suffix(".tokens")
    cut.write_bytes(cut.read_bytes()[:-2])
    seen = []
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(prepare_module, "_join", lambda *args: seen.append(True))
    with pytest.raises(ValueError, match="only partly prepared"):
        prepare("x", text, TOKENIZER, str(out), workers=1)
    redone = [path for path, mtime in finished.items() if path.stat().st_mtime_ns != mtime]
    assert seen and redone == [cut.with_suffix(".lengths")]
    monkeypatch.undo()

    # Stopped once more, while the chunks are being joined.
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 20_000)
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


def test_a_second_preparation_of_the_same_folder_is_refused_until_the_first_ends(prepared, tmp_path):
    text, reference = prepared
    out = tmp_path / "out"
    out.mkdir()
    with (out / prepare_module.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="out: another `prepare` is writing there; wait for it, stop it"):
            prepare("x", text, TOKENIZER, str(out))
    prepare("x", text, TOKENIZER, str(out), workers=1)  # a lock file alone, as a killed one leaves it
    assert (out / "tokens.bin").read_bytes() == (reference / "tokens.bin").read_bytes()
    (out / "chunk-00000.lengths").touch()  # killed after the last file was written
    prepare("x", text, TOKENIZER, str(out), workers=1)
    assert sorted(path.name for path in out.iterdir()) == FILES
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/out cannot be written: Not a directory; give another folder"):
        prepare("x", text, TOKENIZER, str(tmp_path / "file" / "out"))


def test_a_chunk_that_was_changed_is_never_joined(prepared, tmp_path, monkeypatch):
    tokenize = prepare_module._tokenize

    def tokenize_and_cut(*args):
        tokenize(*args)
        (tmp_path / "out" / "chunk-00000.tokens").write_bytes(b"\0\0")

    monkeypatch.setattr(prepare_module, "_tokenize", tokenize_and_cut)
    with pytest.raises(AssertionError, match=r"chunk-00000\.tokens was changed by something else"):
        prepare("x", prepared[0], TOKENIZER, str(tmp_path / "out"), workers=1)


def test_ctrl_c_stops_without_a_traceback_and_the_same_command_goes_on(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [text * 100 for text in TEXTS])
    program = (
        "import sys\nfrom torchtitan.data.prepared import chunks\nfrom torchtitan.__main__ import main\n"
        "if __name__ == '__main__':\n    chunks.CHUNK_BYTES = 200_000\n    main(sys.argv[1:])\n"
    )
    (tmp_path / "program.py").write_text(program)
    out = tmp_path / "out"
    options = ["--dataset_path", path, "--tokenizer", TOKENIZER, "--out", str(out), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), "prepare", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.time() + 30
    while not list(out.glob("*.lengths")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to the workers too
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == "stopped; run the same command again to resume\n"
    assert list(out.glob("*.lengths")) and not (out / "meta.json").exists()


def test_what_cannot_be_asked_of_a_preparation_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3])
    with pytest.raises(ValueError, match="--workers 0 is less than one process; give 1 or more"):
        prepare("x", path, TOKENIZER, str(tmp_path.parent / "out"), workers=0)
    with pytest.raises(ValueError, match="tokens is inside dataset_path = .*; give a folder outside it"):
        prepare("x", str(tmp_path), TOKENIZER, str(tmp_path / "tokens"))


def test_a_few_hundred_documents_are_a_chunk_and_a_saved_dataset_that_changed_is_refused(tmp_path):
    import datasets

    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder))
    assert len(plan_chunks(locate_text("x", str(folder)), "text")) == -(-len(TEXTS) // 256)
    prepare("x", str(folder), TOKENIZER, str(tmp_path / "out"), workers=1)
    datasets.Dataset.from_dict({"text": TEXTS[::-1]}).save_to_disk(str(folder))
    with pytest.raises(ValueError, match=r"begun with another text.*, or a file has changed since"):
        prepare("x", str(folder), TOKENIZER, str(tmp_path / "out"), workers=1)


def test_a_bad_line_stops_the_preparation_and_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    write_jsonl(path, ["fine"] * 5)
    with path.open("a") as file:
        file.write("{oops\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:6: not JSON"):
        prepare("x", str(path), TOKENIZER, str(tmp_path / "out"), workers=1)


@pytest.mark.parametrize("chunk_bytes", [1, 17, 100, 10**6])
def test_chunks_of_any_size_hold_every_line_once_in_order(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(chunks, "MAX_CHUNKS", 10**6)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:9]) + "\n\n  \n")
    (tmp_path / "b.jsonl").write_text("\n" + "\n".join(json.dumps({"text": text}) for text in TEXTS[9:20]))
    assert read_all(str(tmp_path / "*.jsonl"), tmp_path) == TEXTS[:20]


def read_all(path, tmp_path):
    location = locate_text("x", path)
    job = Preparation(location, "text", TOKENIZER, tmp_path / "out", "<u2")
    opened = None if location.kind == "jsonl" else open_texts(location, "text")
    return [text for chunk in plan_chunks(location, "text") for text in read_chunk(job, chunk, opened)]


def test_other_kinds_of_text_are_read_in_order_too(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(chunks, "BATCH_DOCUMENTS", 7)
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


def test_preparing_imports_no_torch():
    code = "import sys, torchtitan.data.prepared.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
