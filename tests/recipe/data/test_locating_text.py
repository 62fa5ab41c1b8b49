"""Which text a name or a path leads to, and what is refused: unknown names, mixed kinds, unreadable files."""

import bz2
import gzip
import logging
import lzma
import os
import resource
from pathlib import Path

import pytest
from test_sources import TEXTS, all_texts, open_path, save_dataset, write_parquet

from tests.recipe.data.small_corpus import ByteTokenizer, small_loader, take, write_jsonl
from torchtitan.data.texts import documents, sharded_cursor, sources
from torchtitan.data.texts.sources import locate_text, open_source, open_texts


def test_known_names_are_the_text_that_ships_here(caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    train, validation, c4_test = (locate_text(name, None) for name in ("pydocs", "pydocs_validation", "c4_test"))
    assert train == c4_test and train.files[0].name == "train.jsonl" and validation.files[0].name == "validation.jsonl"
    assert len(open_source("pydocs", None, "text", ByteTokenizer())) >= 64 and not caplog.records
    open_source("c4_test", None, "text", ByteTokenizer())
    assert [record.message for record in caplog.records] == [
        f"dataset c4_test is the small text that ships with this repository ({train.files[0]}), not torchtitan's "
        "excerpt of C4"
    ]


def test_unknown_names_are_refused_with_the_nearest(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"'c4_validaton' is not a name.*did you mean 'c4_validation'\?.*dataset_path"):
        locate_text("c4_validaton", None)
    with pytest.raises(ValueError, match=r"'zzz' is not a name known here; use one of c4, c4_test, .*pydocs"):
        locate_text("zzz", None)
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "mine.jsonl", ["a"])
    with pytest.raises(ValueError, match=r"'mine\.jsonl' is a path; set dataset_path"):
        locate_text("mine.jsonl", None)
    monkeypatch.setattr(sources, "SHIPPED_TEXT", tmp_path)
    with pytest.raises(ValueError, match=r"'pydocs' needs .*, which is missing; run in a clone"):
        locate_text("pydocs", None)


def test_a_kind_is_told_by_content_where_the_name_does_not_say(tmp_path):
    write_jsonl(tmp_path / "lines", TEXTS)
    write_parquet(tmp_path / "columns", TEXTS)
    assert locate_text("x", str(tmp_path / "lines")).kind == "jsonl"
    assert locate_text("x", str(tmp_path / "columns")).kind == "parquet"
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "lines").read_bytes())
    assert locate_text("x", str(tmp_path / "marked")).kind == "jsonl"
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert all_texts(open_path(tmp_path / "marked.txt")) == ["abc"]


def test_folders_and_globs_find_files_and_leave_hidden_ones_out(tmp_path):
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    for name in ("b.jsonl", "deep/a.jsonl", "deep/.git/x.bin", "_SUCCESS"):
        write_jsonl(tmp_path / name, ["t"])
    expected = (tmp_path / "b.jsonl", tmp_path / "deep" / "a.jsonl")
    assert locate_text("x", str(tmp_path)).files == expected
    assert locate_text("x", str(tmp_path / "**" / "*.jsonl")).files == expected


