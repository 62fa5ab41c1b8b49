"""The client against a node that lies, and over connections that break."""

import contextlib
import hashlib
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.node.machines import CODE, HASH, ROOT, archive
from titan_fleet.node import messages
from titan_fleet.ssh import client
from titan_fleet.ssh.client import Broken, Node, local_command, ssh_command
from titan_fleet.ssh.hosts import Host, in_planned_order, read_hosts
from torchtitan.refusal import Refusal

# This program answers the first question as a node does. For each further one it prints what the test gave it.
LIAR = """
import json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from titan_fleet.node import messages, report
def say(**fields): print(json.dumps(fields), flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    id = asked["id"]
    if number == 0:
        own = report.report(id, Path("/"), []).model_copy(update=dict(protocol={protocol}))
        sys.stdout.write(messages.write(own).decode()); sys.stdout.flush()
        continue
{body}
"""


class Heard:
    """A sink."""

    def __init__(self) -> None:
        self.data, self.is_over = b"", False

    def __call__(self, position: int, piece: bytes, is_end: bool) -> None:
        assert position == len(self.data)
        self.data, self.is_over = self.data + piece, is_end

    def wait(self, size: int | None = None) -> None:
        end = time.monotonic() + 30
        while not (self.is_over or (size is not None and len(self.data) >= size)):
            assert time.monotonic() < end, self.data[-100:]
            time.sleep(0.02)


def liar(body: str, protocol: int = messages.PROTOCOL) -> Node:
    program = LIAR.format(root=str(ROOT), protocol=protocol, body=textwrap.indent(body, "    "))
    node = Node("liar", [sys.executable, "-c", program])
    node.connect(100)
    return node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    there = Node("here", local_command(str(tmp_path)), cwd=ROOT)
    there.connect()
    yield there
    there.close()


def test_only_an_answer_of_the_right_kind_to_a_question_counts() -> None:
    node = liar("""
print("Welcome to this host\\x1b[31m")
say(id=id + 7, kind="port", port=1)
say(id=None, kind="refused", why="nothing")
answers = [dict(kind="runs", runs=[]), dict(kind="port", port=99999999), dict(kind="port", port=5, more=1)]
say(id=id, **answers[number - 1]) if asked["do"] == "port" else say(id=id, kind="refused", why="no\\x1b[2Jt so")
""")
    for why in ("answers port with runs", "its answer is none: port.port: Input", "its answer is none: port.more: Ex"):
        with pytest.raises(Refusal, match=why):  # at once
            node.ask(messages.Port)
    with pytest.raises(Refusal, match="no\N{REPLACEMENT CHARACTER}.2Jt so"):
        node.ask(messages.Runs)
    node.close()


def test_bytes_that_were_not_asked_for_are_not_taken() -> None:
    node = liar("""
at = asked["position"]
for data in ("QUI=" if at < 4 else "", "QQ=="):
    say(id=id, kind="follow", data=data, size=4, is_end=at == 4)
""")
    heard = Heard()
    node.follow("run", "log", heard)
    heard.wait()
    assert heard.data == b"ABAB"
    node.close()


def test_a_follow_goes_on_after_a_read_that_failed_and_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_REFUSED_SECONDS", 0.05)
    node = liar("""
states = {2: "running", 5: "failed", 8: "failed"}
row = dict(run="run", folder="/", state=states.get(number), is_own=True)
if asked["do"] == "runs": say(id=id, kind="runs", runs=[row])
elif number in (3, 6): say(id=id, kind="follow", data="QUI=", size=4, is_end=False)
else: say(id=id, kind="refused", why="Stale file handle")
""")
    heard = Heard()
    node.follow("run", "log", heard)
    heard.wait()
    assert heard.data == b"ABAB"
    node.close()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.stdout.write('x' * 30_000_000)", "a line of more than"),
        ("for n in range(1000): say(id=n + 1000, kind='port', port=1)", "lines came that answer nothing"),
        (
            "sys.exit('\\x1b]52;c;AA\\x07gone')",
            "broke: \ufffd.52;c;AA\ufffdgone$",
        ),
    ],
)
def test_a_node_that_floods_or_ends_is_given_up(body: str, why: str) -> None:
    node = liar(body)
    with pytest.raises(Broken, match=why):
        node.ask(messages.Port, timeout=10)
    node.close()
    with pytest.raises(Broken, match="is not connected"):
        node.ask(messages.Port)


def test_a_node_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SECONDS_TO_CLOSE", 0.3)
    node = liar("pass")
    with pytest.raises(Broken, match="no answer to port within 0 s"):
        node.ask(messages.Port, timeout=0.2)
    node.close()
    silent = Node("silent", [sys.executable, "-c", "import time; time.sleep(100)"])
    with pytest.raises(Broken, match="no answer within"):
        silent.connect(0.3)
    silent.close()
    absent = Node("absent", ["/nowhere/ssh"])
    with pytest.raises(Broken, match="does not start"):
        absent.connect(5)
    absent.close()


