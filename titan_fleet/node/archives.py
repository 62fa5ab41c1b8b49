"""Code for runs: archives of a checkout, named by their hash, and commits of allowed repositories.

Both lie below `code/`, complete or absent. An archive holds plain files and folders: no link, no path that leads out.
"""

import base64
import gzip
import hashlib
import os
import re
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote

from titan_fleet.node.messages import Code, Git
from torchtitan.launch import bounded
from torchtitan.refusal import Refusal

MOST_BYTES = 2**30  # of an archive
MOST_UNPACKED_BYTES = 2**32
MOST_FILES = 100_000
_ENTRY = "torchtitan/launch/start.py"  # what every code folder must have
_GIT_SECONDS = 600
_TRANSPORTS = "file:git:http:https:ssh"
_URL, _SCP = re.compile(r"(file://|(?:git|https?|ssh)://[^/]+)(?:/(.*))?"), re.compile(r"([\w.@-]+:)(.*)")
_PART = re.compile(r"[\w.~+@=,() -]+")  # of a path: nothing that a program on the way could take for a separator


@dataclass(frozen=True)
class Address:
    """Of a repository, as git, a server and whatever is between read it: no `..`, and nothing that may become one."""

    host: str  # with scheme, user and port
    path: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> "Address | None":
        """None, if two programs could read the address differently."""
        url = _URL.fullmatch(text)
        if (found := url or _SCP.fullmatch(text)) is None:
            return None
        parts = (found[2] or "").removesuffix("/").split("/")
        path = tuple(unquote(part) if url else part for part in parts) if parts != [""] else ()
        return cls(found[1], path) if all(_PART.fullmatch(part) and part.strip(". ") for part in path) else None

    def is_below(self, top: "Address") -> bool:
        """Whether it is `top`, or lies below."""
        return self.host == top.host and self.path[: len(top.path)] == top.path


class Archives:
    """The code folder of a node."""

    def __init__(self, folder: Path, git: Sequence[str]) -> None:
        self._folder, self.git = folder, list(git)
        self._allowed: list[Address] = []
        for one in git:
            if (top := Address.read(one)) is None:
                raise Refusal(f"--git {one!a} is no address of repositories; write https://host/group, or git@host:a")
            self._allowed.append(top)
        self._lock = threading.Lock()
        self._part: IO[bytes] | None = None  # of the archive that is being sent
        self._part_of = ""
        folder.mkdir(parents=True, exist_ok=True)

    def place_of(self, code: Code) -> Path:
        return self._folder / (code.commit if isinstance(code, Git) else code)

    def has(self, code: Code) -> bool:
        """Whether the code is here; a commit is fetched first."""
        if isinstance(code, Git):
            with self._lock:
                self._fetch(code)
        return self.place_of(code).is_dir()

    def put(self, name: str, position: int, data: str, is_last: bool) -> bool:
        """Take the next piece of an archive. Whether the code is here now."""
        piece = base64.b64decode(data)
        with self._lock:
            if self.place_of(name).is_dir():
                return True
            if position == 0:  # without a name on the disk, so it goes with this program
                self._part_of, self._part = name, tempfile.TemporaryFile(dir=self._folder)
            if self._part is None or (self._part_of, self._part.tell()) != (name, position):
                raise Refusal(f"position = {position} does not go on with this archive; send it from position 0")
            if position + len(piece) > MOST_BYTES:
                raise Refusal(f"the archive is larger than {MOST_BYTES} bytes; leave data and weights out of it")
            self._part.write(piece)
            if is_last:
                with self._part as whole:
                    self._part = None
                    self._unpack(whole, name)
        return is_last

    def _unpack(self, archive: IO[bytes], name: str) -> None:
        if (found := hash_of(archive)) != name:
            raise Refusal(f"the archive's SHA-256 is {found} and not {name}; send it again from position 0")
        if not hasattr(tarfile, "data_filter"):
            raise Refusal("this Python unpacks without a filter; use 3.10.12, 3.11.4, 3.12 or later on the node")
        archive.seek(0)
        with self._complete(name) as to:
            try:
                with tarfile.open(fileobj=archive, mode="r:gz") as tar:
                    tar.extractall(to, filter=_Bounds())
            except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
                raise Refusal(f"the archive cannot be unpacked: {error}; titan_fleet/ssh/pack.py packs it") from None

    def _fetch(self, code: Git) -> None:
        asked = Address.read(code.git)
        if asked is None or not any(map(asked.is_below, self._allowed)):
            names = ", ".join(self.git) or "none"
            raise Refusal(f"git = {code.git} is not allowed on this node; it allows addresses below: {names} (--git)")
        if self.place_of(code).is_dir():
            return
        with self._complete(code.commit) as to:
            _git(to, "init", "--quiet", "--template=")
            _git(to, "fetch", "--quiet", "--depth=1", "--", code.git, code.commit)
            _git(to, "-c", "core.hooksPath=/dev/null", "checkout", "--quiet", "--detach", code.commit)

    @contextmanager
    def _complete(self, name: str) -> Iterator[Path]:
        """A folder to fill, which gets its name only once it is whole."""
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".unpacking-", ignore_cleanup_errors=True) as folder:
            inside = Path(folder) / "code"
            inside.mkdir()
            yield inside
            if not (inside / _ENTRY).is_file():
                raise Refusal(f"code {name} has no {_ENTRY}; send a checkout of this recipe")
            try:
                inside.rename(self._folder / name)
            except OSError:  # another node of the same disk was faster
                if not (self._folder / name).is_dir():
                    raise


class _Bounds:
    """A filter for tarfile: it refuses what is no plain file or folder, and stops an archive that grows too large."""

    def __init__(self) -> None:
        self._files = self._bytes = 0

    def __call__(self, member: tarfile.TarInfo, to: str) -> tarfile.TarInfo | None:
        path = PurePosixPath(member.name)
        if not (member.isreg() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise Refusal(f"the archive holds {member.name!a}, no plain file inside it; pack files and folders alone")
        self._files, self._bytes = self._files + 1, self._bytes + member.size
        if self._files > MOST_FILES or self._bytes > MOST_UNPACKED_BYTES:
            raise Refusal(f"it unpacks to more than {MOST_FILES} files or {MOST_UNPACKED_BYTES} bytes; send less")
        return tarfile.data_filter(member, to)


def _git(folder: Path, *words: str) -> None:
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ALLOW_PROTOCOL": _TRANSPORTS}
    command = ["git", "-c", "submodule.recurse=false", *words]
    try:
        done = bounded.output(command, _GIT_SECONDS, cwd=folder, env=os.environ | quiet)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refusal(f"git does not run here: {error}; put an archive instead") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise Refusal(f"git {words[0]} fails: {said}; check the address, the commit and the node's deploy key")


def hash_of(file: IO[bytes]) -> str:
    found = hashlib.sha256()
    file.seek(0)
    while piece := file.read(2**20):
        found.update(piece)
    return found.hexdigest()
