"""Run folders and nodes that lie, made at random: the console, the node program and `runs` serve all others meanwhile.

python -m tests.fleet.console.hostile --seconds 600 --seed 1     ten minutes by hand; the suite does a few seconds

Each file of a run may be a pipe, a link, a device, a sparse gigabyte, or text with anything in it. Each answer of a
node may hold any value. The console must show no stack, take seconds, not grow, show no byte of a file outside, and
show other runs as before. A round that fails is printed with its number; `--only` makes it again.
"""

import argparse
import base64
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from fastapi.testclient import TestClient

from tests.house.fuzzing import CORPUS, damage_json, damage_text
from titan_fleet.console.api import build_api, build_app
from titan_fleet.console.library import Library
from titan_fleet.console.nodes import Nodes
from titan_fleet.console.pages import compare, one_run
from titan_fleet.console.pages import files as files_page
from titan_fleet.console.pages import meetings as meetings_page
from titan_fleet.console.pages import runs as runs_page
from titan_fleet.node import messages, report
from titan_fleet.node.archives import Archives
from titan_fleet.node.folders import Folders
from titan_fleet.node.jobs import Jobs
from titan_fleet.node.program import Program
from titan_fleet.ssh.client import Broken
from torchtitan.config.load import check_text, to_toml
from torchtitan.refusal import Refusal
from torchtitan.tools import runs

SECONDS_EACH, HANG_SECONDS, MOST_MIB = 8, 60, 150
SECRET = "a word from outside"
VALUES = [*CORPUS, 5.5, 2**53 + 1, 2**64, -(2**63) - 1, 1e17, 1e300, float("-inf"), "\x1b]0;taken\x07", [[[]]] * 3]
HOSTS = {"host": socket.gethostname(), "boot": "", "pid": 1, "start": 1}
JOB = {
    "mark": "0" * 32,
    "code": "/code/" + "0" * 64,
    "host": socket.gethostname(),
    "rank": 0,
    "nodes": 1,
    "started": 5.0,
}
JOB |= {"head": None, "environment": {"NCCL_DEBUG": "INFO"}, "ranks_here": 2, "starter": HOSTS, "command": ["true"]}
RECORD = {"step": 3, "loss": 2.5, "tokens_per_second": 10.0, "step_seconds": 0.5, "memory_gib": 1.0}
MEETING = {"step": 3, "fragment": 0, "version": 1, "counted": ["a"], "rejected": [], "bytes_up": 1, "bytes_down": 1}
MEETING |= {"seconds": 1.0, "waited_seconds": 0.5, "apart": 0.1}
PLAN = {"layout": "1 rank", "rests_on": "a", "seconds": 0.5, "memory_gib": 2, "run": {"training.steps": 10}}
CONFIG = to_toml(
    check_text("[training]\nsteps = 10\n[job]\ndescription = 'one'\n[lr_scheduler]\nwarmup_steps = 2", "a test")
)
WHOLE: dict[str, str] = {
    "config.toml": CONFIG,
    "metrics.jsonl": "".join(json.dumps(RECORD | {"step": step}) + "\n" for step in range(1, 8)),
    "validation.jsonl": '{"step": 3, "validation_loss": 2.0}\n',
    "swarm.jsonl": json.dumps(MEETING) + "\n",
    ".lock": "process 1 on elsewhere",
    "plan_measured.json": json.dumps(PLAN),
    "train.log": "line 1\nsample after step 3: 'text'\n",
    "hang/report.txt": "no progress\n",
    "hang/rank_0.txt": "a stack\n",
    "checkpoint/step-3/manifest.json": "{}",
    "node/0/job.json": json.dumps(JOB),
    "node/0/end.json": '{"state": "ended", "exit_code": 0, "ended": 9.0}',
    "node/0/keeper.json": json.dumps(HOSTS),
    "node/0/stop.json": '{"seconds": 60}',
    "node/0/job.toml": CONFIG,
    "node/0/plan.json": json.dumps(PLAN),
    "node/0/output.log": "line 1\nsample after step 3: 'text'\n",
}
IN_TOML = [
    "1" + "0" * 5000,
    "0x" + "f" * 9000,
    str(2**64),
    "-1",
    "nan",
    "5.5",
    "'\\u001b]0;a\\u0007'",
    "[[]]",
    "1979-05-27",
]
NAMES = [b"bad", b"\xff\xfe", b"a\nb", b"\x1b[2J", b"x" * 255, "\u202eabc".encode(), b"-rf", b"@0", b"step", b"a b'\""]


