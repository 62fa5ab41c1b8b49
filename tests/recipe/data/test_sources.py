"""Sources: every kind gives the same documents, and what cannot be read is named."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from tests.recipe.data.small_corpus import BOS, EOS, ByteTokenizer, equal, make_texts, small_loader, take, write_jsonl
from torchtitan.data.texts import documents, sharded, sharded_cursor, sharded_kinds
from torchtitan.data.texts.held_out import Part
from torchtitan.data.texts.location import Location
from torchtitan.data.texts.sharded_kinds import HubDataset, ParquetFiles, StreamedJsonLines
from torchtitan.data.texts.sources import locate_text, open_source, open_texts
from torchtitan.refusal import Refusal
from torchtitan.tools.text import tokenizer as tokenizer_verb

TEXTS = make_texts(40)


def open_path(path, text_key="text", dataset="x"):
    return open_source(dataset, str(path), text_key, ByteTokenizer())


def all_texts(source):
    return [bytes(source.tokens(i)[1:-1].astype(np.uint8)).decode() for i in range(len(source))]


def write_parquet(path, texts, column="text", rows=7):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({column: texts, "id": list(range(len(texts)))}), path, row_group_size=rows
    )
    return path


def save_dataset(folder, texts, column="text"):
    import datasets

    datasets.Dataset.from_dict({column: texts}).save_to_disk(str(folder))
    return folder


def write_text_files(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("write", [write_text_files, save_dataset])
def test_every_indexed_kind_gives_the_documents_in_order(tmp_path, write):
    source = open_path(write(tmp_path / "corpus", TEXTS))
    assert all_texts(source) == TEXTS
    assert source.tokens(3)[0] == BOS and source.tokens(3)[-1] == EOS
    assert "corpus" in source.describe(3)


@pytest.mark.parametrize("saved_format", [{"type": "pandas"}, {"type": "numpy", "columns": ["label"]}])
def test_a_saved_dataset_is_read_as_text_whatever_format_it_was_saved_with(tmp_path, saved_format):
    import datasets

    dataset = datasets.Dataset.from_dict({"text": TEXTS, "label": [0] * len(TEXTS)}).with_format(**saved_format)
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert all_texts(open_path(tmp_path / "saved")) == TEXTS


def test_json_lines_of_several_files_follow_each_other_and_blank_lines_count_but_give_nothing(tmp_path):
    lines = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n  \n" + lines[0] + "\r\n\n \t\n" + "\n".join(lines[1:20]))
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines[20:]).encode() + b"\n\n\n")
    source = open_path(tmp_path)
    assert all_texts(source) == TEXTS
    assert source.describe(0) == f"{tmp_path / 'a.jsonl'}:3"
    assert source.describe(1) == f"{tmp_path / 'a.jsonl'}:6"
    assert source.describe(21) == f"{tmp_path / 'c.jsonl'}:2"


def test_an_index_made_in_small_blocks_is_the_same(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, TEXTS)
    whole = documents.index_lines(path.read_bytes())
    monkeypatch.setattr(documents, "INDEX_BLOCK_BYTES", 13)
    assert all(np.array_equal(a, b) for a, b in zip(whole, documents.index_lines(path.read_bytes()), strict=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"corpus\.jsonl:3: not JSON"),
        ("[\"text\"]", r"corpus\.jsonl:3: expected a JSON object with the key 'text', found list"),
        ('{"body": "a"}', r"corpus\.jsonl:3: no key 'text' \(its keys: 'body'\); set text_key"),
        ('{"text": 5}', r"corpus\.jsonl:3: 'text' holds int, not text"),
        ('{"text": "\xff"}', r"corpus\.jsonl:3: not JSON"),
        ("[" * 100_000, r"corpus\.jsonl:3: not JSON"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_by_file_line_and_key(tmp_path, line, message):
    good = b'{"text": "fine"}\n'
    for name, data in (("corpus.jsonl", bytes), ("corpus.jsonl.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(data(good + b"\n" + line.encode("latin-1") + b"\n"))
        with pytest.raises(ValueError, match=message.replace("jsonl:", "jsonl.gz:") if "gz" in name else message):
            if "gz" in name:
                open_path(path).open(0, None).read(5)
            else:
                open_path(path).tokens(1)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_json_lines_are_read_forwards_and_resume_anywhere(tmp_path, suffix, compress):
    path = tmp_path / f"a.json.{suffix}"
    path.write_bytes(compress("\n\n".join(json.dumps({"text": text}) for text in TEXTS).encode()))
    source = open_path(path)
    assert isinstance(source, StreamedJsonLines) and source.num_shards == 1
    check_shards(source)


def check_shards(source):
    """All texts, once, and the same rest from every state."""
    texts = []
    for shard in range(source.num_shards):
        reader = source.open(shard, None)
        while True:
            state = reader.state()
            read = reader.read(3)
            resumed = source.open(shard, json.loads(json.dumps(state)))
            assert resumed.state() == state
            assert resumed.read(3) == read
            if not read:
                break
            texts += read
    assert texts == TEXTS


def test_parquet_row_groups_are_shards(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS[:20])
    write_parquet(tmp_path / "b.parquet", TEXTS[20:])
    source = open_path(tmp_path)
    assert isinstance(source, ParquetFiles) and source.num_shards == 6
    check_shards(source)
    assert source.describe(1, 3) == f"{tmp_path / 'a.parquet'} row 10"


def test_a_parquet_row_group_is_decoded_some_rows_at_a_time(tmp_path):
    import pyarrow

    texts = [f"{number:05d}" * 100 for number in range(40_000)]  # 20 MB in one row group
    source = open_path(write_parquet(tmp_path / "a.parquet", texts, rows=len(texts)))
    before = pyarrow.total_allocated_bytes()
    readers = [source.open(0, 5000 * number) for number in range(4)]
    assert [reader.read(1) for reader in readers] == [[texts[5000 * number]] for number in range(4)]
    assert pyarrow.total_allocated_bytes() - before < 35e6, "a few MB each, whatever the size of the row group"
    assert readers[3].read(300) == texts[15_001:15_301]


def test_parquet_batches_do_not_depend_on_the_layout_and_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_cursor, "SHUFFLE_BLOCK", 2)
    path = str(write_parquet(tmp_path / "a.parquet", make_texts(300), rows=80))
    whole = take(small_loader(path, epochs=-1), 40)
    halves = [take(small_loader(path, epochs=-1, dp_rank=rank, dp_size=2), 40) for rank in range(2)]
    assert all((a[:4] == b).all() and (a[4:] == c).all() for a, b, c in zip(whole, *halves, strict=True))
    first = small_loader(path, epochs=-1)
    begun = take(first, 17)
    resumed = small_loader(path, epochs=-1)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert equal(begun + take(resumed, 23), whole)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Local files where the download would be."""
    import datasets

    files = []
    for number in range(3):
        files.append(str(tmp_path / f"{number}.json.gz"))
        with gzip.open(files[-1], "wt") as file:
            file.writelines(json.dumps({"text": t, "url": "u"}) + "\n" for t in TEXTS[number * 14 : number * 14 + 14])
    calls = []

    def load(repo, config, split):
        calls.append((repo, config, split))
        cache = str(tmp_path / "cache")
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)

    monkeypatch.setattr(sharded_kinds, "load_hub_dataset", load)
    return calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("c4", ("allenai/c4", "en", "train")),
        ("c4_validation", ("allenai/c4", "en", "validation")),
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:sample", ("owner/name", "sample", "train")),
        ("owner/name::test", ("owner/name", None, "test")),
    ],
)
def test_hub_datasets_are_streamed_by_name(hub, name, expected):
    source = open_source(name, None, "text", ByteTokenizer())
    assert isinstance(source, HubDataset) and hub == [expected] and source.num_shards == 3
    check_shards(source)
    assert source.describe(1, 2).endswith("shard 1 of 3, document 2")


