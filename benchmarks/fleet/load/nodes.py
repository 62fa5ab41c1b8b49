"""Many nodes in one process, light but for their answers: these come from the node program itself, over real files.

python -m benchmarks.fleet.load.nodes FOLDER NODES RUNS LINES    RUNS of the nodes have a run, which writes its log
python benchmarks/fleet/load/nodes.py FOLDER ... -- HOST ...     stands in for ssh: it gives its ends of the line away
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any


def at(seconds: float) -> str:
    """A moment as a line of a log shows it."""
    return f"at={seconds:.3f};"


def take_part(folder: str, host: str) -> None:
    """As ssh: the process of nodes reads and writes this line from now on."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"{folder}/line")
        socket.send_fds(line, [host.encode()], [0, 1])


def main(folder: Path, nodes: int, runs: int, lines: float) -> None:
    from titan_fleet.node import processes, report
    from titan_fleet.node.archives import Archives
    from titan_fleet.node.folders import Folders
    from titan_fleet.node.jobs import Jobs
    from titan_fleet.node.messages import Device, Message, Report
    from titan_fleet.node.program import Program

    said = report.report(0, folder, [])

    class StandIn(Program):
        """A node of eight devices. Asking this machine's devices so often would cost more than all else."""

        def _report(self, request: Report) -> Message:
            devices = [Device(name="GPU", kind="cuda", memory_bytes=2**36, used_bytes=2**35, utilisation=0.9)] * 8
            return said.model_copy(update={"id": request.id, "devices": devices, "load": time.time() % 8})

    def serve(name: str, read: int, write: int) -> None:
        home = folder / name
        folders, archives = Folders(home / "runs", []), Archives(home / "code", [])
        with os.fdopen(read, "rb") as source, os.fdopen(write, "wb") as out:
            StandIn(home, folders, archives, Jobs(folders, archives, []), out).serve(source)

    me = processes.identity(os.getpid())
    logs, records = [], []
    for number in range(nodes):
        part = folder / f"node{number:03}/runs/run{number:03}/node/0"
        if number >= runs:
            continue
        part.mkdir(parents=True)
        (part.parents[1] / "config.toml").write_text("[training]\nsteps = 1000000000\n")
        job: dict[str, Any] = {"mark": "", "command": [], "code": "0" * 64, "host": me["host"]}
        (part / "job.json").write_text(json.dumps(job | {"rank": 0, "nodes": 1, "started": time.time()}))
        (part / "keeper.json").write_text(json.dumps(me))
        logs.append((part / "output.log").open("ab", buffering=0))
        records.append((part.parents[1] / "metrics.jsonl").open("ab", buffering=0))

    def write() -> None:
        """In turn each run gets a line; and once a second each a record, whose step is the time in milliseconds."""
        begun, count = time.time(), 0
        (folder / "begun").write_text(str(begun))
        while True:
            number, turn = count % runs, count // runs
            now = time.time()
            logs[number].write(b"line %08d %s loss 2.3456\n" % (turn, at(now).encode()))
            if turn % max(1, round(lines / runs)) == 0:
                step = int((now - begun) * 1000)
                record = {"step": step, "loss": 2 + 1 / (1 + turn), "tokens_per_second": 1e5, "step_seconds": 0.001}
                records[number].write(json.dumps(record).encode() + b"\n")
            count += 1
            time.sleep(max(0.0, begun + count / lines - time.time()))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/line")
        listener.listen(nodes)
        threading.Thread(target=write, daemon=True).start()
        print("ready", flush=True)
        while True:
            line, _ = listener.accept()
            with line:
                name, descriptors, _, _ = socket.recv_fds(line, 256, 2)
            threading.Thread(target=serve, args=(name.decode(), *descriptors), daemon=True).start()


if __name__ == "__main__":
    if "--" in sys.argv:
        take_part(sys.argv[1], sys.argv[sys.argv.index("--") + 1])
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
