"""Turns text into prepared tokens, on all cores; stopped at any point, the same command goes on where it was.

    python -m torchtitan prepare --dataset_path 'corpus/*.jsonl' --tokenizer tests/assets/tokenizer --out corpus.tokens

The work is cut into chunks; each becomes a pair of files that counts once it is complete. At the end they are joined.
"""

import argparse
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data import prepared
from torchtitan.data.documents import Tokenizer, line_at, map_file, parse_line
from torchtitan.data.prepared import META, OFFSETS, PLAN, TOKENS, Meta, fingerprint, token_dtype
from torchtitan.data.sharded import ShardedTexts
from torchtitan.data.sources import Location, locate_text, open_texts
from torchtitan.data.tokenizer import build_tokenizer

CHUNK_BYTES = 4 << 20
CHUNK_DOCUMENTS = 10_000
MAX_CHUNKS = 4096  # files in one folder
BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents: bytes of a JSONL file, a whole shard, or a range of document numbers."""

    kind: str
    part: int  # which file or shard
    begin: int
    end: int


@dataclass(frozen=True)
class Job:
    """What a worker needs to know; its JSON is the plan that a later start must agree with."""

    location: Location
    text_key: str
    tokenizer_path: str
    out: Path
    dtype: str


def prepare(
    dataset: str, dataset_path: str | None, tokenizer_path: str, out: str, text_key: str = "text", workers: int = 0
) -> Meta:
    """Writes the folder `out`; workers = 0 takes all cores."""
    location = locate_text(dataset, dataset_path)
    if location.kind == "prepared":
        raise ValueError(f"{location.name} is prepared already; give dataset_path the text it was made from")
    tokenizer = build_tokenizer(tokenizer_path)
    folder = Path(out)
    job = Job(location, text_key, tokenizer_path, folder, token_dtype(tokenizer.vocab_size))
    chunks = plan_chunks(location, text_key)
    _agree_with_plan(folder, _plan(job, chunks, fingerprint(tokenizer)))
    if not (folder / META).is_file():
        _tokenize(job, chunks, workers or os.cpu_count() or 1)
        _join(job, chunks, tokenizer)
    return prepared.load_meta(folder)


def plan_chunks(location: Location, text_key: str) -> list[Chunk]:
    """In the order of the documents."""
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
    step = max(CHUNK_DOCUMENTS, -(-len(texts) // MAX_CHUNKS))
    return [Chunk("documents", 0, begin, min(begin + step, len(texts))) for begin in range(0, len(texts), step)]


def read_chunk(job: Job, chunk: Chunk, texts: Any) -> Iterator[str]:
    if chunk.kind == "bytes":
        yield from _lines_starting_within(job.location.files[chunk.part], chunk.begin, chunk.end, job.text_key)
    elif chunk.kind == "shard":
        reader = texts.open(chunk.part, None)
        while batch := reader.read(BATCH_DOCUMENTS):
            yield from batch
    else:
        yield from (texts.text(index) for index in range(chunk.begin, chunk.end))


def _lines_starting_within(path: Path, begin: int, end: int, text_key: str) -> Iterator[str]:
    data = map_file(path)
    if begin and data[begin - 1 : begin] != b"\n":
        begin += len(line_at(data, begin)) + 1
    while begin < end:
        line = line_at(data, begin)
        if line.strip():
            yield parse_line(line, text_key, lambda begin=begin: f"{path}:{_line_number(path, begin)}")
        begin += len(line) + 1


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return 1 + sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))


def _plan(job: Job, chunks: list[Chunk], tokenizer_sha256: str) -> str:
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in job.location.files]
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


def _agree_with_plan(folder: Path, plan: str) -> None:
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / PLAN).is_file())):
        raise ValueError(f"--out {folder} exists and holds something else; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PLAN).is_file():
        _write_whole(folder / PLAN, plan.encode())
    elif (folder / PLAN).read_text() != plan:
        raise ValueError(
            f"--out {folder} was begun from other text, text_key or tokenizer (or a file has changed since); "
            "give a new folder, or delete this one"
        )


# Workers: one tokenizer and one opened source a process.
_worker: tuple[Job, Tokenizer, Any]


def _start_worker(job: Job, needs_texts: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which lets running chunks finish
    # A worker whose parent was killed would go on writing, perhaps against the worker of a second start.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker a core already
    texts = open_texts(job.location, job.text_key) if needs_texts else None
    _worker = (job, build_tokenizer(job.tokenizer_path), texts)


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _tokenize_chunk(number: int, chunk: Chunk) -> int:
    """Writes the tokens and the document lengths of a chunk; the lengths, last, mark it as complete."""
    job, tokenizer, texts = _worker
    lengths: list[int] = []
    documents = read_chunk(job, chunk, texts)
    tokens_path, lengths_path = _chunk_files(job.out, number)
    with tokens_path.open("wb") as file:
        while batch := list(islice(documents, BATCH_DOCUMENTS)):
            encoded = tokenizer.encode_batch(batch, bos=True, eos=True)
            lengths += map(len, encoded)
            for ids in encoded:
                file.write(np.array(ids, dtype=job.dtype).tobytes())
        file.flush()
        os.fsync(file.fileno())
    _write_whole(lengths_path, np.array(lengths, dtype="<i8").tobytes())
    return number


def _tokenize(job: Job, chunks: list[Chunk], workers: int) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = _finished(job, len(chunks))
    todo = [number for number in range(len(chunks)) if number not in done]
    if not todo:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("chunks"))
    with (
        Progress(*columns, TimeRemainingColumn(), transient=False) as progress,
        ProcessPoolExecutor(
            min(workers, len(todo)),
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(job, chunks[0].kind != "bytes"),
        ) as pool,
    ):
        bar = progress.add_task(job.location.name, total=len(chunks), completed=len(done))
        futures = [pool.submit(_tokenize_chunk, number, chunks[number]) for number in todo]
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(bar)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finished(job: Job, num_chunks: int) -> set[int]:
    """Chunks whose files are complete, or already joined."""
    itemsize = np.dtype(job.dtype).itemsize
    joined = _size(job.out / TOKENS)
    finished, end = set(), 0
    for number in range(num_chunks):
        tokens_path, lengths_path = _chunk_files(job.out, number)
        if not lengths_path.is_file():
            # What was joined is in order, so nothing after a missing chunk can have been.
            joined = 0
            continue
        num_bytes = int(np.fromfile(lengths_path, "<i8").sum()) * itemsize
        end += num_bytes
        if _size(tokens_path) == num_bytes or end <= joined:
            finished.add(number)
    return finished


def _join(job: Job, chunks: list[Chunk], tokenizer: Tokenizer) -> None:
    """Appends chunk after chunk to one file and deletes it, so that the disk never holds the tokens twice."""
    itemsize = np.dtype(job.dtype).itemsize
    lengths = [np.fromfile(_chunk_files(job.out, number)[1], "<i8") for number in range(len(chunks))]
    offsets = np.cumsum(np.concatenate([np.zeros(1, "<i8"), *lengths]), dtype="<i8")
    if len(offsets) == 1:
        raise ValueError(f"{job.location.name} holds no document; give text to prepare")
    tokens_path = job.out / TOKENS
    tokens_path.touch()
    begin = 0
    with tokens_path.open("r+b") as joined:
        for number in range(len(chunks)):
            chunk_path = _chunk_files(job.out, number)[0]
            end = begin + int(lengths[number].sum()) * itemsize
            if _size(tokens_path) < end or chunk_path.is_file():
                joined.truncate(begin)
                joined.seek(begin)
                with chunk_path.open("rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 24)
                joined.flush()
                os.fsync(joined.fileno())
                chunk_path.unlink()
            begin = end
    _write_whole(job.out / OFFSETS, offsets.tobytes())
    meta = Meta(
        format_version=prepared.FORMAT_VERSION,
        num_documents=len(offsets) - 1,
        num_tokens=int(offsets[-1]),
        dtype=job.dtype,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=fingerprint(tokenizer),
        text_key=job.text_key,
        source=job.location.name,
    )
    _write_whole(job.out / META, (json.dumps(asdict(meta), indent=2) + "\n").encode())
    for number in range(len(chunks)):
        _chunk_files(job.out, number)[1].unlink()


def _chunk_files(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"chunk-{number:05d}.tokens", folder / f"chunk-{number:05d}.lengths"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing: written beside its place, then renamed."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset_path", help="JSONL, Parquet or text: a file, a folder or a quoted glob")
    source.add_argument("--dataset", help="a name as in training.dataset: c4, pydocs, owner/name")
    parser.add_argument("--tokenizer", required=True, help="tokenizer file, or the folder that holds it")
    parser.add_argument("--out", required=True, help="folder for the prepared tokens")
    parser.add_argument("--text_key", default="text", help="field or column that holds the text (default: text)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one a core)")


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    meta = prepare(
        args.dataset or "local text", args.dataset_path, args.tokenizer, args.out, args.text_key, args.workers
    )
    seconds = time.perf_counter() - start
    print(f"{args.out}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens ({meta.dtype}), {seconds:.1f} s")
    print(f'train on it with  [training] dataset_path = "{args.out}"')
    return 0