@pytest.mark.parametrize("num_streams", [2, 4])
def test_hub_batches_do_not_depend_on_the_layout_and_resume_exactly(hub, monkeypatch, num_streams):
    monkeypatch.setattr(sharded_cursor, "SHUFFLE_BLOCK", 3)
    monkeypatch.setattr(
        "torchtitan.data.texts.paths.locate_path", lambda path: Location("hub", hub=("owner/name", None, "train"))
    )
    options = {"num_streams": num_streams, "epochs": -1, "global_batch_size": 4}
    whole = take(small_loader("hub", **options), 16)
    first = small_loader("hub", **options)
    begun = take(first, 7)
    states, halves = [first.state_dict()] * 2, [[], []]
    for rank in [0, 1] * 9:  # resumed after each batch, so also within a block
        loader = small_loader("hub", dp_rank=rank, dp_size=2, **options)
        loader.load_state_dict(json.loads(json.dumps(states[rank])))
        halves[rank] += take(loader, 1)
        states[rank] = loader.state_dict()
    own = [[slot for slot in range(4) if slot % num_streams * 2 // num_streams == rank] for rank in range(2)]
    for number, batch in enumerate(whole):
        if number < 7:
            assert (batch == begun[number]).all()
        else:
            assert all((batch[own[rank]] == halves[rank][number - 7]).all() for rank in range(2))


def test_hub_errors_say_what_to_do(hub, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"shard 0 of 3, document 0: no field 'body' \(it has text, url\); set text_key"
    ):
        open_source("c4", None, "body", ByteTokenizer()).open(0, None).read(1)
    (tmp_path / "1.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": b}\n'))
    with pytest.raises(ValueError, match=r"shard 1 of 3, document \d cannot be read: .*JSON"):
        open_source("c4", None, "text", ByteTokenizer()).open(1, None).read(5)

    (tmp_path / "2.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": null}\n'))
    with pytest.raises(ValueError, match=r"shard 2 of 3, document 1: 'text' holds NoneType"):
        open_source("c4", None, "text", ByteTokenizer()).open(2, None).read(5)

    def unreachable(repo, config, split):
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub")

    monkeypatch.setattr(sharded_kinds, "load_hub_dataset", unreachable)
    with pytest.raises(ValueError, match=r"(?s)'allenai/c4 \(en\) train' cannot be opened.*dataset_path.*HF_TOKEN"):
        open_source("c4", None, "text", ByteTokenizer())


WRITERS = {
    "corpus/*.jsonl": lambda path, texts: write_jsonl(path.with_suffix(".jsonl"), texts),
    "corpus/*.gz": lambda path, texts: path.with_suffix(".jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), mtime=0)
    ),
    "corpus/*.txt": lambda path, texts: path.with_suffix(".txt").write_text("\n".join(texts)),
    "corpus/*.parquet": lambda path, texts: write_parquet(path.with_suffix(".parquet"), texts),
}


@pytest.mark.parametrize("pattern", WRITERS)
def test_two_files_with_their_contents_swapped_are_another_text(tmp_path, pattern):
    found = set()
    (tmp_path / "corpus").mkdir()
    for texts in ({"a": TEXTS[:9], "b": TEXTS[9:18]}, {"b": TEXTS[:9], "a": TEXTS[9:18]}):
        for name, of in texts.items():
            WRITERS[pattern](tmp_path / "corpus" / name, of)
        found.add(open_path(tmp_path / pattern).identity)
    numbers = {identity.rpartition(" (")[0] for identity in found}
    assert len(found) == 2 and len(numbers) == 1  # of the same count and size


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_a_document_that_is_too_long_for_memory_is_named(tmp_path, monkeypatch, name, pack):
    monkeypatch.setattr(documents, "LONGEST_TEXT", 1000)
    lines = b"".join(
        json.dumps({"text": "x" * size}).encode() + b"\n" for size in ((1000,) if "txt" in name else (9, 2000))
    )
    long = pack(lines.replace(b"x" * 1000, b"x" * 5000) if "txt" in name else lines)
    (tmp_path / name).write_bytes(long)
    source = open_path(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}(:2)?: more than .* in one document; cut it into several"):
        source.tokens(len(source) - 1) if hasattr(source, "tokens") else source.open(0, None).read(5)


def test_a_line_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    for module in (documents, sharded_kinds):
        monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    line = json.dumps({"text": "x" * 5000}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n" + line)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + line))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: more than"):
        open_path(tmp_path / "a.jsonl").tokens(0)
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz:2: more than"):
        open_path(tmp_path / "b.jsonl.gz").open(0, None).read(1)


def test_a_stream_holds_so_many_characters_and_no_more(tmp_path, monkeypatch):
    texts = ["x" * 300 + str(i) for i in range(10)]
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode())
    )
    monkeypatch.setattr(sharded, "BLOCK_CHARS", 1000)
    reader = open_path(tmp_path / "a.jsonl.gz").open(0, None)
    blocks = [reader.read(512) for _ in range(4)]
    assert [len(block) for block in blocks] == [4, 4, 2, 0] and sum(blocks, []) == texts


