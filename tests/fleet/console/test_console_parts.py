"""Text that is made inert, curves that are read on, and what is refused: no process is started."""

import asyncio
import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tests.fleet.console.served import wait_for, write_run
from titan_fleet.console import curves as curves_module
from titan_fleet.console import library as library_module
from titan_fleet.console.actions import Actions
from titan_fleet.console.answers import CheckText, PlanText, Run, SubmitRun
from titan_fleet.console.curves import Columns, Curves, smooth, thin
from titan_fleet.console.database import Audit, Kept, open_database
from titan_fleet.console.door.gate import Rules, _host_name, _is_for
from titan_fleet.console.door.limits import Bucket, Denied
from titan_fleet.console.door.people import Forbidden, People, Person
from titan_fleet.console.library import Library, Unknown, keys_of
from titan_fleet.console.nodes import HERE, Nodes
from titan_fleet.console.pages import compare, frame
from titan_fleet.console.pages import runs as runs_page
from titan_fleet.console.pages.keys import meanings
from titan_fleet.console.predictions import in_words, read_prediction
from titan_fleet.console.resume import plan_resume
from titan_fleet.console.text import inert, whole_characters
from titan_fleet.node.messages import RunRow
from titan_fleet.ssh.client import Broken
from torchtitan.foreign import read_piece
from torchtitan.refusal import Refusal


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"plain\ttext\n", "plain\ttext\n"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1b[2J\x1b[H\x1bcgone", "gone"),
        (b"\x1bP1$r\x1b\\x", "x"),
        (b"  1%\r 50%\r100%\n", "  1%\n 50%\n100%\n"),
        (b"bell\x07 null\x00 delete\x7f", "bell\u2407 null\u2400 delete\ufffd"),
        ("\u202eevil\u2066".encode(), "\ufffdevil\ufffd"),
        (b"\x9b31m \xff", "\ufffd31m \ufffd"),
        (b"\x1b", "\u241b"),
    ],
)
def test_text_of_others_holds_nothing_that_a_terminal_or_a_reader_obeys(given, shown):
    assert inert(given) == shown


def test_a_piece_of_a_log_ends_with_a_whole_character_and_a_whole_escape():
    text = "né 漢 \N{GRINNING FACE}".encode()
    for end in range(1, len(text) + 1):
        assert whole_characters(text[:end]).decode() in text.decode()
    assert whole_characters(b"abc\x1b[3") == b"abc"
    assert whole_characters(b"abc\x1b[31m") == b"abc\x1b[31m"
    assert whole_characters(b"\xff\xff\xff\xff\xff") != b""


class File:
    def __init__(self) -> None:
        self.data = b""

    def read(self, path: str, position: int, size: int) -> tuple[bytes, int]:
        if path != "metrics.jsonl":
            raise FileNotFoundError
        return self.data[position : position + size], len(self.data)

    def write(self, *records: object) -> None:
        self.data += b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_records_are_read_on_whole_line_by_whole_line_and_what_is_none_is_passed_over():
    file, columns = File(), Columns("metrics.jsonl")
    file.write({"step": 1, "loss": 3.0, "step_seconds": 2}, [1], "text", {"step": "2"}, {"step": 10**400}, {"loss": 1})
    file.data += b'{"step": 2, "lo'
    columns.read_on(file.read)
    assert list(columns.steps) == [1]
    file.data += b'ss": 2.0, "text": "x", "huge": 1e999}\nnot json\n'
    file.write({"step": 4, "loss": None, "new": 5, "step_seconds": 3})
    columns.read_on(file.read)
    assert list(columns.after(1, 10)) == [{"step": 2, "loss": 2.0}, {"step": 4, "new": 5.0, "step_seconds": 3.0}]
    assert columns.points("loss") == [(1, 3.0), (2, 2.0)]


def test_a_record_without_an_end_is_none_and_steps_that_are_written_again_and_again_take_no_time(tmp_path):
    run, columns = write_run(tmp_path / "run", steps=1), Columns("metrics.jsonl")
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": 1}}\n' for step in [*range(2, 100_000), *[99_999] * 50_000])
        file.truncate(file.tell() + 2**40)
    begun = time.process_time()
    columns.read_on(lambda *piece: read_piece(run, *piece))
    assert len(columns.steps) == 99_999 and columns.points("elapsed") == [(1, 0.5)] and len(columns._rest) < 2**17
    assert time.process_time() - begun < 10


def test_a_record_without_its_seconds_spoils_none_after_it():
    file, columns = File(), Columns("metrics.jsonl")
    file.write({"step": 1, "loss": 3.0}, {"step": 2, "step_seconds": 2})
    columns.read_on(file.read)
    assert columns.points("elapsed") == [(2, 2.0)]


