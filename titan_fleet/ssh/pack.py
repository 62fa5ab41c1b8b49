"""Packs this checkout for nodes: a node names the archive by its hash, and takes it only once."""

import gzip
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_fleet.node.archives import hash_of
from torchtitan.refusal import Refusal
from torchtitan.root import INSIDE, ROOT


@dataclass(frozen=True)
class Packed:
    """An archive of a checkout: the same files make the same hash."""

    file: Path
    code: str
    names: list[str]
    untracked: list[str]  # those of `names` that git does not know


@contextmanager
def packed_checkout() -> Iterator[Packed]:
    """The archive of this checkout; it is gone afterwards."""
    if INSIDE.is_dir():
        raise Refusal("this sends a checkout to the nodes, and an installed package is none; start it from a clone")
    with tempfile.TemporaryDirectory() as folder:
        yield pack(ROOT, Path(folder))


def pack(checkout: Path, into: Path) -> Packed:
    """Pack what git tracks and what it does not ignore. A link is packed as the file to which it leads."""
    tracked, untracked = _listed(checkout, "--cached"), _listed(checkout, "--others", "--exclude-standard")
    names = sorted({*tracked, *untracked})
    root, file = checkout.resolve(), into / "checkout.tar.gz"
    with file.open("w+b") as out:
        with (
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=out, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for name in names:
                real = (checkout / name).resolve()
                if not real.is_relative_to(root):
                    raise Refusal(f"{name} is a link to {real}, outside the checkout; copy the file, or ignore it")
                entry = tarfile.TarInfo(name)
                entry.size = real.stat().st_size
                entry.mode = 0o755 if real.stat().st_mode & stat.S_IXUSR else 0o644
                with real.open("rb") as source:
                    tar.addfile(entry, source)
        return Packed(file, hash_of(out), names, untracked)


def _listed(checkout: Path, *which: str) -> list[str]:
    command = ["git", "-C", str(checkout), "ls-files", "-z", *which]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise Refusal(f"{checkout} is no checkout that git can list ({said}); start from a clone") from None
    names = (os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
    return [name for name in names if (checkout / name).is_file()]
