"""The files of a base, on which an adapter is trained, and one hash of all that they hold."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.checkpoint.storage import Manifest, find_checkpoints
from torchtitan.refusal import Refusal
from torchtitan.weights.files import find_files

_CHUNK, _THREADS = 1 << 24, 4


@dataclass(frozen=True)
class Base:
    """Where weights lie."""

    where: str  # absolute, so that another working directory finds them
    files: Mapping[str, str]  # name -> path
    fs: Any = None  # of a checkpoint

    def fingerprint(self, shared: bool = False) -> str:
        """SHA-256 over the contents of all files. With `shared` all ranks call it, and each reads its share."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
        mine = sorted(self.files)[rank::size]
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = dict(zip(mine, pool.map(self._digest, mine), strict=True))
        if size > 1:
            everyone: list[dict[str, str]] = [{}] * size
            dist.all_gather_object(everyone, digests)
            digests = {name: digest for each in everyone for name, digest in each.items()}
        return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        with self.fs.open(self.files[name], "rb") if self.fs else open(self.files[name], "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


def find_base(path: str) -> Base:
    """What lies at a path: files of weights, or the newest complete checkpoint."""
    files = find_files(path) or ([] if "://" in path else sorted(Path(path).glob("consolidated.*.pth")))
    if files:
        where = files[0] if len(files) == 1 and Path(path).is_file() else files[0].parent
        return Base(str(where.absolute()), {file.name: str(file) for file in files})
    storage, step = find_checkpoints(path)
    found = map(storage.examine, storage.steps() if step < 0 else [step])
    manifest = next((each for each in found if isinstance(each, Manifest)), None)
    if manifest is None:
        raise Refusal(f"{path} holds no complete checkpoint; name a run, a step's folder or files of weights")
    folder = storage.folder(manifest.step)
    address = str(Path(folder).absolute()) if storage.is_local else storage.fs.unstrip_protocol(folder)
    return Base(address, {name: f"{folder}/{name}" for name in manifest.files}, storage.fs)