def test_steps_that_are_written_again_replace_the_earlier_ones():
    file, curves = File(), Curves()
    file.write(*({"step": i, "loss": 1.0, "tokens_seen": i * 10} for i in range(1, 6)))
    curves.read_on(file.read)
    file.write({"step": 3, "loss": 9.0, "tokens_seen": 30})
    curves.read_on(file.read)
    assert curves.line("loss", "tokens_seen") == [(10, 1.0), (20, 1.0), (30, 9.0)]


def test_of_a_very_long_run_the_newest_records_are_kept(monkeypatch):
    monkeypatch.setattr(curves_module, "_MOST_RECORDS", 100)
    file, columns = File(), Columns("metrics.jsonl")
    file.write(*({"step": i, "loss": float(i)} for i in range(1, 301)))
    columns.read_on(file.read)
    assert columns.points("loss") == [(i, float(i)) for i in range(201, 301)]


def test_a_prediction_is_shown_beside_what_was_measured_unless_the_run_is_another():
    file, curves = File(), Curves()
    plan = {"layout": "1 rank", "rests_on": "a \x1b[31mguess", "seconds": 0.5, "memory_gib": 2}
    plan["run"] = {"training.seq_len": 32, "parallelism.tensor_parallel_degree": 1}
    ran = {"training.seq_len": 32, "training.steps": 9}
    unmeasured = read_prediction(json.dumps(plan).encode(), ran, curves.read_on(file.read))
    assert in_words(unmeasured) == "Predicted: 0.5 s a step, 2 GiB (1 rank; a guess)."
    file.write(*({"step": i, "step_seconds": 9 if i < 4 else 0.6, "memory_gib": 3} for i in range(1, 8)))
    found = read_prediction(json.dumps(plan).encode(), ran, curves.read_on(file.read))
    assert found.measured_seconds == 0.6 and "0.6 s a step, 1.20 times" in in_words(found)
    assert "3 GiB, 1.50 times" in in_words(found)
    other = read_prediction(json.dumps(plan).encode(), ran | {"training.seq_len": 64}, curves)
    assert "not the one that was planned: training.seq_len differ" in in_words(other)
    for wrong in (
        b"[",
        b"[]",
        b"{}",
        json.dumps(plan | {"seconds": -1}).encode(),
        json.dumps(plan | {"seconds": 10**400}).encode(),
        json.dumps(plan | {"run": 1}).encode(),
    ):
        assert read_prediction(wrong, ran, curves) is None


def test_thinned_curves_keep_their_spikes_and_smoothed_ones_begin_at_the_first_value():
    points = [(i, 100.0 if i == 777 else 1.0) for i in range(10_000)]
    assert len(thin(points, 100)) <= 102 and (777, 100.0) in thin(points, 100) and thin(points[:50], 100) == points[:50]
    assert smooth([(0, 5.0), (1, 5.0)], 0.9) == [(0, pytest.approx(5.0)), (1, pytest.approx(5.0))]
    assert math.isclose(smooth([(0, 0.0), (1, 1.0)], 0.5)[1][1], 2 / 3)


@pytest.mark.parametrize(
    ("given", "name"),
    [("127.0.0.1:8400", "127.0.0.1"), ("[0::1]:8400", "::1"), ("LOCALHOST", "localhost"), ("a@b", ""), ("a/b", "")],
)
def test_a_host_header_is_a_name_and_perhaps_a_port(given, name):
    assert _host_name(given) == name


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("2", True),
        ("40", True),
        ('42["event",{"client_id":"mine"}]', True),
        ('42["event",{"client_id":"another"}]', False),
        ('421["event",{"client_id":"another"}]', False),
        ('\uff14\uff12["event",{"client_id":"another"}]', False),  # digits, too, for who reads them with int()
        ('4\uff12["event",{"client_id":"another"}]', False),
        ('451-["event",{"_placeholder":true,"num":0}]', False),
        ("4x", False),
        ("", False),
    ],
)
def test_a_socket_passes_no_packet_that_may_name_another_page(text, passes):
    assert _is_for("mine", {"type": "websocket.receive", "text": text}) == passes
    assert not _is_for("mine", {"type": "websocket.receive", "bytes": text.encode() or b"4"})


def test_a_bucket_fills_again_and_is_one_of_each_address():
    bucket = Bucket(rate=1e-6, burst=2)
    bucket.take("a", 2), bucket.take("b", 2)
    with pytest.raises(Denied, match="a asks too often"):
        bucket.take("a")
    bucket.rate = 1e9
    bucket.take("a", 2)


def test_a_lower_role_is_refused_and_the_refusal_says_which_is_needed():
    with pytest.raises(Forbidden, match="ada is viewer, and this needs admin"):
        Person("ada", "viewer").need("admin")
    assert Person("ada", "admin").may("operator")


