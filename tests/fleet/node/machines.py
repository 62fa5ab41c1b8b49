"""A node program in its own process, what it is sent, and code that takes no time to start: a job may be any code."""

import base64
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# Its configuration says what it does: it prints lines, starts a process in a session of its own, or refuses.
JOB = """
import os, signal, subprocess, sys, time
text = open(os.environ["CONFIG_FILE"]).read()
if os.environ.get("PRINT_ONLY"):
    sys.exit("this configuration is refused" if "refuse" in text else 0)
if "session" in text:
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(300)"
    deaf = [sys.executable, "-c", deaf, os.environ["CONFIG_FILE"]]  # by which the tests find it
    subprocess.Popen(deaf, start_new_session=True)
    subprocess.Popen(deaf, start_new_session=True, env={})
    orphan = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan, *deaf], env={})
if "node 1 fails" in text and os.environ["NODE_RANK"] == "1":
    sys.exit(3)
if "deaf" in text:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("deaf now", flush=True)
if "variables" in text:
    print(*(f"{name}={os.environ[name]}" for name in ("NCCL_DEBUG", "NGPU", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")))
count = int(text.partition("lines = ")[2].split()[0])
for number in range(count):
    while "pause" in text and number == count // 2 and not os.path.exists(os.environ["CONFIG_FILE"] + ".go"):
        time.sleep(0.02)
    print(f"line {number}", flush=True)
    time.sleep(0.002)
"""


# A probe of it writes what a probe writes, unless the test lets it fail.
PROBE = """
import os, sys
text = 'rests_on = "a test"\\n[probe]\\ngbit = [[8.0, 0.1], [4.0, 8.0]]\\ndelay_ms = [[0.0, 20.0], [20.0, 0.0]]'
if not os.environ.get("PRINT_ONLY"):
    if os.environ["NODE_RANK"] == os.environ.get("NCCL_FAILS"):
        sys.exit(3)
    open(sys.argv[sys.argv.index("--out") + 1], "w").write(text[: int(os.environ.get("NCCL_BYTES", 1000))])
"""


def archive(files: Mapping[str, str], more: Callable[[tarfile.TarFile], None] = lambda tar: None) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
        more(tar)
    return gzip.compress(raw.getvalue(), mtime=0)


def commit(repository: Path, files: Mapping[str, str]) -> str:
    """A new repository with these files; its commit."""
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run(["git", *identity, *words], cwd=repository, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    return head.stdout.strip()


FILES = {"torchtitan/launch/start.py": "", "torchtitan/tools/start.py": JOB, "torchtitan/__main__.py": PROBE}
CODE = archive(FILES)
HASH = hashlib.sha256(CODE).hexdigest()


def pieces(data: bytes, name: str | None = None) -> dict[str, Any]:
    """A request that puts a small archive at once."""
    name = name or hashlib.sha256(data).hexdigest()
    return {"do": "put", "name": name, "position": 0, "data": base64.b64encode(data).decode(), "is_last": True}


class Program:
    """A node program, spoken to in raw lines as a hostile client would."""

    def __init__(self, home: Path, *options: str) -> None:
        command = [sys.executable, "-m", "torchtitan", "node", "--home", str(home), *options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)
        self.home, self._id = home, 0

    def write(self, line: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def send(self, **fields: Any) -> int:
        self._id += 1
        self.write(json.dumps({"id": self._id} | fields).encode())
        return self._id

    def ask(self, **fields: Any) -> dict[str, Any]:
        asked, answer = self.send(**fields), self.read()
        assert answer["id"] == asked
        return answer

    def start(self, run: str, config: str = "lines = 3", **fields: Any) -> dict[str, Any]:
        return self.ask(do="start", run=run, config=config, code=HASH, **fields)

    def row(self, run: str) -> dict[str, Any]:
        return next(row for row in self.ask(do="runs")["runs"] if row["run"] == run)

    def wait(self, run: str, state: str) -> dict[str, Any]:
        end = time.monotonic() + 30
        while (row := self.row(run))["state"] != state:
            assert time.monotonic() < end, row
            time.sleep(0.05)
        return row

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def processes_of(home: Path) -> dict[int, str]:
    """The processes that a run below this home has started, or that keep one, with their command lines."""
    marks = [json.loads(file.read_text())["mark"] for file in home.glob("runs/*/node/*/job.json")]
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if any(mark.encode() in words for mark in marks) or f"{home}/runs".encode() in words.partition(b"SIG_IGN")[2]:
            found[int(pid)] = words.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def wait_until_nothing_runs(*homes: Path) -> None:
    """A keeper writes how its run ended, and then ends itself."""
    end = time.monotonic() + 60
    while left := {pid: words for home in homes for pid, words in processes_of(home).items()}:
        assert time.monotonic() < end, left
        time.sleep(0.05)
