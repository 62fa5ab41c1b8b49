"""A program that is started again whenever it has ended, as Slurm or systemd would, and that can be broken."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.root import ROOT


@dataclass
class Program:
    """Something that is started again whenever it has ended."""

    name: str
    folder: Path
    words: Sequence[object]
    more: dict[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0
    ended: float = 0.0

    def tend(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None and not self.ended:
            self.ended = time.monotonic()
        if self.starts and time.monotonic() - self.ended < 1:
            return
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{self.folder.parent}:{ROOT}"} | self.more
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            words = [*map(str, self.words)]
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.starts, self.ended = self.starts + 1, 0.0

    def ranks(self) -> list[int]:
        """Of the run in this folder, without what launches them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if (
                    f"\0{self.folder}\0".encode() in words
                    and b"torch.distributed.run" not in words
                    and b"tools.start" not in words
                ):
                    found.append(int(entry.name))
        return sorted(found)

    def all(self) -> list[int]:
        own = [self.process.pid] if self.process is not None and self.process.poll() is None else []
        return sorted({*own, *self.ranks()})

    def send(self, number: int, processes: Sequence[int]) -> None:
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def step(self) -> int:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0