def test_unknown_runs_logs_and_nodes_are_refused(tmp_path):
    nodes = Nodes(tmp_path, None, ["ssh"], "home")
    library = Library(tmp_path, [], nodes)
    library.refresh()
    with pytest.raises(Unknown, match="run = 'x' is not known"):
        library.find("x")
    with pytest.raises(Refusal, match=f"node = 'x' is not known; use one of {HERE}"):
        nodes.find("x")


def test_a_cookie_over_tls_belongs_to_this_host_alone():
    assert (
        Rules(frozenset(), True, True).cookie == "__Host-console" and Rules(frozenset(), False, True).scheme == "http"
    )


def test_a_configuration_becomes_a_table_of_keys_and_text_that_is_none_becomes_nothing():
    assert keys_of("[a.b]\nc = 1\nd = '\\u001b[31mx'") == {"a.b.c": "1", "a.b.d": "\\u001b[31mx"}
    assert keys_of("[") == {} == keys_of("a = " + "[" * 100_000)


def test_each_key_of_the_schema_is_explained_with_its_default():
    known = meanings()
    assert known["optimizer.lr"] == "Peak learning rate, reached at the end of the warmup. Default: 0.0008"
    assert "quantize.linear.float8.recipe_name" in known and all(len(meaning) > 20 for meaning in known.values())


def library_of(home: Path, shown: Path, tags: Any = dict) -> Library:
    return Library(home, [shown], Nodes(home, None, ["ssh"], "home"), tags)


def test_the_list_of_runs_goes_on_after_a_look_that_failed_and_the_failure_is_logged_once(tmp_path, caplog):
    looks: list[int] = []

    def tags() -> dict[str, list[str]]:
        looks.append(1)
        if len(looks) < 4:
            raise RecursionError("a hostile record")
        return {}

    write_run(tmp_path / "shown/one", steps=3)
    library = library_of(tmp_path, tmp_path / "shown", tags)
    library.runs()  # somebody looks at runs, so the folders are looked at often
    library.start()
    wait_for(library.runs, 10)
    assert caplog.text.count("the list of runs stays as it is") == 1


def test_an_older_look_at_the_runs_never_replaces_a_newer_one(tmp_path):
    id, said, in_first, go_on = "", ["old"], threading.Event(), threading.Event()

    def tags() -> dict[str, list[str]]:
        now = {id: list(said)}
        if said == ["old"] and id:
            in_first.set()
            go_on.wait(10)
        return now

    write_run(tmp_path / "shown/one", steps=3)
    library = library_of(tmp_path, tmp_path / "shown", tags)
    library.refresh()
    id = library.runs()[0].id
    with ThreadPoolExecutor() as pool:
        looks = [pool.submit(library.refresh)]
        assert in_first.wait(10)
        said[0] = "new"
        looks.append(pool.submit(library.refresh))
        pool.submit(looks[1].exception, 0.5).exception()
        go_on.set()
    assert [look.exception() for look in looks] == [None, None] and library.runs()[0].tags == ["new"]


def test_a_node_that_is_away_is_said_to_be_and_nobody_waits_for_it_and_runs_are_listed_newest_first(tmp_path):
    (tmp_path / "nodes.toml").write_text('[[node]]\nhost = "far"\n')
    nodes = Nodes(tmp_path, tmp_path / "nodes.toml", ["ssh"], "home")
    far, library = nodes.find("far"), Library(tmp_path, [tmp_path / "shown"], nodes)
    write_run(tmp_path / "shown/one", steps=3)
    known: dict[str, Any] = {"folder": "/a", "state": "failed", "is_own": True, "rank": 0, "log": "a.log"}
    far.runs = [RunRow(run=name, started=at, code="0" * 64, **known) for name, at in (("new", 9e9), ("old", 1.0))]
    far.last_seen, far.trouble = 1.0, "the cable is cut"
    library.refresh()
    assert [(run.name, run.away_since) for run in library.runs()] == [("new", 1.0), ("one", None), ("old", 1.0)]
    assert runs_page.row(library.runs()[0])["node"] == f"far, away since {frame.moment(1.0)}"
    id = library.runs()[0].id
    for ask in (library.page, library.configuration, library.curves, library.hang, library.prediction, library.samples):
        with pytest.raises(Broken, match="far is away: the cable is cut"):
            ask(id)
    for ask in (
        lambda: library.log(id, "a.log", 0),
        lambda: library.read(id, "a", 0, 1),
        lambda: plan_resume([library.find(id)]),
    ):
        with pytest.raises(Broken, match="far is away: the cable is cut"):
            ask()
    labels = compare.labels(library.runs())
    assert compare.differences(library, list(labels)) == []


