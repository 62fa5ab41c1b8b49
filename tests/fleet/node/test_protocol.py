"""The node program against a client that wants more than it may have."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.node.machines import CODE, HASH, ROOT, Program, archive, commit, pieces
from titan_fleet.node import archives, processes, report
from titan_fleet.node.messages import CHUNK_BYTES, LINE_BYTES, MOST_ROWS
from titan_fleet.ssh.pack import pack
from torchtitan.foreign import read_piece
from torchtitan.launch import bounded
from torchtitan.refusal import Refusal

RECIPE = {"torchtitan/launch/start.py": ""}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    home, watched = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("watched")
    (watched / "theirs").mkdir()
    (watched / "theirs/config.toml").write_text("[training]\nsteps = 7\n")
    (watched / "theirs/metrics.jsonl").write_text('{"step": 7, "loss": 1.5}\n')
    (watched / "no_run").mkdir()
    for secret in (watched / "secret", watched / "no_run/secret"):
        secret.write_text("no run")
    running = Program(home, "--watch", str(watched), "--git", "https://example.org/mine", "--env", "HF_TOKEN")
    assert running.ask(**pieces(CODE))["is_here"]
    assert running.start("mine")["kind"] == "start"
    running.wait("mine", "ended")
    yield running
    running.close()


def test_a_report_says_what_the_machine_is(program: Program) -> None:
    said = program.ask(do="report")
    assert said["cores"] >= 1 and said["memory_bytes"] > 2**28 and said["git"] == ["https://example.org/mine"]
    assert isinstance(program.ask(do="port")["port"], int)


def test_who_names_the_rows_that_it_has_waits_for_others(tmp_path: Path) -> None:
    waits = Program(tmp_path)
    mark = waits.ask(do="runs")["mark"]
    begun = time.monotonic()
    assert waits.ask(do="runs", known=mark, seconds=1) | {"id": 0} == {**waits.ask(do="runs"), "id": 0}
    assert time.monotonic() - begun > 1
    asked = waits.send(do="runs", known=mark, seconds=60)
    part = tmp_path / "runs/new/node/0"
    part.mkdir(parents=True)
    job = {"code": HASH, "rank": 0, "nodes": 1, "started": 1.0, "host": socket.gethostname()}
    (part / "job.json").write_text(json.dumps(job))
    answer = waits.read()
    assert (answer["id"], answer["runs"][0]["run"]) == (asked, "new") and answer["mark"] != mark
    waits.send(do="runs", known=answer["mark"], seconds=60)
    waits.close()
    assert time.monotonic() - begun < 60


def test_the_lines_of_nvidia_smi_become_devices() -> None:
    first, second = report.parse_devices("NVIDIA H100, PCIe, 81559, 512, 37\nbroken\nMIG 1g, 9728, 1, [N/A]\n")
    assert (first.name, first.memory_bytes, first.utilisation) == ("NVIDIA H100, PCIe", 81559 * 2**20, 0.37)
    assert second.utilisation is None


def test_a_process_that_no_signal_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi, begun = tmp_path / "nvidia-smi", time.monotonic()
    smi.write_text(f"#!/bin/sh\necho $$ $PPID >>{tmp_path}/pids\nexec sleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(report, "_SMI_SECONDS", 1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)  # as in a driver that hangs
    assert report.devices() == report.devices() == []  # the second call starts none
    with pytest.raises(subprocess.TimeoutExpired):
        bounded.output([str(smi)], 1)
    assert time.monotonic() - begun < 60  # as smi would take
    own: list[int] = []
    while len(own) < 2:  # a node program that another test has left may ask, too
        lines = (tmp_path / "pids").read_text().splitlines() if (tmp_path / "pids").exists() else []
        own = [int(pid) for pid, parent in map(str.split, lines) if int(parent) == os.getpid()]
    for pid in own:
        os.kill(pid, 9)
    for _, process in bounded._killed:
        process.wait()
    assert len(own) == 2


START = {"do": "start", "run": "other", "config": "", "code": HASH}


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"{" * 10_000,
        b'{"id": 1}',
        b'{"id": -1, "do": "report"}',
        b'{"id": 1, "do": "shell", "command": "id"}',
        b'{"id": 1, "do": "report", "and": "more"}',
        *(
            json.dumps({"id": 1} | wrong).encode()
            for wrong in [
                START | {"run": "../mine"},
                START | {"run": "a/b"},
                START | {"run": ".hidden"},
                START | {"run": "a\n"},
                START | {"run": "@0/theirs"},
                START | {"code": "../" + HASH[3:]},
                START | {"head": "-oProxyCommand=id"},
                START | {"head": "$(id)"},
                START | {"environment": {"A B": "1"}},
                START | {"environment": {"NCCL_DEBUG": "a\nb"}},
                START | {"nodes": 0},
                {"do": "delete", "run": "@0/theirs"},
                {"do": "stop", "run": "@0/theirs"},
                {"do": "put", "name": HASH, "position": 0, "data": "%%%"},
                {"do": "put", "name": HASH, "position": 0, "data": "AAA"},
                {"do": "put", "name": HASH, "position": 0, "data": "A" * (2 * CHUNK_BYTES)},
                {"do": "read", "run": "mine", "path": "a\0b"},
            ]
        ),
    ],
    ids=str,
)
def test_a_line_that_is_no_message_is_refused_and_the_program_goes_on(program: Program, line: bytes) -> None:
    program.write(line)
    answer = program.read()
    assert answer["id"] is None and answer["kind"] == "refused" and answer["why"]
    assert program.ask(do="port")["kind"] == "port"


def test_an_oversize_line_is_refused_without_its_memory(program: Program) -> None:
    def peak() -> int:
        return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{program.process.pid}/status").read_text())[0])

    before = peak() if sys.platform == "linux" else 0
    program.write(b"x" * (30 * LINE_BYTES))
    assert program.read()["why"].startswith("a line has more than")
    assert program.ask(do="port")["kind"] == "port"
    assert sys.platform != "linux" or peak() - before < 5 * LINE_BYTES / 1024


@pytest.mark.parametrize(
    ("run", "path"),
    [
        ("mine", "../mine/node/0/job.json"),
        ("mine", "/etc/hostname"),
        ("mine", "node/../../mine/node"),
        ("mine", "out"),
        ("mine", "out/hostname"),
        ("mine", "pipe"),
        ("mine", "node"),
        ("mine", "absent"),
        ("@0/theirs", "../secret"),
        ("@0/../secret", "a"),
        ("@0", "../../x"),
        ("@0", "secret"),
        ("@0", "theirs/config.toml"),
        ("@0/no_run", "secret"),
        ("@7/theirs", "config.toml"),
        ("others", "config.toml"),
    ],
)
def test_no_path_leads_out_of_a_run(program: Program, run: str, path: str) -> None:
    folder = program.home / "runs/mine"
    if not (folder / "pipe").exists():
        (folder / "out").symlink_to("/etc")
        os.mkfifo(folder / "pipe")
    for request in ("read", "follow") if path not in ("absent", "pipe", "node") else ("read",):
        assert program.ask(do=request, run=run, path=path)["kind"] == "refused"
    assert not any(row["path"].startswith(("out", "pipe")) for row in program.ask(do="files", run="mine")["files"])


def test_a_watched_run_is_read_and_nothing_else(program: Program) -> None:
    row = program.row("@0/theirs")
    assert (row["state"], row["step"], row["steps"], row["is_own"]) == ("ended", 7, 7, False)
    assert program.ask(do="read", run="@0/theirs", path="config.toml")["is_end"]
    followed = program.ask(do="follow", run="@0/theirs", path="metrics.jsonl")
    assert followed["is_end"] and followed["size"] == 25


@pytest.mark.parametrize("swapped", ["run", "run/log"])
def test_no_link_below_the_runs_is_followed_and_the_folder_of_them_all_may_be_one(tmp_path: Path, swapped: str) -> None:
    for name in ("run", "secret"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / "disk" / name / "log").write_text(name)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert read_piece(tmp_path / "runs", "run/log", 0, 9) == (b"run", 3)
    (tmp_path / "disk" / swapped).rename(tmp_path / "moved")
    (tmp_path / "disk" / swapped).symlink_to(tmp_path / "disk" / swapped.replace("run", "secret"))
    with pytest.raises(Refusal, match="run/log is no plain file, or a link leads there"):
        read_piece(tmp_path / "runs", "run/log", 0, 9)


def test_of_too_many_files_the_newest_are_listed_in_a_line_that_a_client_takes(program: Program) -> None:
    assert program.start("large")["kind"] == "start"
    program.wait("large", "ended")
    place = "/".join(["x" * 240] * 4)
    (program.home / "runs/large" / place).mkdir(parents=True)
    for number in range(MOST_ROWS + 1):
        file = program.home / f"runs/large/{place}/{number}"
        file.touch()
        os.utime(file, (number, number))
    answer = program.ask(do="files", run="large")
    paths = [row["path"] for row in answer["files"]]
    assert len(json.dumps(answer, separators=(",", ":"))) < LINE_BYTES and paths == sorted(paths)
    assert "node/0/output.log" in paths and f"{place}/{MOST_ROWS}" in paths and f"{place}/500" not in paths


def bad_member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return archive(RECIPE, lambda tar: tar.addfile(entry))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bad_member("/tmp/absolute"), "no plain file inside"),
        (bad_member("../above"), "no plain file inside"),
        (bad_member("link", tarfile.SYMTYPE, "/etc/passwd"), "no plain file inside"),
        (bad_member("link", tarfile.LNKTYPE, "torchtitan/launch/start.py"), "no plain file inside"),
        (bad_member("device", tarfile.CHRTYPE), "no plain file inside"),
        (archive({"other": ""}), "has no torchtitan/launch/start.py"),
        (CODE[:200], "cannot be unpacked"),
        (b"no archive", "cannot be unpacked"),
    ],
)
def test_a_harmful_archive_leaves_nothing(program: Program, data: bytes, why: str) -> None:
    before = sorted((program.home / "code").iterdir())
    answer = program.ask(**pieces(data))
    assert answer["kind"] == "refused" and why in answer["why"]
    assert sorted((program.home / "code").iterdir()) == before


def test_an_archive_has_to_have_its_hash_and_its_bytes_in_order(program: Program) -> None:
    other = archive(RECIPE | {"a": "b"})
    assert "SHA-256" in program.ask(**pieces(other, "0" * 64))["why"]
    assert "send it from position 0" in program.ask(**pieces(other) | {"position": 5})["why"]
    name = hashlib.sha256(other).hexdigest()
    assert not program.ask(**pieces(other[:30], name) | {"is_last": False})["is_here"]
    assert program.ask(**pieces(other[30:], name) | {"position": 30})["is_here"]
    assert program.ask(**pieces(other))["is_here"]


def test_an_archive_that_grows_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = archives.Archives(tmp_path, [])
    request = pieces(CODE)
    arguments = request["name"], 0, request["data"], True
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="leave data and weights out of it"):
        patch.setattr(archives, "MOST_BYTES", 10)
        code.put(*arguments)
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="unpacks to more than"):
        patch.setattr(archives, "MOST_UNPACKED_BYTES", 10)
        code.put(*arguments)
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="without a filter"):
        patch.delattr(tarfile, "data_filter")
        code.put(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "PYTHONPATH", "PATH", "HOME", "NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "NNODES", "BASH_ENV"]
)
def test_a_forbidden_environment_name_is_refused(program: Program, name: str) -> None:
    answer = program.start("never", environment={name: "x"})
    assert answer["kind"] == "refused" and name in answer["why"]
    assert not (program.home / "runs/never").exists()


def test_what_a_job_lacks_is_said(program: Program) -> None:
    assert "without head and port" in program.start("never", nodes=2)["why"]
    assert "send it by `put`" in program.ask(**START | {"code": "0" * 64})["why"]
    refused = program.start("refused", "refuse")
    assert "this configuration is refused" in refused["why"] and program.row("refused")["state"] == "failed"
    assert "exists already" in program.start("mine")["why"]
    allowed = program.start(
        "allowed", "variables, lines = 0", environment={"NCCL_DEBUG": "INFO", "HF_TOKEN": "x"}, ranks_here=2
    )
    assert allowed["kind"] == "start"
    program.wait("allowed", "ended")
    log = (program.home / "runs/allowed/node/0/output.log").read_text()
    assert log.startswith("NCCL_DEBUG=INFO NGPU=2 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=290\n")


def test_code_comes_from_allowed_repositories_at_a_commit(tmp_path: Path) -> None:
    made, theirs = (commit(tmp_path / name, {"torchtitan/launch/start.py": name}) for name in ("mine/recipe", "other"))
    code = Program(tmp_path / "home", "--git", f"file://{tmp_path}/mine")
    address = f"file://{tmp_path}/mine/recipe"
    for wrong in (f"file://{tmp_path}/mined", f"{address}/../../other", f"{address}/%2e%2e/.%2E/other", "ext::id"):
        answer = code.ask(do="has", code={"git": wrong, "commit": theirs})
        assert answer["kind"] == "refused" and "(--git)" in answer["why"], answer
    assert "git fetch fails" in code.ask(do="has", code={"git": address, "commit": "0" * 40})["why"]
    assert not code.ask(do="has", code=made)["is_here"]
    for known in ({"git": address.replace("recipe", "r%65cipe/"), "commit": made}, {"git": address, "commit": made}):
        assert code.ask(do="has", code=known)["is_here"]
    assert code.ask(do="has", code=made)["is_here"]
    assert [path.name for path in (tmp_path / "home/code").iterdir()] == [made]
    code.close()


# What git, a server or a proxy on the way might take for another path than it looks, or for another host.
DISGUISES = (
    "../ ..%2f .%2e/ %2e%2e/ %2E%2E%2f %252e%252e/ ..%5c ..\\ ..;/ ..%00/ ./ // %2f %c0%ae%c0%ae/ %ef%bc%8e./ ?x/ #/"
)


@pytest.mark.parametrize(
    "allowed", ["https://a.org/mine", "ssh://git@a.org:22/mine/", "git@a.org:mine", "file:///mine"]
)
def test_no_disguise_of_an_address_leads_out_of_what_git_allows(allowed: str) -> None:
    top = archives.Address.read(allowed)
    known = ("", "/", "/a", "/a/b.git", "/a%20b/~c/") if "://" in allowed else ("", "/", "/a", "/a/b.git")
    for rest in known:
        assert (found := archives.Address.read(allowed.rstrip("/") + rest)) and found.is_below(top), rest
    base = allowed.rstrip("/")
    wrong = [f"{base}/{word}other" for word in DISGUISES.split()] + [f"{base}{word}other" for word in DISGUISES.split()]
    wrong += [f"{base}d", f"{base}.git", base.rpartition("mine")[0], base.upper(), f"ext::{base}", f"-{base}"]
    wrong += [base.replace("a.org", host) for host in ("b.org", "a.org@b.org", "x@a.org", "a.org:1", "a.org\\@b.org")]
    wrong += [base.replace("mine", path) for path in ("/mine", "other/../mine", "~mine", "x:mine", "%6d%69%6e%65%")]
    for address in {*wrong} - {base}:
        assert not ((found := archives.Address.read(address)) and found.is_below(top)), address


def test_an_allowed_address_that_git_could_misread_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"--git 'https://a.org/%2e%2e' is no address"):
        archives.Archives(tmp_path, ["https://a.org/%2e%2e"])


def test_a_machine_without_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code = archives.Archives(tmp_path, ["https://example.org"])
    with pytest.raises(Refusal, match="git does not run here"):
        code.has(archives.Git(git="https://example.org/a", commit="0" * 40))
    with pytest.raises(Refusal, match="start from a clone"):
        pack(tmp_path, tmp_path)


def test_an_archive_of_a_checkout_holds_what_git_would_and_has_one_hash(tmp_path: Path) -> None:
    place, first, second = tmp_path / "checkout", tmp_path / "a", tmp_path / "b"
    for folder in (place, first, second):
        folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)
    for name, text in {".gitignore": "ignored\n", "ignored": "", "new": "1", "run.sh": "2"}.items():
        (place / name).write_text(text)
    (place / "link").symlink_to("new")
    subprocess.run(["git", "add", "run.sh", ".gitignore", "link"], cwd=place, check=True)
    packed = pack(place, first)
    assert packed.names == [".gitignore", "link", "new", "run.sh"] and packed.untracked == ["new"]
    os.utime(place / "new", (1, 1))
    assert pack(place, second).code == packed.code
    with tarfile.open(packed.file) as tar:
        assert tar.getmember("link").isreg()
    (place / "out").symlink_to("/etc/passwd")
    with pytest.raises(Refusal, match="outside the checkout"):
        pack(place, first)


def test_elsewhere_than_on_linux_a_start_is_refused_and_a_report_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    with pytest.raises(Refusal, match="this node is darwin"):
        processes.need_linux()
    assert report.report(1, ROOT, []).addresses is not None