def write_whole(folder: Path) -> Path:
    for name, text in WHOLE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def wild(value: Any, chance: random.Random) -> Any:
    """Several values somewhere inside are others, or gone."""
    if isinstance(value, dict):
        kept = {name: inner for name, inner in value.items() if chance.random() < 0.9}
        return {n: chance.choice(VALUES) if chance.random() < 0.2 else wild(v, chance) for n, v in kept.items()}
    return [wild(inner, chance) for inner in value] if isinstance(value, list) else value


def text_of(name: str, chance: random.Random) -> bytes:
    """What may stand in a file instead of its text."""
    whole, way = WHOLE[name].encode(), chance.randrange(12)
    if way == 0:
        return chance.randbytes(chance.choice([0, 1, 100, 100_000]))
    if way == 1:
        return b"[" * chance.choice([900, 5000, 100_000]) + b"\n"
    if way == 2:
        return whole + b"x" * chance.choice([10**5, 5 * 10**6]) + chance.choice([b"", b"\n" + whole])
    if way == 3 or (name.endswith(".log") and way < 9):
        return damage_text(whole, chance)
    if name.endswith(".toml") and way == 4:
        return b"a." * chance.choice([100, 900, 50_000]) + b"a = 1\n"
    if name.endswith(".toml"):
        steps, said = (chance.choice(IN_TOML) for _ in range(2))
        return f"[training]\nsteps = {steps}\nother = {said}\n[job]\ndescription = {said}\n".encode()
    if name.endswith((".json", ".jsonl")):
        change = wild if way < 9 else lambda value, chance: damage_json(value, chance, VALUES)
        lines = [json.dumps(change(json.loads(line), chance)) for line in whole.splitlines()]
        return "\n".join(lines * chance.choice([1, 1, 2000])).encode("utf-8", "surrogatepass") + b"\n"
    return damage_text(whole, chance)


def spoil(file: Path, name: str, outside: Path, chance: random.Random) -> None:
    """Put something else where this file of a run was."""
    file.unlink()
    way = chance.randrange(16)
    if way == 0:
        os.mkfifo(file)
    elif way == 1:
        file.symlink_to(chance.choice([outside / name, Path("/dev/zero"), Path("/"), file]))
    elif way == 2:
        with contextlib.suppress(PermissionError):
            os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end
    elif way == 3:
        file.mkdir()
    elif way == 4:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(file))
    elif way == 5:
        file.touch()
        os.truncate(file, chance.choice([2**18 + 1, 2**30, 2**40]))
    elif way < 15:
        file.write_bytes(text_of(name, chance))
        with contextlib.suppress(OSError, OverflowError):
            os.utime(file, (0, chance.choice([0, -5, 1e10, 2**33, 1e17, 2**62])))


def make_run(top: Path, outside: Path, chance: random.Random) -> Path:
    folder = Path(os.fsdecode(os.path.join(os.fsencode(top), chance.choice(NAMES))))
    if folder.exists():
        return folder
    write_whole(folder)
    for name in WHOLE:
        if chance.random() < 0.5:
            spoil(folder / name, name, outside, chance)
    if chance.random() < 0.2:
        inner = folder / chance.choice(["node/0", "node", "hang", "checkpoint"])
        shutil.rmtree(inner)
        inner.symlink_to(outside / inner.relative_to(folder))
    if chance.random() < 0.1:
        for number in range(50):
            (folder / f"{number}{chance.choice(VALUES[-8:])}"[:50].replace("/", "")).touch()
    return folder


FINE = {"run": "fine", "folder": "/runs/fine", "state": "ended", "is_own": True, "rank": 0, "nodes": 1, "step": 3}
FINE |= {"started": 5.0, "ended": 9.0, "exit_code": 0, "steps": 10, "loss": 2.5, "log": "node/0/output.log"}


