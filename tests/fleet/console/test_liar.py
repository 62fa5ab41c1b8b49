"""A node that lies, beside an honest one: it claims another's run, sends wrong lines, and one without an end."""

import json
import shlex
import socket
import sys
from pathlib import Path

from tests.fleet.console.served import ROOT, served, wait_for

# In place of ssh. The liar does what the file `mode` says: it claims the honest node's run, or it sends nonsense.
SSH = """
import base64, json, os, sys
sys.path.insert(0, {root!r})
if sys.argv[sys.argv.index("--") + 1] == "honest":
    os.execv(sys.executable, [sys.executable, "-m", "torchtitan", "node", "--home", {folder!r} + "/honest"])
from pathlib import Path
from titan_fleet.node import messages, report
def say(**fields): print(json.dumps(fields), flush=True)
own = report.report(0, Path("/"), [])
for line in sys.stdin:
    asked = json.loads(line)
    mode, kind, id = Path({folder!r}, "mode").read_text(), asked["do"], asked["id"]
    if mode == "endless": sys.stdout.write("x" * 6_000_000); sys.stdout.flush()
    if mode == "wrong":
        print("<script>\\x1b[31m", flush=True)
        say(id=id + 1, kind="port", port=1)
        say(id=id, kind="start", folder="/", log="a")
    if kind == "report": print(own.model_copy(update=dict(id=id)).model_dump_json(), flush=True)
    if kind == "runs":
        row = dict(run="mine", folder={folder!r} + "/honest/runs/mine", state="ended", is_own=True, rank=0, nodes=1)
        bad = row | dict(rank=1, started=1e300, step=2**64, steps=5.5, more=1)
        say(id=id, kind=kind, runs=[row | dict(log="node/0/output.log", description="\\x1b[2J<b>"), bad, dict(run="/")])
    if kind == "read": say(id=id, kind=kind, data=base64.b64encode(b"a lie").decode(), size=5, is_end=True)
    if kind == "stop": say(id=id, kind=kind, state="stopped")
"""


def test_what_a_lying_node_says_stays_its_own_and_the_honest_one_is_served(tmp_path: Path) -> None:
    part = tmp_path / "honest/runs/mine/node/0"
    part.mkdir(parents=True)
    job = {"code": "0" * 64, "rank": 0, "nodes": 1, "started": 1.0, "host": socket.gethostname()}
    (part / "job.json").write_text(json.dumps(job))
    (part / "end.json").write_text('{"state": "ended"}')
    (part / "output.log").write_text("the truth")
    (tmp_path / "nodes.toml").write_text('[[node]]\nhost = "honest"\n[[node]]\nhost = "liar"\n')
    (tmp_path / "ssh.py").write_text(SSH.format(root=str(ROOT), folder=str(tmp_path)))
    (tmp_path / "mode").write_text("claims")
    ssh = shlex.join([sys.executable, str(tmp_path / "ssh.py")])
    with served(tmp_path / "home", tmp_path, "--nodes", str(tmp_path / "nodes.toml"), "--ssh", ssh) as console:

        def nodes() -> dict[str, str]:
            return {node["name"]: node["trouble"] for node in console.client.get("/api/nodes").json()}

        def logs() -> dict[str, str]:
            runs = console.client.get("/api/runs").json()
            path = "logs/node/0/output.log"
            plain = [run for run in runs if not run["trouble"]]
            return {
                one["node"]: console.client.get(f"/api/runs/{one['id']}/{path}").json().get("text") for one in plain
            }

        wait_for(lambda: logs() == {"honest": "the truth", "liar": "a lie"})
        lie, bad, nameless = (run for run in console.client.get("/api/runs").json() if run["node"] == "liar")
        assert "more = 1: Extra" in bad["trouble"] and bad["rank"] == 1 and bad["started"] is bad["step"] is None
        for why in ("step = 18446744073709551616: Input", "steps = 5.5: Input", "started = 1e+300: Input"):
            assert why in bad["trouble"]
        assert "run = '/': String" in nameless["trouble"] and not nameless["is_own"]
        assert console.client.get("/").status_code == 200
        assert lie["description"] == "\N{REPLACEMENT CHARACTER}[2J<b>"
        assert console.client.post(f"/api/runs/{lie['id']}/stop").json()["state"] == "stopped"
        assert (part / "end.json").read_text() == '{"state": "ended"}'
        for mode, why in (("wrong", "is it a node program?"), ("endless", "a line of more than")):
            (tmp_path / "mode").write_text(mode)
            wait_for(lambda why=why: why in nodes()["liar"])
            assert nodes()["honest"] == "" and logs()["honest"] == "the truth"
