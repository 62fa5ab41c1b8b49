"""What people keep in the console's database: designs, tags, tokens and the audit log. On SQLite and on Postgres."""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.fleet.console.postgres import postgres
from tests.fleet.console.served import TOML, Served, served, write_run
from titan_fleet.console import database
from titan_fleet.console.database import open_database
from titan_fleet.console.door.people import People
from torchtitan.refusal import Refusal


@pytest.fixture(scope="module", params=["SQLite", pytest.param("Postgres", marks=pytest.mark.all)])
def url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(postgres()) if request.param == "Postgres" else None


@pytest.fixture(scope="module")
def console(url: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kept")
    write_run(folder / "runs/one", steps=3)
    with served(folder / "home", folder / "runs", *(["--database", url] if url else [])) as running:
        yield running


def save(console: Served, name: str, **more: Any) -> httpx.Response:
    return console.client.post("/api/designs", json={"name": name, "config": TOML, "nodes": ["this machine"], **more})


def try_to_save(console: Served, version: int, text: str) -> httpx.Response:
    return save(console, "both", version=version, config=text)


def test_a_design_is_saved_opened_edited_and_deleted(console):
    first = save(console, "small", machines="cpu_1x2").json()["version"]
    assert save(console, "small", config="[job", version=first).json()["version"] > first  # a draft may have mistakes
    assert save(console, "other").status_code == 200
    assert [row["name"] for row in console.client.get("/api/designs").json()] == ["other", "small"]
    design = console.client.get("/api/designs/small").json()
    assert (design["config"], design["nodes"], design["who"]) == ("[job", ["this machine"], "local")
    assert save(console, "copy", config=design["config"]).status_code == 200
    for row in console.client.get("/api/designs").json():
        wish = {"version": row["version"]}
        assert console.client.post(f"/api/designs/{row['name']}/delete", json=wish).status_code == 200
    assert console.client.get("/api/designs").json() == []
    assert console.client.get("/api/designs/small").status_code == 404
    done = [(row["what"], row["target"]) for row in console.client.get("/api/audit").json()]
    assert done[0] == ("delete design", "small") and ("save design", "small") in done


def test_of_people_who_save_a_design_at_once_one_is_served_and_the_others_are_told(console):
    before = version = 0
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            configs = [f"# {number}" for number in range(8)]
            answers = list(pool.map(partial(try_to_save, console, version), configs))
        assert sorted(answer.status_code for answer in answers) == [200, *[409] * 7]
        won = next(text for text, answer in zip(configs, answers, strict=True) if answer.status_code == 200)
        design = console.client.get("/api/designs/both").json()
        assert design["config"] == won
        lost = next(answer for answer in answers if answer.status_code == 409).json()["detail"]
        assert lost.startswith("design = both was saved by local since you opened it; save yours under another name")
        before, version = version, design["version"]
    stale = console.client.post("/api/designs/both/delete", json={"version": before})
    assert stale.status_code == 409 and "was saved by local" in stale.json()["detail"]
    assert console.client.post("/api/designs/both/delete", json={"version": version}).status_code == 200
    gone = save(console, "both", version=version)
    assert gone.status_code == 409 and "is not there any more" in gone.json()["detail"]


@pytest.mark.parametrize(
    "wrong", [{"name": "../x"}, {"config": "a\0"}, {"version": -1}, {"nodes": ["\0"]}, {"else": 1}]
)
def test_a_design_that_cannot_be_kept_is_refused(console, wrong):
    assert console.client.post("/api/designs", json={"name": "x", "config": "", **wrong}).status_code == 422


def test_runs_get_tags_that_others_see_and_lose_them_and_are_found_by_them(console):
    def tag(**wish: list[str]) -> list[str]:
        return console.client.post(f"/api/runs/{id}/tags", json=wish).json()["tags"]

    def found(*tags: str) -> list[str]:
        return [run["name"] for run in console.client.get("/api/runs", params={"tag": tags}).json()]

    id = console.client.get("/api/runs").json()[0]["id"]
    with ThreadPoolExecutor(8) as pool:
        assert all("good" in tags for tags in pool.map(lambda _: tag(add=["good"]), range(8)))
    assert tag(add=["ünïcode", "good"], remove=["absent"]) == ["good", "ünïcode"]
    assert found("good") == ["one"] == found("good", "ünïcode") and found("good", "else") == []
    assert console.client.get("/api/runs").json()[0]["tags"] == ["good", "ünïcode"]
    assert tag(remove=["ünïcode"]) == ["good"] == tag(add=["x"], remove=["x"])
    assert console.client.get("/api/audit").json()[0]["target"] == "one +x -x"
    for wrong in ({"add": ["two words"]}, {"add": ["\u202e"]}, {"add": "x"}, {"remove": ["x" * 41]}):
        assert console.client.post(f"/api/runs/{id}/tags", json=wrong).status_code == 422
    many = console.client.post(f"/api/runs/{id}/tags", json={"add": [f"t{number}" for number in range(20)]})
    assert many.status_code == 409 and "21 tags" in many.json()["detail"]
    assert console.client.post("/api/runs/unknown/tags", json={"add": ["x"]}).status_code == 404


def test_the_audit_log_is_searched_for_a_text_and_holds_nothing_that_a_reader_obeys(console):
    def rows(search: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = console.client.get("/api/audit", params={"search": search}).json()
        return found

    assert save(console, "found_1").status_code == 200
    start = {"config": "[training]\nsteps = '\0'\n\u202e", "name": "odd"}
    assert console.client.post("/api/runs", json=start).status_code == 409
    assert [row["target"] for row in rows("FOUND_1")] == ["found_1"] and rows("found%1") == []
    (row,) = rows("odd on this machine")
    assert row["outcome"].startswith("refused: ") and not {"\0", "\u202e"} & set(row["outcome"])


def test_tokens_and_sessions_are_kept_and_end(url, tmp_path):
    people = People(open_database(tmp_path, url))
    ada = people.of_token(people.add_token("ada", "operator"))
    assert ada and ada.role == "operator"
    with pytest.raises(Refusal, match="has a token already"):
        people.add_token("ada", "viewer")
    session, other = people.start_session(ada), people.start_session(ada)
    shown, stays = people.of_session(session), people.of_session(other)
    people.end_session(session)  # a page that is still open may do no more
    fresh = People(open_database(tmp_path, url))
    assert shown and stays and not fresh.is_still(shown) and fresh.is_still(stays) and fresh.is_still(ada)
    people.revoke_token("ada")
    again = People(open_database(tmp_path, url))  # it remembers nothing
    assert again.of_session(session) is None and not again.is_still(ada) and list(again.tokens()) == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("nonsense", "Could not parse"),
        ("postgresql+nodriver://a@b/c", "Can't load plugin"),
        ("postgresql+psycopg://a:secret@127.0.0.1:1/c", "Connection refused"),
    ],
)
def test_a_database_that_cannot_be_opened_is_refused_and_its_password_is_not_shown(tmp_path, wrong, why):
    if "psycopg:" in wrong:
        pytest.importorskip("psycopg", reason="psycopg is not installed")
    with pytest.raises(Refusal, match=f"--database cannot be opened: .*{why}.*; for Postgres, use") as refused:
        open_database(tmp_path, wrong)
    assert "secret" not in str(refused.value)


def test_a_database_that_gives_no_answer_is_refused_soon(tmp_path, monkeypatch):
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    monkeypatch.setitem(database._PATIENCE, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(Refusal, match="timeout"):
        open_database(tmp_path, f"postgresql+psycopg://a@127.0.0.1:{mute.getsockname()[1]}/c")