def test_a_node_of_another_protocol_is_refused_with_the_fix() -> None:
    with pytest.raises(Broken, match=f"speaks protocol 7, and this is {messages.PROTOCOL}; install"):
        liar("", 7)


def test_a_node_that_never_has_the_archive_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(CODE)
    node = liar('say(id=id, kind=asked["do"], is_here=False)')
    with pytest.raises(Refusal, match="has taken all of the archive, and does not have it"):
        node.put(tmp_path / "archive", HASH)
    node.close()


def test_follows_go_on_over_broken_connections(node: Node, tmp_path: Path) -> None:
    big = archive(
        {
            "torchtitan/launch/start.py": "",
            "data": "".join(hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(50_000)),
        }
    )
    for name, data in (("small", CODE), ("big", big)):
        (tmp_path / name).write_bytes(data)
        assert node.put(tmp_path / name, hashlib.sha256(data).hexdigest())
    assert not node.put(tmp_path / "small", HASH)
    node.ask(messages.Start, run="counts", config="pause lines = 1000", code=HASH)
    heard = Heard()
    node.follow("counts", "node/0/output.log", heard)
    for size in (500, 3000):
        heard.wait(size)
        assert node._process
        node._process.kill()
    (tmp_path / "runs/counts/node/0/job.toml.go").touch()
    heard.wait()
    assert heard.data.decode().splitlines() == [f"line {number}" for number in range(1000)]
    with contextlib.suppress(Broken):  # the end may have come before the kill
        node.ask(messages.Port)
    assert node.ask(messages.Runs).runs[0].state == "ended"


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=id", "user@-oProxyCommand=id", "a b", "a;id", "$(id)", "", "a@b@c", "a\nb"]
)
def test_no_host_is_an_option_or_a_command(host: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is no name for ssh"):
        ssh_command(host, ["node"])
    assert ssh_command("user@gpu-1.example.org", ["sh", "-c", "a b"])[-3:] == [
        "--",
        "user@gpu-1.example.org",
        "sh -c 'a b'",
    ]


def test_hosts_are_the_same_in_both_files(tmp_path: Path) -> None:
    lines, toml = tmp_path / "hosts.txt", tmp_path / "nodes.toml"
    lines.write_text("# ours\na.example.org address=10.0.0.1 gpus=8\n\nuser@b  # its own address\n")
    toml.write_text('[[node]]\nhost = "a.example.org"\naddress = "10.0.0.1"\ngpus = 8\n[[node]]\nhost = "user@b"\n')
    assert read_hosts(lines) == read_hosts(toml) and read_hosts(lines)[0].gpus == 8


def test_hosts_come_in_the_order_of_the_plan_and_those_that_it_leaves_out_do_not(tmp_path: Path) -> None:
    hosts = [Host(host="a.example.org", name="zurich"), Host(host="lima"), Host(host="user@b", name="oslo")]
    config = tmp_path / "planned.toml"
    assert in_planned_order(hosts, config) == hosts
    config.with_suffix(".nodes").write_text("lima\nzurich\n")
    assert in_planned_order(hosts, config) == [hosts[1], hosts[0]]
    with pytest.raises(Refusal, match=r"planned.nodes: the plan uses zurich, and the hosts are lima, oslo; .* name=, "):
        in_planned_order(hosts[1:], config)
    with pytest.raises(Refusal, match=r"two hosts are lima, and .*planned.nodes names one; give each its own name="):
        in_planned_order([*hosts, Host(host="c", name="lima")], config)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("hosts.txt", "", "names no host"),
        ("hosts.txt", "a gpu=8", "hosts.txt:1: gpu: Extra inputs"),
        ("hosts.txt", "\na 8", "hosts.txt:2: 8 is no field"),
        ("hosts.txt", "a gpus=many", "hosts.txt:1: gpus"),
        ("hosts.txt", "-v", "is no name for ssh"),
        ("nodes.toml", "[[node]]\naddress = '::1'", "nodes.toml, node 1: host: Field required"),
        ("nodes.toml", "[[node", "is no TOML"),
    ],
)
def test_a_mistake_in_the_hosts_is_named_with_its_line(name: str, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal, match=why.replace("[", r"\[")):
        read_hosts(tmp_path / name)


def test_text_of_a_node_moves_no_terminal() -> None:
    assert (
        client.printable("a\tb\x1b[31m\x07\u202e")
        == "a\tb\N{REPLACEMENT CHARACTER}[31m" + 2 * "\N{REPLACEMENT CHARACTER}"
    )
