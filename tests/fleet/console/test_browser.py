"""The page in a real browser: this machine's Chromium, driven by playwright. It also makes docs/fleet/console.png."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.console.served import Served, make_certificate, served, token, write_run
from tests.fleet.node.machines import commit
from tests.fleet.node.test_node_checkpoints import FILES, VERB
from titan_fleet.console.database import open_database
from titan_fleet.console.door.people import People
from torchtitan.observe.metrics import JsonLines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


LINKS = """
rests_on = "a probe of two nodes"
[probe]
hosts = ["gpu1", "gpu2"]
gbit = [[100.0, 9.4], [1.2, 100.0]]
delay_ms = [[0.0, 0.5], [0.5, 0.0]]
"""
# Code of a run that has a checkpoint at once, and goes on until somebody stops it.
TRAINS = """
import json, os, sys, time
if not os.environ.get("PRINT_ONLY"):
    folder = sys.argv[sys.argv.index("--job.dump_folder") + 1]
    os.makedirs(folder + "/checkpoint/step-10")
    config = open(os.environ["CONFIG_FILE"]).read()
    record = json.dumps({"step": 10, "loss": 7.0}) + chr(10)
    for name, text in (("checkpoint/step-10/manifest.json", "{}"), ("config.toml", config), ("metrics.jsonl", record)):
        open(folder + "/" + name, "w").write(text)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A repository, and its commit."""
    folder = tmp_path_factory.mktemp("code") / "mine"
    files = FILES | {"torchtitan/tools/start.py": TRAINS, "torchtitan/__main__.py": VERB}
    return f"file://{folder}", commit(folder, files)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, code: tuple[str, str]) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("browser")
    first = write_run(folder / "runs/first-try", steps=100)
    meetings = JsonLines(first / "swarm.jsonl", 0)
    for version, (counted, rejected) in enumerate(((["lima", "zurich"], []), (["zurich"], ["lima"])), 1):
        numbers = {"bytes_up": 2e6, "bytes_down": 2e6, "seconds": 1.5, "waited_seconds": 0.0, "apart": 0.01}
        named = {"fragment": 0, "version": version, "counted": counted, "rejected": rejected}
        meetings.write(20 * version, named | numbers)
    meetings.close()
    (first / "hang").mkdir()
    (first / "hang/report.txt").write_text("no progress for 4 s at step 4: rank 1 lags <b>\n  rank 1 is process 7\n")
    (first / "hang/rank_1.txt").write_text("rank 1\n\nthread loader\n  time.sleep(1000)\n")
    plan = {"layout": "1 rank", "rests_on": "a guess", "seconds": 0.25, "memory_gib": 1.0, "run": {}}
    (first / "plan_measured.json").write_text(json.dumps(plan))
    write_run(folder / "runs/lower-rate", steps=60, lr=1e-3)
    (folder / "links.toml").write_text(LINKS)
    (folder / "sbatch").write_text("#!/bin/sh\n")
    (folder / "sbatch").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        more = ["--links", str(folder / "links.toml"), "--git", code[0]]
        with served(folder / "home", folder / "runs", *more) as running:
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        try:
            chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start here: {error}")
        with contextlib.closing(chromium):
            yield chromium


@pytest.fixture
def page(browser: Any, console: Served) -> Iterator[Any]:
    """A tab. What the browser's console says, and what a page asks of other servers, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, base_url=console.address)
    context.set_default_timeout(60_000)
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on(
        "request",
        lambda asked: said.append(asked.url) if not asked.url.startswith((console.address, "data:")) else None,
    )
    yield tab
    context.close()
    assert [line for line in said if not line.startswith("ws://")] == []