class Liar:
    """A node whose answers are damaged; what a client does with a line is the client's own."""

    trouble, exit_code = "", None

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.name = chance, "far"

    def ask(self, request: Callable[..., messages.Request], timeout: float = 60, **fields: Any) -> Any:
        asked = request(id=1, **fields)
        line = json.dumps(self.damaged(self.answer(asked.do)), ensure_ascii=self.chance.random() < 0.5)
        data = line.encode("utf-8", "surrogatepass")
        if asked.do != "runs" and self.chance.random() < 0.1:
            data = damage_text(data, self.chance)
        try:
            answer = messages.read_answer(data)
        except messages.ValidationError:
            raise Broken("no answer") from None
        is_json = "ud800" not in ascii(line)
        assert asked.do != "runs" or not is_json or (answer.kind == "runs" and answer.runs[-1].run == "fine"), answer
        if isinstance(answer, messages.Refused) or answer.kind != asked.do:
            raise Refusal("refused")
        return answer

    def damaged(self, answer: Any) -> Any:
        if answer["kind"] == "runs":  # one bad row spoils no others
            return answer | {"runs": [*(wild(row, self.chance) for row in answer["runs"]), FINE]}
        if self.chance.random() < 0.5:
            return wild(answer, self.chance) | {"id": 1, "kind": answer["kind"]}
        return damage_json(answer, self.chance, VALUES)

    def answer(self, kind: str) -> dict[str, Any]:
        row = {
            "run": "mine",
            "folder": "/runs/mine",
            "state": "ended",
            "is_own": True,
            "rank": 0,
            "nodes": 1,
            "step": 3,
        }
        row |= {"started": 5.0, "ended": 9.0, "exit_code": 0, "steps": 10, "loss": 2.5, "log": "node/0/output.log"}
        files = [{"path": name, "size": 5, "changed": 9.0} for name in WHOLE]
        text = WHOLE[self.chance.choice(list(WHOLE))].encode()
        data = {"data": base64.b64encode(text).decode(), "size": len(text), "is_end": True}
        own = report.ReportAnswer.model_validate(OWN_REPORT).model_dump(mode="json")
        of_kind = {
            "report": own,
            "runs": {"runs": [FINE | {"rank": rank} for rank in range(1, 4)], "mark": "1"},
            "files": {"files": files},
        }
        return of_kind.get(kind, data) | {"id": 1, "kind": kind}


OWN_REPORT: dict[str, Any] = {}