def test_a_long_file_is_cut_between_paragraphs_and_gives_all_of_its_text(tmp_path):
    paragraphs = [f"{i} " + "naïve words " * (i * 7 % 60) for i in range(300)]
    texts = {
        "paragraphs": "\n\n".join(paragraphs),
        "lines": "\n".join(paragraphs),
        "one line": "é" * 60_000,
        "short": "short",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "book.txt").write_text(text, encoding="utf-8")
        source = open_path(tmp_path / name / "book.txt")
        parts = [bytes(source.tokens(i)[1:-1].astype(np.uint8)).decode() for i in range(len(source))]
        assert "".join(parts) == text and all(parts)
        assert len(parts) == max(1, len(text.encode()) // 2048)
        if name == "paragraphs":
            assert all(part.endswith("\n\n") for part in parts[:-1]) and "book.txt, part 3 of" in source.describe(2)
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbftext")
    assert open_path(tmp_path / "bom.txt").tokens(0).tolist() == [BOS, *b"text", EOS]


@pytest.mark.parametrize("count", [2, 5, 19, 20, 21, 100])
def test_what_is_held_out_and_the_rest_are_all_documents_once(tmp_path, count):
    documents = open_path(Path(write_jsonl(tmp_path / "a.jsonl", make_texts(count))))
    kept, held_out = Part(documents, False), Part(documents, True)
    found = [part.describe(i) for part in (kept, held_out) for i in range(len(part))]
    assert sorted(found) == sorted(documents.describe(i) for i in range(count))
    assert len(held_out) == max(1, count // 20) and kept.identity != held_out.identity != documents.identity


ROWS = [{"question": f"q{i}?", "answer": i, "tags": ["a"]} for i in range(30)]


def rows_as_json_lines(path):
    path.write_text("\n".join(map(json.dumps, ROWS)))


def rows_as_compressed(path):
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))


def rows_as_parquet(path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=8)


def rows_as_saved(path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", rows_as_json_lines),
        ("a.jsonl.gz", rows_as_compressed),
        ("a.parquet", rows_as_parquet),
        ("saved", rows_as_saved),
    ],
)
def test_several_fields_become_a_text_by_a_template(tmp_path, name, write):
    write(tmp_path / name)

    def texts(text_key):
        source = open_texts(locate_text("", str(tmp_path / name)), text_key)
        return list(tokenizer_verb.all_texts(source))

    assert texts("{question}\n{answer}") == [f"q{i}?\n{i}" for i in range(30)]
    with pytest.raises(Refusal, match="'body'"):
        texts("{question} {body}")
    with pytest.raises(Refusal, match="'tags' holds list, no text or number; correct text_key"):
        texts("{tags}")
