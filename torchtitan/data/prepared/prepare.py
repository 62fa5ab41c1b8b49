"""Turns text into prepared tokens, on all cores. If it is stopped, the same command resumes where it was.

    python -m torchtitan prepare --dataset_path 'corpus/*.jsonl' --tokenizer tests/assets/tokenizer --out corpus.tokens

The text is cut into chunks. A worker writes two files for each chunk, and the last step joins the files of all chunks.
A chunk whose files are not complete is done again.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.prepared import tokens as prepared
from torchtitan.data.prepared.chunks import Chunk, Preparation, describe_plan, in_batches, plan_chunks, read_chunk
from torchtitan.data.prepared.tokens import CHECKSUMS, META, OFFSETS, PLAN, TOKENS, Meta, token_dtype
from torchtitan.data.texts.sources import locate_text, open_texts
from torchtitan.data.tokenizers.fingerprint import fingerprint
from torchtitan.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

LOCK = ".lock"


def prepare(
    dataset: str,
    dataset_path: str | None,
    tokenizer_path: str,
    out: str,
    text_key: str = "text",
    workers: int | None = None,
) -> Meta:
    """Write the folder `out`, with `workers` processes or one per core."""
    if workers is not None and workers < 1:
        raise Refusal(
            f"--workers {workers} is less than one process; give 1 or more, or leave --workers out for one per core"
        )
    if dataset_path is not None and Path(out).resolve().is_relative_to(Path(dataset_path).expanduser().resolve()):
        raise Refusal(f"--out {out} is inside dataset_path = {dataset_path!r}; give a folder outside it")
    location = locate_text(dataset, dataset_path)
    if location.kind == "prepared":
        raise Refusal(f"{location.name} is already prepared; set dataset_path to the text it was made from")
    tokenizer = build_tokenizer(tokenizer_path)
    folder = Path(out)
    job = Preparation(location, text_key, tokenizer_path, folder, token_dtype(tokenizer.vocab_size))
    chunks = plan_chunks(location, text_key)
    with _locked(folder):
        _agree_with_plan(folder, describe_plan(job, chunks, fingerprint(tokenizer)))
        if not (folder / META).is_file():
            _tokenize(job, chunks, workers or os.cpu_count() or 1)
            _join(job, chunks, tokenizer)
        meta = prepared.load_meta(folder)
        for path in (*folder.glob("chunk-*"), folder / LOCK):
            path.unlink(missing_ok=True)
    return meta


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder: two processes that write into it would mix their tokens. A killed process loses its lock."""
    if folder.exists() and (not folder.is_dir() or _is_foreign(set(os.listdir(folder)))):
        raise Refusal(f"--out {folder} exists and has files that `prepare` did not write; give a new folder")
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((folder / LOCK).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(
                f"--out {folder}: another `prepare` is writing there; wait for it, stop it, or give another folder"
            ) from error
        except OSError as error:
            raise Refusal(f"--out {folder} cannot be written: {error.strerror}; give another folder") from error
        yield


def _is_foreign(names: set[str]) -> bool:
    return bool(names) and not names & {PLAN, PLAN + ".part", LOCK}


def _agree_with_plan(folder: Path, plan: str) -> None:
    if not (folder / PLAN).is_file():
        write_whole(folder / PLAN, plan)
    elif (folder / PLAN).read_bytes() != plan.encode():
        raise Refusal(
            f"--out {folder} was begun with another text, text_key or tokenizer, or a file has changed since; "
            "give a new folder, or delete this one"
        )


# Each worker process has one tokenizer and one opened source.
_worker: tuple[Preparation, Tokenizer, Any]


def _start_worker(job: Preparation, needs_texts: bool) -> None:
    global _worker
    # If the parent is killed, a worker must not go on: a second start may already write the same files.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has a worker
    texts = open_texts(job.location, job.text_key) if needs_texts else None
    _worker = (job, build_tokenizer(job.tokenizer_path), texts)


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _tokenize_chunk(number: int, chunk: Chunk) -> int:
    """Write the tokens of a chunk, then length and checksum of each document. That file marks the chunk as complete."""
    job, tokenizer, texts = _worker
    documents: list[tuple[int, int]] = []
    tokens_path, lengths_path = _chunk_files(job.out, number)
    with tokens_path.open("wb") as file:
        for batch in in_batches(read_chunk(job, chunk, texts)):
            for ids in tokenizer.encode_batch(batch, bos=True, eos=True):
                data = np.array(ids, dtype=job.dtype).tobytes()
                documents.append((len(ids), zlib.crc32(data)))
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    write_whole(lengths_path, np.array(documents, dtype="<i8").tobytes())
    return number


def _tokenize(job: Preparation, chunks: list[Chunk], workers: int) -> None:
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
        # Workers start here and inherit that they ignore Ctrl-C. The parent gets it and lets running chunks finish.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = [pool.submit(_tokenize_chunk, number, chunks[number]) for number in todo]
        signal.signal(signal.SIGINT, handler)
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(bar)
        except BrokenProcessPool:
            raise Refusal(
                f"--workers: a worker on {job.location.name} was killed, probably for want of memory; run the same "
                f"command again with fewer --workers (there were {min(workers, len(todo))})"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finished(job: Preparation, num_chunks: int) -> set[int]:
    """Chunks that need no more work: their files are complete, or their tokens are already joined."""
    itemsize = np.dtype(job.dtype).itemsize
    joined = _size(job.out / TOKENS)
    finished, end = set(), 0
    for number in range(num_chunks):
        tokens_path, lengths_path = _chunk_files(job.out, number)
        if not lengths_path.is_file():
            # Chunks are joined in order, so no chunk after a missing one can be joined.
            joined = 0
            continue
        num_bytes = int(_documents(lengths_path)[:, 0].sum()) * itemsize
        end += num_bytes
        if _size(tokens_path) == num_bytes or end <= joined:
            finished.add(number)
    return finished


def _join(job: Preparation, chunks: list[Chunk], tokenizer: Tokenizer) -> None:
    """Append chunk after chunk to one file. Each is deleted at once, so the disk never holds all tokens twice."""
    itemsize = np.dtype(job.dtype).itemsize
    documents = [_documents(_chunk_files(job.out, number)[1]) for number in range(len(chunks))]
    offsets = np.cumsum(np.concatenate([np.zeros(1, "<i8"), *(part[:, 0] for part in documents)]), dtype="<i8")
    if len(offsets) == 1:
        raise Refusal(f"{job.location.name} holds no document; give a source with text in it")
    tokens_path = job.out / TOKENS
    tokens_path.touch()
    begin = 0
    with tokens_path.open("r+b") as joined:
        for number in range(len(chunks)):
            chunk_path = _chunk_files(job.out, number)[0]
            end = begin + int(documents[number][:, 0].sum()) * itemsize
            if _size(tokens_path) < end or chunk_path.is_file():
                assert _size(chunk_path) == end - begin, f"{chunk_path} was changed by something else"
                joined.truncate(begin)
                joined.seek(begin)
                with chunk_path.open("rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 24)
                joined.flush()
                os.fsync(joined.fileno())
                chunk_path.unlink()
            begin = end
    assert _size(tokens_path) == begin, f"{tokens_path} was changed by something else"
    write_whole(job.out / OFFSETS, offsets.tobytes())
    checksums = np.concatenate([part[:, 1] for part in documents]).astype("<u4").tobytes()
    write_whole(job.out / CHECKSUMS, checksums)
    tokens = np.memmap(tokens_path, job.dtype, mode="r")
    meta = Meta(
        format_version=prepared.FORMAT_VERSION,
        num_documents=len(offsets) - 1,
        num_tokens=int(offsets[-1]),
        dtype=job.dtype,
        largest_id=int(tokens.max()),
        checksums_crc32=zlib.crc32(checksums),
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=fingerprint(tokenizer),
        text_key=job.text_key,
        source=job.location.name,
    )
    write_whole(job.out / META, (json.dumps(asdict(meta), indent=2) + "\n").encode())


def _chunk_files(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"chunk-{number:05d}.tokens", folder / f"chunk-{number:05d}.lengths"


def _documents(path: Path) -> np.ndarray:
    """Length and checksum of each document of a chunk."""
    return np.fromfile(path, "<i8").reshape(-1, 2)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


HELP = "tokenise text once, to train from at memory speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset_path", help="JSONL, Parquet or text to tokenize: a file, a folder or a quoted glob")
    source.add_argument("--dataset", help="text to tokenize, by a name as in training.dataset: c4, pydocs, owner/name")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer: a file, or the folder that holds it")
    parser.add_argument(
        "--out", required=True, help="the folder to write the tokens to; give the same one again to resume"
    )
    parser.add_argument("--text_key", default="text", help="the field or column that holds the text (default: text)")
    parser.add_argument(
        "--workers", type=int, help="number of processes (default: one per core); give fewer if memory is short"
    )


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    start = time.perf_counter()
    try:
        meta = prepare(
            args.dataset or "local text", args.dataset_path, args.tokenizer, args.out, args.text_key, args.workers
        )
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    seconds = time.perf_counter() - start
    print(f"{args.out}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens ({meta.dtype}), {seconds:.1f} s")
    print(f'train on it with  [training] dataset_path = "{args.out}"')
