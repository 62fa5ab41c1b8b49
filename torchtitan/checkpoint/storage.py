"""Where checkpoints lie, on a disk or at an fsspec URL: which are complete, and reading them without trust.

A checkpoint is a folder `step-N` of torch.distributed.checkpoint with a manifest of its files' sizes and checksums. The
manifest is written last, and on a disk the folder gets its name last: what has none is not there.
"""

import fcntl
import io
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from torchtitan.refusal import Refusal

_MANIFEST = "manifest.json"
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself."""

    step: int
    files: dict[str, tuple[int, int]]  # name -> bytes, CRC-32
    config: dict[str, Any]
    layout: str
    versions: dict[str, str]
    run: dict[str, Any]  # tokens seen, and what all streams share of the data's state


class Storage:
    """The folder of a run's checkpoints."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise Refusal(
                f'"{url}" cannot hold checkpoints: {error}; give a path, or a URL that fsspec knows and install its '
                "package (s3:// needs s3fs, gs:// gcsfs)"
            ) from None
        self.is_local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))

    def steps(self) -> list[int]:
        """Steps of which there is a folder, complete or not, newest first."""
        if not self.fs.exists(self.root):
            return []
        self.fs.invalidate_cache()
        names = (path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False))
        return sorted((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), reverse=True)

    def folder(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def being_written(self, step: int) -> str:
        """Where a save writes: an object store has no names to change, its manifest alone says that all is there."""
        return f"{self.root}/step-{step}.writing" if self.is_local else self.folder(step)

    def describe(self, folder: str, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Bytes and checksum of files, as they are read back."""
        return {name: self._checksum(f"{folder}/{name}") for name in names}

    def names(self, folder: str) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.fs.ls(folder, detail=False))

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, give the folder its name: from here on the checkpoint is there."""
        folder = self.being_written(manifest.step)
        if self.is_local and (unseen := [name for name in manifest.files if not Path(folder, name).exists()]):
            raise OSError(f"{folder} has no {unseen[0]}, which another rank wrote: all nodes must share the folder")
        says = asdict(manifest)
        with self.fs.open(f"{folder}/{_MANIFEST}", "wb") as file:
            file.write(json.dumps({"checksum": _checksum_of(says)} | says, indent=1).encode())
        if self.is_local:
            _sync(Path(folder) / _MANIFEST)
            _sync(Path(folder))
            self.remove(self.folder(manifest.step))  # of this step, but not complete: else nobody would save it again
            Path(folder).rename(self.folder(manifest.step))
            _sync(Path(self.root))

    def examine(self, step: int) -> Manifest | str:
        """What a checkpoint says of itself, its files being as long as it says; or why it is no complete one."""
        try:
            with self.fs.open(f"{self.folder(step)}/{_MANIFEST}", "rb") as file:
                read = json.load(file)
            if read.pop("checksum") != _checksum_of(read):
                raise Refusal("its own checksum differs")
            manifest = Manifest(**read | {"files": {name: tuple(about) for name, about in read["files"].items()}})
        except FileNotFoundError:
            return "it has no manifest: it was never finished"
        except NotADirectoryError:
            return "it is a file"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"its manifest cannot be read ({error})"
        if manifest.step != step:
            return f"its manifest is that of step {manifest.step}"
        for name, (size, _) in manifest.files.items():
            try:
                found = self.fs.size(f"{self.folder(step)}/{name}")
            except FileNotFoundError:
                return f"{name} is missing"
            if found != size:
                return f"{name} has {found} bytes, the manifest says {size}"
        return manifest

    def faults(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Of these files, what is not as the manifest says."""
        faults = []
        for name in names:
            try:
                if self._checksum(f"{self.folder(manifest.step)}/{name}") != manifest.files[name]:
                    faults.append(f"the checksum of {name} differs")
            except FileNotFoundError:  # somebody has just removed it
                faults.append(f"{name} is missing")
        return faults

    def remove(self, folder: str) -> None:
        """The manifest first: what is left if this is cut short is no checkpoint."""
        if self.fs.exists(f"{folder}/{_MANIFEST}"):
            self.fs.rm_file(f"{folder}/{_MANIFEST}")
        if self.fs.exists(folder):
            self.fs.rm(folder, recursive=True)

    def remove_unread(self, step: int) -> bool:
        """Remove a checkpoint that nobody reads; on an object store readers cannot be seen, and it is removed."""
        if not self.is_local:
            self.remove(self.folder(step))
            return True
        with open(f"{self.folder(step)}/{_MANIFEST}", "r+b") as file:  # NFS locks for one alone what may be written
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            aside = Path(self.folder(step)).rename(f"{self.folder(step)}.writing")  # `sweep` ends it if cut short
        self.remove(str(aside))  # the manifest is closed: NFS keeps what is open, and its folder
        return True

    def set_aside(self, step: int) -> str:
        """Give a checkpoint a name that no start looks for; the name."""
        number = 1
        while self.fs.exists(aside := f"{self.folder(step)}.aside-{number}"):
            number += 1
        self.fs.mv(self.folder(step), aside, recursive=True)
        return aside.rpartition("/")[2]

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Inside, the checkpoint is not removed."""
        if not self.is_local:
            yield
            return
        with open(f"{self.folder(step)}/{_MANIFEST}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.root).free if self.is_local and self.fs.exists(self.root) else None

    def sweep(self) -> list[str]:
        """Remove what saves that were cut short have left; their names."""
        left = [*Path(self.root).glob("*.writing")] if self.is_local else []
        for path in left:
            self.fs.rm(str(path), recursive=True)
        return [path.name for path in left]

    def writer(self, step: int) -> FileSystemWriter:
        if self.is_local:
            return FileSystemWriter(self.being_written(step))
        return FsspecWriter(self.fs.unstrip_protocol(self.being_written(step)))

    def reader(self, step: int) -> FileSystemReader:
        return Reader(self.folder(step)) if self.is_local else RemoteReader(self.fs.unstrip_protocol(self.folder(step)))

    def _checksum(self, path: str) -> tuple[int, int]:
        size, checksum = 0, 0
        with self.fs.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        return size, checksum


class _WithoutTrust:
    """torch reads a checkpoint's index as a pickle, which may run anything; here only what an index is made of."""

    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata = _IndexUnpickler(io.BytesIO(file.read())).load()
        for name, kind in metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):  # torch would read it as a pickle
                raise Refusal(f"{self.path}: {name} is no tensor; it is not read, for it could run anything")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Reader(_WithoutTrust, FileSystemReader):
    """From a disk."""


class RemoteReader(_WithoutTrust, FsspecReader):
    """From an fsspec URL."""


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "strided"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13, and no other, calls it
        if name not in self._ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"a checkpoint's index has no use for {module}.{name}; it is not read")
        return super().find_class(module, name)


def _checksum_of(says: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(says).encode())


def _sync(path: Path) -> None:
    """Have the disk hold what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
