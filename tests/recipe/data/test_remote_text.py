"""Text behind a URL: the same documents as on a disk, through failures of the network, and clear refusals."""

import gzip
import json
import logging
import os
import pickle
import subprocess
import sys

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.recipe.data.small_corpus import ByteTokenizer, equal, make_texts, small_loader, take
from tests.recipe.tools.hub_stand_in import Hub, Repository
from torchtitan.data.texts import remote
from torchtitan.data.texts.remote import RemoteFile
from torchtitan.data.texts.sources import locate_text, open_source, open_texts
from torchtitan.refusal import Refusal
from torchtitan.tools.text.tokenizer import all_texts

TEXTS = make_texts(60)
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(remote, "_WAITS", (0, 0, 0))
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/", recursive=True)


def read(url, text_key="text"):
    return list(all_texts(open_texts(locate_text("", url), text_key)))


def test_each_kind_of_file_gives_the_texts_of_the_disk(bucket, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "book.txt").write_text("\n\n".join(TEXTS))
    for file in tmp_path.iterdir():
        bucket.pipe(f"/b/{file.name}", file.read_bytes())
        assert read(f"memory://b/{file.name}") == read(str(file)), file.name


def test_a_folder_and_a_glob_leave_out_what_is_hidden_or_empty(bucket):
    for name in ("1.jsonl", "part/2.jsonl", ".git/3.jsonl", "_SUCCESS/4.jsonl"):
        bucket.pipe(f"/b/{name}", LINES)
    bucket.pipe("/b/_SUCCESS/5", b"")
    assert [str(file) for file in locate_text("", "memory://b").files] == [
        "memory:///b/1.jsonl",
        "memory:///b/part/2.jsonl",
    ]
    assert [file.name for file in locate_text("", "memory://b/*.jsonl").files] == ["1.jsonl"]


def test_a_run_on_a_url_is_resumed_at_its_place(bucket):
    for number in range(3):
        bucket.pipe(f"/b/{number}.jsonl", LINES)
    whole = take(small_loader("memory://b", epochs=-1), 20)
    before = small_loader("memory://b", epochs=-1)
    take(before, 8)
    after = small_loader("memory://b", epochs=-1)
    after.load_state_dict(before.state_dict())
    assert equal(take(after, 12), whole[8:])


def test_changed_text_is_other_text(bucket):
    def identity():
        return open_source("x", "memory://b/a.jsonl", "text", ByteTokenizer()).identity

    bucket.pipe("/b/a.jsonl", LINES)
    before = identity()
    assert identity() == before
    bucket.pipe("/b/a.jsonl", LINES.swapcase())
    assert identity() != before


def test_a_dataset_on_the_hub_is_read_by_its_url(tmp_path):
    """In a process of its own, because huggingface_hub reads its settings when it is imported."""
    hub = Hub()
    hub.repositories["datasets/owner/texts"] = Repository({"a.jsonl": LINES, "README.md": b"# Texts"})
    script = (
        "from torchtitan.data.texts.sources import locate_text, open_texts\n"
        "from torchtitan.tools.text.tokenizer import all_texts\n"
        "print(len(list(all_texts(open_texts(locate_text('', 'hf://datasets/owner/texts/*.jsonl'), 'text')))))"
    )
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_member"}
    try:
        run = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | settings, capture_output=True, text=True, timeout=60
        )
    finally:
        hub.close()
    assert run.stdout.strip() == "60", run.stderr
    assert hub.fetched == ["a.jsonl"]


def test_a_request_that_fails_is_made_again(bucket, monkeypatch, caplog):
    bucket.pipe("/b/a.jsonl", LINES)
    failures = [ConnectionError("reset by peer"), b"short"]
    answer = type(bucket).cat_file

    def cat_file(self, path, start=None, end=None, **options):
        if not failures:
            return answer(self, path, start, end, **options)
        failure = failures.pop()
        if isinstance(failure, bytes):
            return failure
        raise failure

    monkeypatch.setattr(type(bucket), "cat_file", cat_file)
    with caplog.at_level(logging.WARNING):
        assert read("memory://b/a.jsonl") == TEXTS
    assert "reset by peer; again in 0 s" in caplog.text and "5 bytes came where" in caplog.text
    failures += [ConnectionError("reset by peer")] * 9
    with pytest.raises(Refusal, match="a.jsonl cannot be read: .*reset by peer; resume from the last checkpoint"):
        read("memory://b/a.jsonl")


def test_a_file_goes_to_a_worker_and_reads_any_range(bucket):
    data = np.random.default_rng(0).bytes(3 << 20)
    bucket.pipe("/b/a.bin", data)
    file = pickle.loads(pickle.dumps(RemoteFile("memory://b/a.bin", len(data), "1")))
    with file.open("rb") as opened:
        for at, size in ((0, 5), (2 << 20, 1 << 20), (7, 1 << 21), (len(data) - 3, 10), (len(data), 1)):
            opened.seek(at)
            assert opened.read(size) == data[at : at + size]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://b/none.jsonl", "FileNotFoundError.*correct dataset_path"),
        ("memory://b/*.parquet", "no file there has text in it"),
        ("memory://b/empty", "no file there has text in it"),
        ("memory://b/mixed", "mixes kinds of files"),
        ("memory://b/prepared", "mapped into memory; copy the folder to a disk"),
        ("memory://b/image.png", "unknown kind: memory:///b/image.png"),
        ("nonsense://b/a.jsonl", "install its package"),
        ("gs://b/a.jsonl", "install its package .* gs:// needs gcsfs"),
    ],
)
def test_what_cannot_be_read_is_refused_at_the_start(bucket, url, says):
    bucket.pipe("/b/empty/a.jsonl", b"")
    bucket.pipe("/b/mixed/a.jsonl", LINES)
    bucket.pipe("/b/mixed/a.txt", b"text")
    bucket.pipe("/b/prepared/tokens.bin", b"0000")
    bucket.pipe("/b/image.png", b"\x89PNG")
    with pytest.raises(Refusal, match=says):
        locate_text("", url)