def test_unusable_paths_are_refused(tmp_path):
    def refused(path, message):
        with pytest.raises(ValueError, match=message):
            open_path(path)

    refused(tmp_path / "none*.jsonl", r"none\*\.jsonl': no file matches .*glob")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "emp*", r"matches only folders: .*empty; give one of them, or a glob that matches files")
    refused(tmp_path / "empty", "folder without files; give a folder with JSONL")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    refused(tmp_path / "blank.jsonl", "blank.jsonl holds no document")
    (tmp_path / "empty.jsonl").write_text("")
    refused(tmp_path / "empty.jsonl", "empty.jsonl holds no document")
    (tmp_path / "empty.txt").touch()
    refused(tmp_path / "empty.txt", "empty.txt is empty; give a file with text in it")
    write_parquet(tmp_path / "empty.parquet", [])
    refused(tmp_path / "empty.parquet", "empty.parquet holds no document")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a file nor a folder")

    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write_jsonl(mixed / "a.jsonl", ["t"])
    (mixed / "b.txt").write_text("t")
    refused(mixed, r"mixes kinds of files: jsonl \(.*a\.jsonl\), text \(.*b\.txt\); give a glob")
    for number in range(7):
        (mixed / f"x{number}.bin").write_bytes(b"\0\1")
    refused(mixed, r"of an unknown kind: .*x0\.bin.*and 2 more.*leaves other files out")


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"bad\.txt: cannot be read as UTF-8 text"):
        open_path(tmp_path / "bad.txt").tokens(0)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"bad\.parquet cannot be read as Parquet"):
        open_path(tmp_path / "bad.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz cannot be read: .*incomplete or damaged"):
        open_path(tmp_path / "cut.jsonl.gz").open(0, None).read(2000)
    lines = b"".join(b'{"text": "%d"}\n' % (number * 7919 % 10_007) for number in range(3000))
    for suffix, compress, test in (
        ("gz", gzip.compress, "gzip"),
        ("bz2", bz2.compress, "bzip2"),
        ("xz", lzma.compress, "xz"),
    ):
        for place in range(1, 9):
            data = bytearray(compress(lines))
            data[len(data) * place // 9] ^= 0x5A
            path = tmp_path / f"damaged.jsonl.{suffix}"
            path.write_bytes(data)
            with pytest.raises(ValueError, match=rf"damaged.*: test it with `{test} -t .*`"):
                open_path(path).open(0, None).read(5000)

    write_jsonl(tmp_path / "locked", ["t"])

    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    location = locate_text("x", str(tmp_path / "locked"))
    monkeypatch.setattr(Path, "open", denied)  # whoever runs the tests as root may read everything
    with pytest.raises(ValueError, match="locked cannot be read: Permission denied; correct dataset_path"):
        open_path(tmp_path / "locked")
    with pytest.raises(ValueError, match="locked cannot be read: Permission denied; correct dataset_path"):
        open_texts(location, "text")


def test_many_json_files_are_opened_and_too_many_are_named(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(100):
        write_jsonl(tmp_path / f"{number:03d}.jsonl", TEXTS[:1])
    used = len(os.listdir("/dev/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
        assert len(open_path(tmp_path)) == 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
        monkeypatch.setattr(documents, "allow_open_files", lambda count: None)  # as where the system allows no more
        with pytest.raises(ValueError, match=r"Too many open files; the limit is \d+ \(ulimit -n\); .*fewer, larger"):
            open_path(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_for_each_stream_that_reads_forwards_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_cursor, "SHUFFLE_BLOCK", 1)  # or each would be read whole, and closed
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 200))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, hard))
        batches = take(small_loader(str(tmp_path / "a.jsonl.gz"), global_batch_size=60, seq_len=4), 1)
        assert len(batches) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_damaged_row_groups_and_saved_datasets_are_named(tmp_path):
    import pyarrow

    path = write_parquet(tmp_path / "a.parquet", ["some text " * 50] * 40, rows=20)
    source = open_path(path)
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet row group 0 cannot be read"):
        source.open(0, None).read(1)
    latin1 = write_parquet(tmp_path / "latin1.parquet", pyarrow.array([b"caf\xe9"]).view(pyarrow.string()))
    with pytest.raises(ValueError, match=r"latin1\.parquet row group 0 cannot be read: 'utf-8' codec can't decode"):
        open_path(latin1).open(0, None).read(1)
    folder = save_dataset(tmp_path / "saved", TEXTS)
    (folder / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="datasets cannot load it: .*save it again"):
        open_path(folder)


def test_a_missing_column_and_a_value_that_is_no_text_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no column 'body' \(it has text, id\); set text_key"):
        open_path(write_parquet(tmp_path / "a.parquet", TEXTS), "body")
    with pytest.raises(ValueError, match=r"no column 'body' \(it has text\); set text_key"):
        open_path(save_dataset(tmp_path / "saved", TEXTS), "body")
    numbers = write_parquet(tmp_path / "numbers.parquet", [1, 2, 3])
    with pytest.raises(ValueError, match=r"numbers\.parquet row 0: 'text' holds int"):
        open_path(numbers).open(0, None).read(1)


def test_a_folder_of_several_splits_asks_for_one(tmp_path):
    import datasets

    split = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"several splits; give one: .*both/test, .*both/train"):
        open_path(tmp_path / "both")
    assert all_texts(open_path(tmp_path / "both" / "train")) == TEXTS