def test_the_page_shows_this_machine_and_its_runs_and_a_log_stays_text(page):
    page.goto("/")
    page.get_by_text("This machine:").wait_for()
    page.get_by_role("link", name="first-try").click()
    page.get_by_text("100 of 100").wait_for()
    page.locator("canvas").first.wait_for()
    page.get_by_role("img", name="Accuracy").wait_for()  # what a model of one's own measures
    page.get_by_text("Predicted: 0.25 s a step, 1 GiB (1 rank; a guess). Measured: 0.5 s a step, 2.00 times").wait_for()
    page.get_by_text(": no progress for 4 s at step 4: rank 1 lags <b>. The tab Hang").wait_for()
    page.get_by_role("tab", name="Hang").click()
    page.get_by_text("rank 1 is process 7").wait_for()
    page.get_by_text("time.sleep(1000)").wait_for()
    page.get_by_role("tab", name="Log").click()
    log = page.get_by_text("<script>document.title='taken'</script> red")
    log.wait_for()
    assert "\x1b" not in log.inner_text() and "taken" not in page.title()
    page.get_by_placeholder("Search").fill("line 12345")
    page.get_by_placeholder("Search").press("Enter")
    page.get_by_role("button", name="line 12345").click()
    page.locator(".log").get_by_text("line 12346").wait_for()
    assert page.locator(".log").inner_text().startswith("line 12345\nline 12346\n")
    page.get_by_role("tab", name="Meetings").click()
    page.get_by_role("row", name="zurich 2 0 40").wait_for()
    page.get_by_role("row", name="lima 1 1 20").wait_for()
    page.get_by_role("tab", name="Files").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="config.toml").click()
    assert "llama3" in Path(download.value.path()).read_text()


def test_links_that_a_probe_measured_are_a_map(page, console):
    page.goto("/nodes")
    section = page.locator("section", has=page.get_by_role("heading", name="Links"))
    section.get_by_text("a probe of two nodes").wait_for()
    section.locator("canvas").nth(1).wait_for()
    assert section.locator(".chart").count() == 2 and not page.get_by_text("Measure links").is_visible()
    assert console.client.get("/api/links").json()["gbit"][1] == [1.2, 100.0]
    refused = console.client.post("/api/links", headers={"Origin": console.address})
    assert refused.status_code == 409 and "a probe of 0 node measures no link" in refused.json()["detail"]


def test_two_runs_get_a_tag_are_overlaid_and_their_configurations_compared(page, console):
    page.goto("/")
    for name in ("first-try", "lower-rate"):
        page.get_by_role("row", name=name).get_by_role("checkbox").click()
    page.get_by_role("button", name="Tag", exact=True).click()
    page.get_by_role("dialog").get_by_label("Tags").fill("pair")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("cell", name="pair").nth(1).wait_for()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("cell", name="optimizer.lr").wait_for()
    page.get_by_role("cell", name="0.001").wait_for()
    page.locator("canvas").first.wait_for()


def test_a_mistake_is_named_as_one_types_and_a_run_of_others_code_is_reviewed_started_and_read(page, code):
    """Its code is no recipe, and so starts at once; test_api.py starts the recipe and reads what it saved."""
    page.goto("/new")
    page.get_by_text("none", exact=True).wait_for()
    editor = page.locator(".cm-content")
    editor.click()
    page.keyboard.press("Control+End")
    page.keyboard.type("\n[trainin]\n")
    page.get_by_text("trainin").nth(1).wait_for()
    for _ in range(len("\n[trainin]\n")):
        page.keyboard.press("Backspace")
    page.get_by_text("none", exact=True).wait_for()
    page.get_by_label("Look up a key").fill("warmup_st")
    page.get_by_text("lr_scheduler.warmup_steps").wait_for()
    page.get_by_label("Name of the run").fill("typed")
    page.get_by_label("Git repository").fill(code[0])
    page.get_by_label("Its commit").fill("main")
    page.get_by_role("button", name="Review").click()
    page.get_by_text("python -m torchtitan.tools.start --job.dump_folder").wait_for()
    page.get_by_role("button", name="Start").click()
    page.get_by_text("a commit the 40 digits of `git rev-parse HEAD`").wait_for()
    page.get_by_label("Its commit").fill(code[1])
    page.get_by_role("button", name="Review").click()
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/run/typed-*")
    page.get_by_text("running", exact=True).wait_for()
    page.get_by_text("10 of 100").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=True).wait_for()
    page.get_by_role("tab", name="Files").click()
    page.get_by_role("button", name="Look again").click()
    page.get_by_label("Prompt").fill("Once <b>upon</b>")
    page.get_by_role("button", name="Generate from this").click()
    page.get_by_text("Once <b>upon</b>").wait_for()
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="model.safetensors").click()
    assert download.value.suggested_filename == "model.safetensors"
    page.get_by_role("link", name="Audit").click()
    page.get_by_placeholder("Filter").fill("TYPED")
    page.get_by_role("row", name=f"local start typed on this machine, {code[0]} at {code[1]} done").wait_for()


