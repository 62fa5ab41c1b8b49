"""Cuts text into chunks that workers of `prepare` can tokenize independently, and reads a chunk."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan.data.prepared import tokens as prepared
from torchtitan.data.texts.documents import line_at, map_file, parse_line
from torchtitan.data.texts.sharded import ShardedTexts
from torchtitan.data.texts.sources import Location, open_texts

CHUNK_BYTES = 4 << 20
MAX_CHUNKS = 4096  # each chunk is two files in one folder
BATCH_DOCUMENTS = 256
BATCH_CHARS = 4 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents: bytes of a JSONL file, a whole shard, or a range of document numbers."""

    kind: str
    part: int  # number of the file or shard
    begin: int
    end: int


@dataclass(frozen=True)
class Preparation:
    """What each worker needs to know of the whole task."""

    location: Location
    text_key: str
    tokenizer_path: str
    out: Path
    dtype: str


def describe_plan(job: Preparation, chunks: list[Chunk], tokenizer_sha256: str) -> str:
    """A description of the task. A second start goes on only if its own description is the same."""
    files = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns)
        for path in job.location.files
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])  # the dataset of `save_to_disk` is a folder
    ]
    plan = {
        "format_version": prepared.FORMAT_VERSION,
        "source": job.location.name,
        "hub": job.location.hub,
        "files": files,
        "text_key": job.text_key,
        "tokenizer_sha256": tokenizer_sha256,
        "chunks": [asdict(chunk) for chunk in chunks],
    }
    return json.dumps(plan) + "\n"


def plan_chunks(location: Location, text_key: str) -> list[Chunk]:
    """The chunks, in the order of the documents."""
    if location.kind == "jsonl":
        sizes = [path.stat().st_size for path in location.files]
        step = max(CHUNK_BYTES, -(-sum(sizes) // MAX_CHUNKS))
        return [
            Chunk("bytes", part, begin, min(begin + step, size))
            for part, size in enumerate(sizes)
            for begin in range(0, size, step)
        ]
    texts = open_texts(location, text_key)
    if isinstance(texts, ShardedTexts):
        return [Chunk("shard", part, 0, 0) for part in range(texts.num_shards)]
    step = max(BATCH_DOCUMENTS, -(-len(texts) // MAX_CHUNKS))
    return [Chunk("documents", 0, begin, min(begin + step, len(texts))) for begin in range(0, len(texts), step)]


def read_chunk(job: Preparation, chunk: Chunk, texts: Any) -> Iterator[str]:
    if chunk.kind == "bytes":
        yield from _lines_starting_within(job.location.files[chunk.part], chunk.begin, chunk.end, job.text_key)
    elif chunk.kind == "shard":
        yield from texts.open(chunk.part, None)
    else:
        yield from (texts.text(index) for index in range(chunk.begin, chunk.end))


def in_batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for text in documents:
        batch.append(text)
        num_chars += len(text)
        if len(batch) == BATCH_DOCUMENTS or num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    yield batch


def _lines_starting_within(path: Path, begin: int, end: int, text_key: str) -> Iterator[str]:
    data = map_file(path)
    if begin and data[begin - 1 : begin] != b"\n":
        begin = (data.find(b"\n", begin) + 1) or end
    while begin < end:
        line = line_at(data, begin)
        if line.strip():
            yield parse_line(line, text_key, lambda begin=begin: f"{path}:{_line_number(path, begin)}")
        begin += len(line) + 1


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return 1 + sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))