class Place:
    """A console over one folder of runs, a node program over the same, and what is found with them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outside = folder, folder / "outside"
        self.home, self.watched = folder / "home", folder / "watched"
        (folder / "nodes.toml").write_text('[[node]]\nhost = "far"\n')
        for name in WHOLE:
            (self.outside / name).parent.mkdir(parents=True, exist_ok=True)
            (self.outside / name).write_text(
                WHOLE[name].replace("one", SECRET).replace("line", SECRET) + f"# {SECRET}\n"
            )
        write_whole(self.home / "runs/good"), write_whole(self.watched / "good")
        at = write_whole(folder / "deep")
        for _ in range(1100):  # more than Python's calls
            os.mkdir(at := at / "d")
        self.nodes = Nodes(self.home, folder / "nodes.toml", ["ssh"], "home")
        self.library = Library(self.home, [self.watched], self.nodes)
        app = build_app()
        app.include_router(build_api(self.library, self.nodes, None, None, None))  # type: ignore[arg-type]
        self.client = TestClient(app)
        self.client.__enter__()  # one event loop for all requests
        OWN_REPORT.update(report.report(1, self.home, []).model_dump(mode="json"))
        self.library.refresh()
        self.first = self.good()

    def good(self) -> dict[str, Any]:
        """All that the API says of the runs that nobody spoiled."""
        rows = [row for row in self.client.get("/api/runs").json() if row["name"] == "good"]
        paths = ("", "/metrics", "/hang", "/prediction", "/files", "/logs/train.log")
        return {
            row["id"] + path: self.client.get(f"/api/runs/{row['id']}{path}").json() for row in rows for path in paths
        }

    def attack(self, chance: random.Random) -> Counter[str]:
        """One round: made runs and a lying node beside the good ones, looked at in each way that there is."""
        tops = [*[self.home / "runs"] * 2, *[self.watched] * 2]
        made = {make_run(top, self.outside, chance) for top in tops}
        is_deep = chance.random() < 0.1
        if is_deep:
            os.rename(self.folder / "deep", self.watched / "deep")
        far = self.nodes.members["far"]
        far.node = liar = Liar(chance)  # type: ignore[assignment]
        try:
            for name, kind in (("report", messages.Report), ("runs", messages.Runs)):
                with contextlib.suppress(Refusal):
                    answer = liar.ask(kind)
                    setattr(far, name, answer.runs if name == "runs" else answer)
            self.library.refresh()
            seen = self.look(chance)
            assert self.good() == self.first, "a good run is shown differently"
            self.list_in_a_terminal()
            self.ask_the_node(chance)
        finally:
            for run in made:
                shutil.rmtree(run)
            if is_deep:
                os.rename(self.watched / "deep", self.folder / "deep")
            far.runs, far.report = (), None
            self.library._curves.clear()
        return seen

    def look(self, chance: random.Random) -> Counter[str]:
        seen: Counter[str] = Counter()
        said = [self.get("/api/runs"), self.get("/api/nodes")]
        entries = [entry for entry in self.library.entries() if entry.page.name != "good"]
        for entry in entries:
            id, place = entry.page.id, entry.place
            for path in (
                "",
                "/metrics",
                "/hang",
                "/prediction",
                "/files",
                "/logs/train.log",
                "/logs/node%2f0%2foutput.log",
            ):
                said.append(self.get(f"/api/runs/{id}{path}"))
            said.append(self.get(f"/api/runs/{id}/logs/train.log?search=line&position=-1000"))
            for look in (
                lambda id=id: self.library.samples(id),
                lambda id=id: compare.differences(self.library, [id, *self.first][:1]),
                lambda id=id: compare._lines(self.library, [id], "loss", "elapsed"),
                lambda place=place: meetings_page.sites_of(meetings_page.read_meetings(place.read)),
                lambda id=id, place=place: [files_page._row(id, row) for row in place.files()[0]],
                lambda id=id: self.library.read(id, chance.choice(list(WHOLE)), 0, 1000)[0].decode(errors="replace"),
            ):
                with contextlib.suppress(Refusal, OSError):
                    said.append(orjson.dumps(look()))
            said.append(orjson.dumps([runs_page.row(entry.page), one_run._facts(entry.page)]))
            seen["bad" if entry.page.trouble else "plain"] += 1
        assert not any(SECRET.encode() in one for one in said), "what lies outside is shown"
        return seen

    def get(self, path: str) -> bytes:
        answer = self.client.get(path)
        assert answer.status_code < 500 or answer.status_code == 502, (path, answer.text[:500])
        return answer.content

    def list_in_a_terminal(self) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            runs.run(argparse.Namespace(folder=str(self.watched), compare=None), [])
        text = out.getvalue()
        assert text.encode() and text.count("\n") in range(2, 6) and "\x1b" not in text and SECRET not in text, text

    def ask_the_node(self, chance: random.Random) -> None:
        folders, out = Folders(self.home / "runs", [self.watched]), io.BytesIO()
        archives = Archives(self.home / "code", [])
        program = Program(self.home, folders, archives, Jobs(folders, archives, []), out)
        names = [row.run for row in folders.rows()]
        assert {"good", "@0/good"} <= {*names}
        asked = [{"do": "runs"}, *({"do": "files", "run": run} for run in names)]
        asked += [
            {"do": way, "run": run, "path": path} for run in names for path in WHOLE for way in ("read", "follow")
        ]
        asked += [{"do": "stop", "run": run, "seconds": 0} for run in names if not run.startswith("@")]
        chance.shuffle(asked)
        program.serve(io.BytesIO(b"".join(json.dumps(one | {"id": n}).encode() + b"\n" for n, one in enumerate(asked))))
        lines = out.getvalue().splitlines()
        assert len(lines) == len(asked) and SECRET.encode() not in b"".join(lines)
        for line in lines:
            answer = messages.read_answer(line)
            assert not (isinstance(answer, messages.Refused) and "the node program fails" in answer.why), answer.why


def rounds(folder: Path, seconds: float, seed: int, only: int | None = None) -> Iterator[tuple[int, Counter[str], str]]:
    """Each round with what it saw, and the traceback where something failed."""
    place, end, number = Place(folder), time.monotonic() + seconds, only or 0
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        begun, seen, failed = time.monotonic(), Counter[str](), ""
        try:
            seen = place.attack(random.Random(f"{seed} {number}"))
            took = time.monotonic() - begun
            assert took < SECONDS_EACH, f"it took {took:.1f} s"
        except Exception:
            failed = traceback.format_exc()
        yield number, seen, failed
        if only is not None:
            break
        number += 1
    faulthandler.cancel_dump_traceback_later()


def mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this round alone")
    args = parser.parse_args()
    ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX: else glibc keeps some MiB for each thread, which looks like growth
    total, failures, first = Counter[str](), 0, 0
    folder = tempfile.mkdtemp()
    for number, seen, failed in rounds(Path(folder), args.seconds, args.seed, args.only):
        total, first = total + seen, first or mib()
        if failed:
            failures += 1
            print(f"round {number}:\n{failed}", flush=True)
    subprocess.run(["rm", "-rf", folder], check=True)  # Python's own stops at deep folders
    grown = mib() - first
    print(f"{number + 1} rounds, {dict(total)}, {failures} failed, grown by {grown} MiB")
    raise SystemExit(bool(failures) or grown > MOST_MIB)
