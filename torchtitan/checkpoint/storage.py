"""The folder of a run's checkpoints, on a disk or at an fsspec URL: lists, verifies, completes and removes them.

A checkpoint is a folder `step-N` of torch.distributed.checkpoint with a manifest that lists the size and checksum of
each file. The last write is the rename to `step-N` (on an object store: the manifest), so a checkpoint is complete or
absent. Reading a checkpoint runs no code from it.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from torchtitan.refusal import Refusal
from torchtitan.whole_file import sync

_MANIFEST = "manifest.json"
_CHUNK = 1 << 24
# Errors of a local disk that another attempt would meet again; after any other, a checkpoint may still be whole.
_DAMAGE = {errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR}
UNFINISHED = "it has no manifest, so its save never finished"


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
        # What cannot be listed is refused: taken for an empty folder, it would make the run start again.
        self.fs.invalidate_cache()
        here = [Path(self.root), *Path(self.root).parents] if self.is_local else []
        for link in (path for path in here if path.is_symlink() and not path.exists()):
            raise Refusal(f"{link} is a link to {os.readlink(link)}, which is away; mount its disk, or remove the link")
        try:
            paths = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # clients of object stores raise their own types
            raise Refusal(f"{self.url} cannot be listed: {error}; make it readable, or choose another folder") from None
        if self.is_local and Path(self.root).is_file():
            raise Refusal(f"{self.url} is a file, where checkpoints need a folder; move it, or choose another folder")
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
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
            sync(Path(folder) / _MANIFEST)
            sync(Path(folder))
            self.remove(self.folder(manifest.step))  # an incomplete one: a complete one would not be saved again
            Path(folder).rename(self.folder(manifest.step))
            sync(Path(self.root))

    def examine(self, step: int) -> Manifest | str:
        """The manifest if all files exist with the sizes it lists; otherwise what is wrong, as text."""
        try:
            with self.fs.open(f"{self.folder(step)}/{_MANIFEST}", "rb") as file:
                read = json.load(file)
            if read.pop("checksum") != _checksum_of(read):
                raise ValueError("its own checksum differs")
            manifest = Manifest(**read | {"files": {name: tuple(about) for name, about in read["files"].items()}})
        except FileNotFoundError:
            return UNFINISHED
        except NotADirectoryError:
            return "it is a file, not a folder"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"its manifest cannot be read ({error})"
        except Exception as error:  # clients of object stores raise their own types
            return self._unreadable(step, "its manifest", error)
        if manifest.step != step:
            return f"its manifest belongs to step {manifest.step}"
        for name, (size, _) in manifest.files.items():
            try:
                found = self.fs.size(f"{self.folder(step)}/{name}")
            except FileNotFoundError:
                return f"{name} is missing"
            except Exception as error:
                return self._unreadable(step, name, error)
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
            except Exception as error:
                faults.append(self._unreadable(manifest.step, name, error))
        return faults

    def _unreadable(self, step: int, name: str, error: Exception) -> str:
        """What is wrong with the checkpoint. If only the way to it is disturbed, the start is refused."""
        if self.is_local and getattr(error, "errno", None) in _DAMAGE:
            return f"{name} cannot be read ({error})"
        raise Refusal(
            f"step {step} in {self.url}: {name} cannot be read now ({error}); start again when its storage answers"
        ) from None

    def remove(self, folder: str) -> None:
        """Remove the manifest first: if this is interrupted, the rest does not count as a checkpoint."""
        if self.fs.exists(f"{folder}/{_MANIFEST}"):
            self.fs.rm(f"{folder}/{_MANIFEST}", recursive=True)  # damage may have put a folder in its place
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
        from torchtitan.checkpoint.reading import Reader, RemoteReader

        return Reader(self.folder(step)) if self.is_local else RemoteReader(self.fs.unstrip_protocol(self.folder(step)))

    def _checksum(self, path: str) -> tuple[int, int]:
        size, checksum = 0, 0
        with self.fs.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        return size, checksum


def _checksum_of(says: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(says).encode())


def find_checkpoints(path: str) -> tuple[Storage, int]:
    """Storage of a run folder's checkpoints, or of a folder of checkpoints; and N if the path ends in step-N, or -1."""
    path = path.rstrip("/")
    above, _, name = path.rpartition("/")
    if step := re.fullmatch(r"step-(\d+)", name):
        return Storage(above or "."), int(step[1])
    of_run = Storage(f"{path}/checkpoint")
    return (of_run if of_run.steps() else Storage(path)), -1
