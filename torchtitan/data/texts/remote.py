"""Text behind a URL that fsspec knows (s3://, gs://, hf://), read in place, without a copy on this machine."""

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs

from torchtitan.data.texts.file_kinds import one_kind
from torchtitan.data.texts.location import Location
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_REQUEST_BYTES = 1 << 20
_WAITS = (1, 5, 25)  # seconds before each further attempt to read
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "checksum", "LastModified", "mtime", "created")

if TYPE_CHECKING:  # readers take a RemoteFile for a Path; what they ask of one is below
    from pathlib import Path as _Base
else:
    _Base = object


class RemoteFile(_Base):
    """A file at a URL. It holds no connection, so it can go to another process."""

    def __init__(self, url: str, size: int, version: str) -> None:
        self._url, self._size, self.version = url, size, version

    name = property(lambda self: self._url.rpartition("/")[2])
    stem = property(lambda self: self.name.rpartition(".")[0] or self.name)
    suffix = property(lambda self: self.name[len(self.stem) :])

    def __str__(self) -> str:
        return self._url

    def is_dir(self) -> bool:
        return False

    def stat(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(st_size=self._size, st_mtime_ns=self.version)

    def open(self, mode: str = "rb") -> Any:  # type: ignore[override]
        assert mode == "rb", mode
        return io.BufferedReader(_Ranges(self._url, self._size), _REQUEST_BYTES)


class _Ranges(io.RawIOBase):
    """Reads a URL in ranges of bytes. A request that fails is made again, so a short outage does not end a run."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        data = self._read(self._at, end) if self._at < end else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, begin: int, end: int) -> bytes:
        for wait in (*_WAITS, None):
            try:
                files, path = url_to_fs(self._url)
                data: bytes = files.cat_file(path, start=begin, end=end)
                if len(data) != end - begin:
                    raise OSError(f"{len(data)} bytes came where {end - begin} were asked for")
                return data
            except Exception as error:  # each store raises its own types
                if wait is None or isinstance(error, FileNotFoundError | PermissionError):
                    raise OSError(f"{self._url}: {type(error).__name__}: {error}") from error
                logger.warning(f"{self._url}: {type(error).__name__}: {error}; again in {wait} s")
                time.sleep(wait)
        raise AssertionError


def locate_url(dataset_path: str) -> Location:
    files = _list(dataset_path)
    kind = one_kind(dataset_path, files)
    # A file with an index of its lines would be read whole at the start.
    return Location("streamed" if kind == "jsonl" else kind, tuple(files))


def _list(dataset_path: str) -> list[Path]:
    try:
        files, path = url_to_fs(dataset_path)
        if any(mark in path for mark in "*?["):
            found, folder = files.glob(path, detail=True), ""
        else:
            info = files.info(path)
            is_file = info["type"] == "file"
            found = {path: info} if is_file else files.find(path, detail=True)
            folder = "" if is_file else path.strip("/") + "/"
    except Exception as error:  # each store raises its own types
        fix = "correct dataset_path, or set what the store asks for (keys, region, a token) in the environment"
        if isinstance(error, ImportError | ValueError):
            fix = "install its package (s3:// needs s3fs, gs:// needs gcsfs), or copy the text to a disk"
        elif isinstance(error, FileNotFoundError):
            fix = "correct dataset_path"
        raise Refusal(
            f"dataset_path = {dataset_path!r} cannot be read: {type(error).__name__}: {error}; {fix}"
        ) from error
    names = {name: info for name, info in sorted(found.items()) if info["type"] == "file" and info["size"]}
    if any(name.endswith(("tokens.bin", "dataset_info.json")) for name in names):
        raise Refusal(
            f"dataset_path = {dataset_path!r} holds prepared tokens or a saved dataset, which are mapped into memory; "
            "copy the folder to a disk"
        )
    remote: list[Path] = [
        RemoteFile(files.unstrip_protocol(name), info["size"], _version(info))
        for name, info in names.items()
        if not any(part.startswith((".", "_")) for part in name.strip("/").removeprefix(folder).split("/"))
    ]
    if not remote:
        raise Refusal(f"dataset_path = {dataset_path!r}: no file there has text in it; give a file, a folder or a glob")
    return remote


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
