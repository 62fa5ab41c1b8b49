"""What others wrote, read without harm: plain files alone, a bounded piece at a time; words that no terminal obeys.

A pipe would wait for a writer for ever, a device or a sparse file has no end, a link leads to what is not the run's.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan.refusal import Refusal

_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH: a folder that lets through, and shows nothing
_NO_FILE = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO)  # a link, a file with something below it, a socket


def read_piece(top: Path, path: str, position: int, size: int) -> tuple[bytes, int]:
    """Bytes of a file below a folder, and how large it is; a negative position counts from the end.

    `top` may be a link, which a person chose. Below it no link is followed, also one that is put there meanwhile.
    """
    descriptor = _open(top, path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path)
        whole = status.st_size
        return os.pread(descriptor, size, position if position >= 0 else max(0, whole + position)), whole
    finally:
        os.close(descriptor)


def read_small(top: Path, path: str, most: int) -> bytes:
    """All of a file that has a bound."""
    data, size = read_piece(top, path, 0, most + 1)
    if len(data) > most:
        raise Refusal(f"{path} has {size:,} bytes, and {most:,} are the most; look what wrote it")
    return data


def walk(top: Path, enters: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """The files below a folder, with their paths. What cannot be listed is passed over, and no link is followed."""
    left = [""]
    while left:  # a run's code may nest folders deeper than Python's calls
        at = left.pop()
        try:
            with os.scandir(os.path.join(top, at)) as entries:
                for entry in entries:
                    path = os.path.join(at, entry.name)
                    if not entry.is_dir(follow_symlinks=False):
                        yield path, entry
                    elif enters(entry.name):
                        left.append(path)
        except OSError:
            continue


def printable(text: str) -> str:
    """The text without what a terminal would obey, or what hides or reorders what a person reads."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def _open(top: Path, path: str) -> int:
    *folders, name = path.split("/")
    if not {"", ".", ".."}.isdisjoint((*folders, name)):
        raise Refusal(f"path = {path!a} leads out of the run; use a path that `files` lists")
    at = os.open(top, _FOLDER)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    except ValueError:  # a name that no disk has, such as one with a zero byte
        raise _refusal(path) from None
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _refusal(path) from None
        raise
    finally:
        os.close(at)


def _refusal(path: str) -> Refusal:
    return Refusal(f"{printable(path)} is no plain file, or a link leads there; use a path that `files` lists")
