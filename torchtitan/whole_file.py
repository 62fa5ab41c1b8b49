"""Writes a file whole or not at all, also if the machine loses power: under another name, flushed, then renamed."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` at the end. A file of the same name from a killed process is reused.

    `private`: only this user may read it, and several may write it at once, in a folder where others may write, too.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}" if private else f"{path.name}.part")
    mode = 0o600 if private else 0o666
    with open(part, "xb" if private else "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    try:
        sync(path.parent)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems flush no folders
            raise


def write_whole(path: Path, data: bytes | str, private: bool = False) -> None:
    with whole(path, private) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
