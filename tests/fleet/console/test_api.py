"""The API of a real console over real run folders, on loopback."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load
from torch import Tensor

from tests.fleet.console.served import HOSTILE, TOML, Served, served, wait_for, write_run
from tests.fleet.node.machines import FILES, commit
from tests.fleet.node.test_launch_ssh import linux
from torchtitan.config.load import check_text
from torchtitan.observe.planned import described

SHORT = TOML.replace("steps = 100", "steps = 2").replace("warmup_steps = 10", "warmup_steps = 1")
SHORT = SHORT.replace("seq_len = 256", "seq_len = 32").replace("local_batch_size = 8", "local_batch_size = 1")


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("console")
    write_run(folder / "runs/one")
    write_run(folder / "runs/deeper/two", steps=10, lr=1e-3)
    (folder / "secret.txt").write_text("secret")
    (folder / "runs/one/link.log").symlink_to(folder / "secret.txt")
    with served(folder / "home", folder / "runs", "--git", f"file://{folder}/mine") as running:
        yield running


def id_of(console: Served, name: str) -> str:
    return next(run["id"] for run in console.client.get("/api/runs").json() if run["name"] == name)


def test_runs_below_the_folder_are_listed_with_what_they_recorded(console):
    runs = {run["name"]: run for run in console.client.get("/api/runs").json()}
    assert set(runs) >= {"one", "deeper/two"}
    one = runs["one"]
    assert (one["state"], one["step"], one["steps"], one["is_own"]) == ("stopped", 30, 100, False)
    assert one["loss"] == pytest.approx(5.0) and one["description"] == "debug model"
    assert one["model"] == "llama3 debugmodel"
    page = console.client.get(f"/api/runs/{one['id']}").json()
    assert page["checkpoints"] == ["step-20"] and page["logs"] == ["train.log"]
    assert page["configuration"]["optimizer.lr"] == "0.003"


def test_metrics_go_on_after_a_step_and_a_run_that_went_back_is_read_anew(console):
    id = id_of(console, "deeper/two")
    first = console.client.get(f"/api/runs/{id}/metrics").json()
    assert [record["step"] for record in first["records"]] == list(range(1, 11)) and first["next"] == 10
    assert first["validation"] == [{"step": 10, "validation_loss": 7.5, "accuracy": 0.1}]
    assert "memory_gib" not in first["records"][0]
    assert first["records"][-1]["elapsed"] == pytest.approx(5.0)
    assert console.client.get(f"/api/runs/{id}/metrics?after=10").json()["records"] == []
    file = console.runs / "deeper/two/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + json.dumps({"step": 6, "loss": 1.0}) + "\n" + "x" * 2000 + "\n")
    again = console.client.get(f"/api/runs/{id}/metrics?after=4").json()["records"]
    assert [(record["step"], record["loss"]) for record in again] == [(5, 7.5), (6, 1.0)]


def test_a_validation_that_is_written_after_the_record_of_its_step_is_given_once(console):
    folder = write_run(console.runs / "three", steps=10)
    record = (folder / "validation.jsonl").read_text()
    (folder / "validation.jsonl").write_text("")
    wait_for(lambda: "three" in [run["name"] for run in console.client.get("/api/runs").json()])
    metrics, given = f"/api/runs/{id_of(console, 'three')}/metrics", {"after": -1, "validated": -1}
    found = []
    for _ in range(3):
        said = console.client.get(metrics, params=given).json()
        found.append((len(said["records"]), [one["step"] for one in said["validation"]]))
        given = {"after": said["next"], "validated": said["validated"]}
        (folder / "validation.jsonl").write_text(record)
    assert found == [(10, []), (0, [10]), (0, [])]


def test_a_new_run_begins_with_the_configuration_of_another(console):
    page = console.client.get("/new", params={"source": id_of(console, "deeper/two")}).text
    assert "lr = 0.001" in page and "lr = 0.001" not in console.client.get("/new", params={"source": "unknown"}).text


def test_a_log_is_read_from_a_position_or_from_its_end_and_searched_and_is_inert(console):
    log = f"/api/runs/{id_of(console, 'one')}/logs/train.log"
    piece = console.client.get(log, params={"position": 7}).json()
    assert piece["text"].startswith("line 1\n") and piece["next"] - piece["position"] <= 2**16 < piece["size"]
    text, position = "", 0
    while position < piece["size"]:
        part = console.client.get(log, params={"position": position}).json()
        text, position = text + part["text"], part["next"]
    assert text.splitlines()[:-1] == [f"line {i}" for i in range(20_000)]
    end = console.client.get(log, params={"position": -len(HOSTILE)}).json()["text"]
    assert end == "<script>document.title='taken'</script> red  ␈back �bidi �\n"
    found = console.client.get(log, params={"search": "LINE 1234"}).json()
    assert [match["line"] for match in found["matches"]][:2] == ["line 1234", "line 12340"]
    at = found["matches"][0]["position"]
    assert console.client.get(log, params={"position": at}).json()["text"].startswith("line 1234\n")


def test_files_are_listed_and_sent_and_nothing_outside_the_run_is(console):
    id = id_of(console, "one")
    files = {row["path"]: row["size"] for row in console.client.get(f"/api/runs/{id}/files").json()["files"]}
    sent = console.client.get(f"/api/runs/{id}/files/train.log")
    assert sent.content == (console.runs / "one/train.log").read_bytes() and len(sent.content) == files["train.log"]
    assert sent.headers["content-disposition"].startswith("attachment")
    assert sent.headers["content-type"] == "application/octet-stream"
    assert "link.log" not in files
    for path in ("link.log", "..%2f..%2fsecret.txt", "%2e%2e/%2e%2e/secret.txt", "%2fetc%2fpasswd", "missing"):
        for kind in ("files", "logs"):
            answer = console.client.get(f"/api/runs/{id}/{kind}/{path}")
            assert "secret" not in answer.text.replace("secret.txt", "") and "root:" not in answer.text
            assert answer.status_code in (404, 409) or answer.json()["text"] == ""
    assert console.client.get("/api/runs/..%2f..").status_code == 404
    assert console.client.get("/api/runs/unknown/files").status_code == 404


def test_this_machine_reports_its_devices(console):
    wait_for(lambda: console.client.get("/api/nodes").json()[0]["is_connected"])
    node = console.client.get("/api/nodes").json()[0]
    assert (
        node["is_here"]
        and node["report"]["cores"] >= 1
        and node["report"]["memory_bytes"] > 2**20
        and node["differs"] == []
    )


def test_a_configuration_is_checked_as_the_recipe_checks_it(console):
    def mistakes(text: str, **more: bool) -> list[str]:
        return console.client.post("/api/check", json={"config": text, **more}).json()["mistakes"]

    assert mistakes(TOML) == [] == mistakes(TOML, whole=True)
    (mistake,) = mistakes(TOML.replace("seq_len = 256\nsteps", "seq_length = 256\nsteps"))
    assert "seq_len" in mistake
    assert "is not TOML" in mistakes("[job")[0]
    assert mistakes("a" + ".a" * 100_000 + " = 1") and mistakes("a = " + "[" * 100_000)
    (missing,) = [
        line for line in mistakes(TOML.replace("./tests/assets", "./nowhere"), whole=True) if "nowhere" in line
    ]
    assert "tokenizer" in missing


def test_what_no_person_means_is_refused_in_a_sentence(console):
    id = id_of(console, "one")
    for path in (f"/api/runs/{id}/files/%00", f"/api/runs/{id}/logs/%00", "/api/audit?search=%00"):
        assert console.client.get(path).status_code == 422
    as_json = {"Content-Type": "application/json"}
    for version in ("NaN", "1e999", '"\\ud800"'):
        body = f'{{"version": {version}, "\\ud800": 1}}'
        answer = console.client.post("/api/designs/x/delete", content=body, headers=as_json)
        assert answer.status_code == 422 and answer.json()["detail"][0]["loc"][0] == "body"
    many = dict.fromkeys(map(str, range(50_000)))
    assert len(console.client.post("/api/check", json=many).json()["detail"]) == 20
    assert console.client.post("/api/check", content=b"[" * 100_000, headers=as_json).status_code == 400
    assert console.client.post("/login", data=dict.fromkeys("abcde", "1")).status_code == 400


def test_the_api_describes_itself_and_refuses_what_is_not_in_it(console):
    paths = console.client.get("/openapi.json").json()["paths"]
    assert {"/api/runs", "/api/runs/{id}", "/api/runs/{id}/metrics", "/api/nodes", "/api/runs/{id}/stop"} <= set(paths)
    assert console.client.get("/api/else").status_code == 404
    for method in ("TRACE", "QUERY"):
        wrong = console.client.request(method, "/api/runs")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")
        assert console.client.request(method, "/api/else").json()["detail"].startswith("/api/else is not served")
    stop = console.client.get("/openapi.json").json()["components"]["schemas"]["Stop"]["properties"]["seconds"]
    assert (stop["minimum"], stop["maximum"]) == (0, 3600)
    assert console.client.post("/api/runs/a/stop", json={"seconds": True}).status_code == 422
    id = id_of(console, "one")
    assert console.client.get(f"/api/runs/{id}/metrics?after=many").status_code == 422
    assert console.client.post("/api/runs", json={"config": "", "name": "../up"}).status_code == 422
    assert console.client.post(f"/api/runs/{id}/stop").json()["detail"].startswith("run = one was not started by")
    assert console.client.post("/api/runs", json={"config": TOML, "name": "a", "nodes": ["b"]}).status_code == 409
    twice = {"config": TOML, "name": "a", "nodes": ["this machine"] * 2}
    assert "names one twice" in console.client.post("/api/runs", json=twice).json()["detail"]
    refused = console.client.post("/api/runs", json={"config": TOML + "[trainin]\nx = 1", "name": "a"})
    assert refused.status_code == 409 and "trainin" in refused.json()["detail"]
    assert "has the recipe already" in console.client.post("/api/nodes/this machine/install").json()["detail"]


@pytest.mark.timeout(600)
def test_a_run_is_started_outlives_the_console_ends_and_is_deleted(console, tmp_path):
    plan = {"layout": "1 rank", "rests_on": "a guess", "seconds": 0.5, "memory_gib": 1.5, "parts": {}}
    plan["run"] = described(check_text(SHORT, "a test").model_dump())
    wish = {"config": SHORT, "plan": json.dumps(plan), "name": "tried"}
    started = console.client.post("/api/runs", json=wish, timeout=200)
    assert started.status_code == 201, started.text
    id, end = started.json()["id"], time.monotonic() + 200
    with served(console.home, tmp_path) as other:  # it finds the run of the first
        while (run := other.client.get(f"/api/runs/{id}").json()["run"])["state"] == "running":
            assert time.monotonic() < end
            time.sleep(0.5)
        assert (run["state"], run["exit_code"], run["step"]) == ("ended", 0, 2)
        assert "step 2/2" in other.client.get(f"/api/runs/{id}/logs/node/0/output.log").json()["text"]
        said = other.client.get(f"/api/runs/{id}/prediction").json()
        assert (said["layout"], said["seconds"], said["memory_gib"]) == ("1 rank", 0.5, 1.5)
        assert said["measured_seconds"] > 0 and said["measured_memory_gib"] > 0 and said["differs"] == []
        assert any(
            row["path"] == "plan_measured.json" for row in other.client.get(f"/api/runs/{id}/files").json()["files"]
        )
        made = generate_and_export(other, id)
        assert made["model.embed_tokens.weight"].shape[1] == 256
        assert other.client.post(f"/api/runs/{id}/stop", json={"seconds": 1}).json()["state"] == "ended"
        assert other.client.post(f"/api/runs/{id}/delete").json()["freed_bytes"] > 0
        assert other.client.get(f"/api/runs/{id}").status_code == 404
        done = [(row["who"], row["what"]) for row in other.client.get("/api/audit").json()]
        assert done[:6] == [("local", what) for what in ("delete", "stop", "export", "export", "generate", "start")]


def generate_and_export(console: Served, id: str, step: int = 2) -> dict[str, Tensor]:
    """The weights, as they are downloaded."""
    wish, prompt = {"checkpoint": f"step-{step}"}, "--help <script>\x1b[31m"
    body = wish | {"prompt": prompt, "tokens": 3, "temperature": 0}
    made = console.client.post(f"/api/runs/{id}/generate", json=body, timeout=300)
    assert made.status_code == 200 and made.json()["text"].startswith("--help <script>"), made.text
    assert "\x1b" not in made.json()["text"]
    unknown = console.client.post(f"/api/runs/{id}/export", json={"checkpoint": "step-7"})
    assert unknown.status_code == 404 and "checkpoint = 'step-7' is none of this run" in unknown.text
    made = console.client.post(f"/api/runs/{id}/export", json=wish, timeout=300)
    assert made.json()["folder"] == f"export/step-{step}", made.text
    return load(console.client.get(f"/api/runs/{id}/files/{made.json()['folder']}/model.safetensors").content)


@linux
def test_the_code_of_a_run_may_be_a_commit_of_a_repository_that_is_allowed(console):
    folder = console.home.parent
    made = commit(folder / "mine/recipe", FILES)

    def start(**code: str) -> httpx.Response:
        config = TOML.replace("debug model", "lines = 3 .")
        return console.client.post("/api/runs", json={"config": config, "name": "theirs", "code": code})

    assert start(git=f"file://{folder}/mine/recipe", commit="main").status_code == 422
    refused = start(git=f"file://{folder}/other", commit=made).json()["detail"]
    assert f"it allows addresses below: file://{folder}/mine" in refused
    run = f"/api/runs/{start(git=f'file://{folder}/mine/recipe', commit=made).json()['id']}"
    wait_for(lambda: console.client.get(run).json()["run"]["state"] == "ended")
    assert console.client.get(run).json()["run"]["code"] == made
    assert console.client.get(f"{run}/logs/node/0/output.log").json()["text"] == "line 0\nline 1\nline 2\n"
    audited = console.client.get("/api/audit").json()[0]
    assert audited["target"] == f"theirs on this machine, file://{folder}/mine/recipe at {made}"


def test_the_console_never_loads_torch(console):
    maps = Path(f"/proc/{console.process.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not show what a process has loaded")
    assert "libtorch" not in maps.read_text()


def test_the_planner_proposes_layouts_that_can_be_taken_as_they_are(console):
    wish = {"config": TOML.replace("[training]", "[training]\nglobal_batch_size = 8"), "machines": "cpu_1x2"}
    (best, *_) = console.client.post("/api/plan", json=wish, timeout=100).json()
    assert best["seconds"] > 0 and best["layout"].startswith("1 rank") and best["drawing"] == ""
    assert check_text(best["config"], "a proposal").training.global_batch_size == 8
    assert json.loads(best["plan"])["run"]["training.global_batch_size"] == 8
    for changed, why in (({"machines": "../x"}, "is no file of clusters/"), ({"nodes": ["elsewhere"]}, "is not known")):
        refused = console.client.post("/api/plan", json=wish | changed, timeout=100)
        assert refused.status_code == 409 and why in refused.json()["detail"]