def test_a_layout_of_the_planner_is_taken_into_the_editor_and_saved_as_a_design(page):
    page.goto("/new")
    page.get_by_text("none", exact=True).wait_for()
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("button", name="Search").click()
    page.get_by_text("1. 1 rank, ").wait_for(timeout=60_000)
    page.get_by_role("button", name="Take").first.click()
    page.locator(".cm-content").get_by_text("[parallelism]").wait_for()
    page.get_by_text("none", exact=True).wait_for()
    page.get_by_role("button", name="Designs").click()
    page.get_by_label("Name of the design").fill("planned")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved planned").wait_for()
    page.goto("/new")
    page.get_by_role("button", name="Designs").click()
    page.get_by_role("button", name="Clone planned").click()
    page.locator(".cm-content").get_by_text("[parallelism]").wait_for()
    page.get_by_role("button", name="Designs").click()
    assert page.get_by_label("Name of the design").input_value() == "planned-copy"
    page.get_by_role("button", name="Delete planned").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text("None is saved yet.").wait_for()


def test_the_script_for_a_scheduler_is_shown_before_it_is_sent(page):
    page.goto("/new")
    page.get_by_text("none", exact=True).wait_for()
    page.get_by_role("button", name="Submit").click()
    send = page.get_by_role("dialog").get_by_role("button", name="Submit")
    assert send.is_disabled()
    page.get_by_label("GPUs a node").fill("0")
    page.get_by_role("button", name="Show the script").click()
    page.get_by_text("sbatch --job-name=debug-model-").wait_for()
    assert send.is_enabled()
    page.get_by_label("GPUs a node").fill("4")
    page.wait_for_function("button => button.disabled", arg=send.element_handle())


def test_a_login_is_refused_and_accepted_over_tls_shows_the_role_and_ends_when_the_token_is_revoked(browser, tmp_path):
    pytest.importorskip("cryptography", reason="cryptography makes the certificate")
    certificate, key = make_certificate(tmp_path)
    shown = [token(tmp_path / "home", name, role) for name, role in (("boss", "admin"), ("guest", "viewer"))][1]
    write_run(tmp_path / "runs/first-try")
    options = ["--host", "127.0.0.1", "--login", "--certificate", str(certificate), "--key", str(key)]
    with served(tmp_path / "home", tmp_path / "runs", *options) as guarded:
        context = browser.new_context(base_url=guarded.address, ignore_https_errors=True)
        tab = context.new_page()
        tab.goto("/")
        tab.get_by_label("Token").fill("wrong")
        tab.get_by_role("button", name="Log in").click()
        tab.get_by_text("This token is unknown or revoked.").wait_for()
        tab.get_by_label("Token").fill(shown)
        tab.get_by_role("button", name="Log in").click()
        tab.get_by_text("guest (viewer)").wait_for()
        tab.get_by_text("first-try").wait_for()
        tab.get_by_text("This machine:").wait_for()
        assert tab.get_by_role("button", name="Train the debug model").count() == 0
        assert tab.get_by_role("link", name="Audit").count() == 0
        tab.goto("/audit")
        tab.get_by_text("guest is viewer; an admin can read this.").wait_for()
        tab.go_back()
        tab.get_by_text("This machine:").wait_for()
        assert "console" not in tab.evaluate("document.cookie")
        People(open_database(tmp_path / "home")).revoke_token("guest")
        tab.get_by_text("Connection lost").wait_for()
        tab.goto("/")
        tab.get_by_label("Token").wait_for()
        context.close()


def test_every_page_fits_a_phone_in_the_dark_and_can_be_reached_by_keyboard(browser, console):
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, base_url=console.address, color_scheme="dark", has_touch=True
    )
    tab = context.new_page()
    for path in ("/", "/nodes", "/new", "/compare", "/audit"):
        tab.goto(path)
        tab.locator("#content").wait_for()
        tab.wait_for_timeout(300)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, path
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 28)"
    tab.goto("/")
    tab.locator("#content").wait_for()
    reached = []
    for _ in range(14):
        tab.keyboard.press("Tab")
        reached.append(
            tab.evaluate("(document.activeElement.innerText || document.activeElement.ariaLabel || '').trim()")
        )
    assert {"Skip to content", "Runs", "Nodes", "New run", "Compare", "Audit"} <= set(reached)
    context.close()