def test_a_search_that_is_gone_on_with_finds_every_line_once(tmp_path, monkeypatch):
    monkeypatch.setattr(library_module, "_SEARCH_BYTES", 2**18)
    data = b"".join(b"line %d\n" % i for i in range(10_000, 60_000))
    write_run(tmp_path / "shown/one", steps=3)
    (tmp_path / "shown/one/train.log").write_bytes(data)
    library = library_of(tmp_path, tmp_path / "shown")
    library.refresh()
    id = library.runs()[0].id
    cut = data[data.rfind(b"\n", 0, 2**18) + 1 :].partition(b"\n")[0].decode()  # which two searches share
    for text, wanted in ((cut, [cut]), ("line 1", [f"line {i}" for i in range(10_000, 20_000)])):
        found, position = [], 0
        while position < len(data):
            piece = library.log(id, "train.log", position, text)
            found, position = found + [match.line for match in piece.matches], piece.next
        assert found == wanted


def test_samples_are_read_on_and_one_that_was_cut_is_read_again(tmp_path):
    part = tmp_path / "runs/one/node/0"
    part.mkdir(parents=True)
    job = {"host": socket.gethostname(), "code": "0" * 64, "rank": 0, "nodes": 1, "started": 1.0}
    (part / "job.json").write_text(json.dumps(job))
    (part / "end.json").write_text('{"state": "ended"}')
    log, lines = part / "output.log", [f"sample after step {i}: 'text\\t{i}'\n" for i in range(1, 301)]
    log.write_text("".join(lines) + "sample after step 301: 'a")
    library = library_of(tmp_path, tmp_path / "none")
    library.refresh()
    id = library.runs()[0].id
    assert library.samples(id)[0] == (200, "text\t200")
    assert library.samples(id)[1] == (300, "text\t300") and len(library.samples(id)) == 200
    with log.open("a") as more:
        more.write("bc'\n")
    library.samples(id)
    assert library.samples(id)[:2] == [(301, "abc"), (300, "text\t300")]
    log.write_text(lines[0])
    library.samples(id)
    assert library.samples(id) == [(1, "text\t1")]


def test_what_a_viewer_is_refused_is_written_down(tmp_path):
    library, engine = library_of(tmp_path, tmp_path / "shown"), open_database(tmp_path)
    write_run(tmp_path / "shown/one", steps=3)
    library.refresh()
    nodes, audit = Nodes(tmp_path, None, ["ssh"], "home"), Audit(engine)
    actions, eve = Actions(tmp_path, library, nodes, People(engine), audit, Kept(engine)), Person("eve", "viewer")
    submission = SubmitRun(site="slurm", config="", name="a", only_print=True)
    for act, *given in (
        (actions.check, CheckText(config="")),
        (actions.plan, PlanText(config="", machines="cpu_1x2")),
        (actions.resume, library.runs()[0].id),
        (actions.submit, submission),
    ):
        with pytest.raises(Forbidden):
            act(eve, *given)
    assert actions.check(Person("ada", "operator"), CheckText(config="")) == []
    rows = [(row.who, row.what, row.target) for row in reversed(audit.newest(9))]
    targets = {"check": "a configuration", "plan": f"layouts on {HERE}", "resume": "one", "submit": "a to slurm"}
    assert rows == [("eve", what, target) for what, target in targets.items()]
    assert all(row.outcome.startswith("refused: eve is viewer") for row in audit.newest(9))


def test_long_actions_leave_what_pages_look_at_its_threads_and_a_failing_database_is_said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(frame.ui, "notify", lambda text, **_: said.append(text))
    end = threading.Event()

    def fail() -> None:
        raise OperationalError("", {}, Exception())

    async def both() -> int | None:
        actions = [asyncio.create_task(frame.do(end.wait)) for _ in range(32)]
        await asyncio.sleep(0.1)
        try:
            return await asyncio.wait_for(frame.look(lambda: 7), 5)
        finally:
            end.set()
            await asyncio.gather(*actions)

    assert asyncio.run(both()) == 7
    assert asyncio.run(frame.look(fail)) is None and asyncio.run(frame.do(fail)) is None
    assert said == ["the console's database fails (OperationalError); look at its disk, or at what --database names"]


def test_runs_of_one_name_have_a_label_each():
    known: dict[str, Any] = {"run": "@0/a", "folder": "/a", "state": "ended", "is_own": False, "node": HERE}
    runs = [Run(id=id, name=name, **known) for id, name in (("a-000001", "a"), ("a-000002", "a"), ("b-000003", "b"))]
    assert list(compare.labels(runs).values()) == [f"a ({HERE}) 000001", f"a ({HERE}) 000002", f"b ({HERE})"]
