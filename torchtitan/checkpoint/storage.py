"""The folder of a run's checkpoints, on a disk or at an fsspec URL: lists, verifies, completes and removes them.

A checkpoint is a folder `step-N` of torch.distributed.checkpoint with a manifest that lists the size and checksum of
each file. The last write is the rename to `step-N` (on an object store: the manifest), so a checkpoint is complete or
absent. Reading a checkpoint runs no code from it.
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
    """Describes a complete checkpoint."""

    step: int
    files: dict[str, tuple[int, int]]  # name -> bytes, CRC-32
    config: dict[str, Any]
    layout: str
    versions: dict[str, str]
    run: dict[str, Any]  # tokens seen, skipped updates, and the state that all data streams share


class Storage:
    """The folder of a run's checkpoints."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise Refusal(
                f'"{url}" cannot hold checkpoints: {error}; give a path, or a URL that fsspec supports, and install '
                "its package (s3:// needs s3fs, gs:// needs gcsfs)"
            ) from None
        self.is_local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))

    def steps(self) -> list[int]:
        """The steps that have a folder, complete or not, newest first."""
        if not self.fs.exists(self.root):
            return []
        self.fs.invalidate_cache()
        names = (path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False))
        return sorted((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), reverse=True)

    def folder(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def being_written(self, step: int) -> str:
        """The folder that a save writes to. An object store cannot rename it, so there only the manifest is last."""
        return f"{self.root}/step-{step}.writing" if self.is_local else self.folder(step)

    def describe(self, folder: str, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Size in bytes and checksum of each file, read back from the storage."""
        return {name: self._checksum(f"{folder}/{name}") for name in names}

    def names(self, folder: str) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.fs.ls(folder, detail=False))

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest and rename the folder: from now on the checkpoint exists."""
        folder = self.being_written(manifest.step)
        if self.is_local and (unseen := [name for name in manifest.files if not Path(folder, name).exists()]):
            raise OSError(f"{folder} has no {unseen[0]}, which another rank wrote; put it where all nodes share it")
        says = asdict(manifest)
        with self.fs.open(f"{folder}/{_MANIFEST}", "wb") as file:
            file.write(json.dumps({"checksum": _checksum_of(says)} | says, indent=1).encode())
        if self.is_local:
            _sync(Path(folder) / _MANIFEST)
            _sync(Path(folder))
            self.remove(self.folder(manifest.step))  # an incomplete one: a complete one would not be saved again
            Path(folder).rename(self.folder(manifest.step))
            _sync(Path(self.root))

    def examine(self, step: int) -> Manifest | str:
        """The manifest if all files exist with the sizes it lists; otherwise what is wrong, as text."""
        try:
            with self.fs.open(f"{self.folder(step)}/{_MANIFEST}", "rb") as file:
                read = json.load(file)
            if read.pop("checksum") != _checksum_of(read):
                raise ValueError("its own checksum differs")
            manifest = Manifest(**read | {"files": {name: tuple(about) for name, about in read["files"].items()}})
        except FileNotFoundError:
            return "it has no manifest, so its save never finished"
        except NotADirectoryError:
            return "it is a file, not a folder"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"its manifest cannot be read ({error})"
        if manifest.step != step:
            return f"its manifest belongs to step {manifest.step}"
        for name, (size, _) in manifest.files.items():
            try:
                found = self.fs.size(f"{self.folder(step)}/{name}")
            except FileNotFoundError:
                return f"{name} is missing"
            if found != size:
                return f"{name} has {found} bytes, the manifest says {size}"
        return manifest

    def faults(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Read these files and list those that the manifest contradicts."""
        faults = []
        for name in names:
            try:
                if self._checksum(f"{self.folder(manifest.step)}/{name}") != manifest.files[name]:
                    faults.append(f"the checksum of {name} differs")
            except FileNotFoundError:  # another process has just removed it
                faults.append(f"{name} is missing")
        return faults

    def remove(self, folder: str) -> None:
        """Remove the manifest first: if this is interrupted, the rest does not count as a checkpoint."""
        if self.fs.exists(f"{folder}/{_MANIFEST}"):
            self.fs.rm_file(f"{folder}/{_MANIFEST}")
        if self.fs.exists(folder):
            self.fs.rm(folder, recursive=True)

    def remove_unread(self, step: int) -> bool:
        """Remove a checkpoint unless a process is reading it, which an object store cannot tell; True if removed."""
        if not self.is_local:
            self.remove(self.folder(step))
            return True
        with open(f"{self.folder(step)}/{_MANIFEST}", "r+b") as file:  # NFS locks only what is open for writing
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            aside = Path(self.folder(step)).rename(f"{self.folder(step)}.writing")  # `sweep` finds it there
        self.remove(str(aside))  # after closing the manifest: NFS cannot remove an open file
        return True

    def set_aside(self, step: int) -> str:
        """Rename a checkpoint so that no start finds it; returns the new name."""
        number = 1
        while self.fs.exists(aside := f"{self.folder(step)}.aside-{number}"):
            number += 1
        self.fs.mv(self.folder(step), aside, recursive=True)
        return aside.rpartition("/")[2]

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Hold a lock that keeps other processes from removing the checkpoint."""
        if not self.is_local:
            yield
            return
        with open(f"{self.folder(step)}/{_MANIFEST}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.root).free if self.is_local and self.fs.exists(self.root) else None

    def sweep(self) -> list[str]:
        """Remove the leftovers of interrupted saves; returns their names."""
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
    """Reads the index of a checkpoint. torch unpickles it, which could run any code; here few classes are allowed."""

    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata = _IndexUnpickler(io.BytesIO(file.read())).load()
        for name, kind in metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):  # torch would unpickle it
                raise Refusal(
                    f"{self.path}: {name} is no tensor, and reading it could run any code; save it again as a tensor"
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Reader(_WithoutTrust, FileSystemReader):
    """Reads from a disk."""


class RemoteReader(_WithoutTrust, FsspecReader):
    """Reads from an fsspec URL."""


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
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13 alone uses this name
        if name not in self._ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which no index needs; refused")
        return super().find_class(module, name)


def _checksum_of(says: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(says).encode())


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_checkpoints(path: str) -> tuple[Storage, int]:
    """Storage of a run folder's checkpoints, or of a folder of checkpoints; and N if the path ends in step-N, or -1."""
    path = path.rstrip("/")
    above, _, name = path.rpartition("/")
    if step := re.fullmatch(r"step-(\d+)", name):
        return Storage(above or "."), int(step[1])
    of_run = Storage(f"{path}/checkpoint")
    return (of_run if of_run.steps() else Storage(path)), -1
