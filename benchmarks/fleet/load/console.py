"""A console under load: how long a written line takes to its page, what the console holds, whether a line is lost.

    python -m benchmarks.fleet.load.console --minutes 60 --browser-nice -7

Stand-ins of nodes (benchmarks/fleet/load/nodes.py) write logs and records. Chromium shows the list of runs and a log;
further pages are held open over their sockets alone, as browsers hold them. All share this machine's clock.
On a machine that does other things, `--browser-nice` gives Chromium its share: it stands for another machine.
"""

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"line (\d{8}) at=([\d.]+);")
WARM_SECONDS = 30
# What the page shows, and when: lines of the log as they come in, and the steps of the list.
WATCH_LOG = """() => { window.seen = []; new MutationObserver(all => { const now = Date.now();
  for (const one of all) for (const node of one.addedNodes)
    if (node.nodeType == 1) seen.push([now / 1000, node.textContent]);
}).observe(document.querySelector('.log'), {childList: true, subtree: true}); }"""
WATCH_LIST = """() => { window.seen = []; const last = {}; new MutationObserver(() => { const now = Date.now();
  for (const row of document.querySelectorAll('tbody tr')) {
    const found = row.textContent.match(/(run\\d{3}) *running *([\\d,]+)\\//);
    if (found && last[found[1]] != found[2]) { last[found[1]] = found[2]; seen.push([now / 1000, found[1], found[2]]); }
  } }).observe(document.querySelector('tbody').parentElement,
               {childList: true, subtree: true, characterData: true}); }"""
TAKE = "() => window.seen.splice(0)"


@dataclass
class Delays:
    """Seconds from a line's writing until somebody had it, and whether each line came once."""

    name: str
    seconds: list[float] = field(default_factory=list)
    minute: list[float] = field(default_factory=list)
    last: int | None = None
    lost: int = 0
    doubled: int = 0

    def take(self, now: float, text: str) -> None:
        for number, written in LINE.findall(text):
            self.note(now - float(written))
            step = 1 if self.last is None else int(number) - self.last
            self.lost, self.doubled = self.lost + max(0, step - 1), self.doubled + (step < 1)
            self.last = max(int(number), self.last or 0)

    def note(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.minute.append(seconds)

    def clear(self) -> None:
        self.seconds.clear(), self.minute.clear()

    def of_minute(self) -> str:
        found, self.minute = _percentiles(self.minute), []
        return f"{self.name}: {found}"

    def __str__(self) -> str:
        said = f"{self.name}: {_percentiles(self.seconds)}, {len(self.seconds):,} seen"
        return f"{said}, {self.lost} lost, {self.doubled} doubled"


def _percentiles(seconds: list[float]) -> str:
    if not seconds:
        return "nothing came"
    p50, p95, most = (sorted(seconds)[int((len(seconds) - 1) * share)] for share in (0.5, 0.95, 1))
    return f"p50 {p50 * 1000:.0f} ms, p95 {p95 * 1000:.0f} ms, most {most:.2f} s"


async def hold_page(address: str, path: str, delays: Delays) -> None:
    """A page without a browser: its socket takes what is sent, and says that it has it."""
    import httpx
    from websockets.asyncio.client import connect

    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        page = (await client.get(path, headers={"Accept": "text/html"})).text
    found = re.search(r"['\"]client_id['\"]: ?['\"]([0-9a-f-]{36})", page)
    assert found, page[:500]
    query = f"client_id={found[1]}&tab_id={found[1]}&document_id={found[1]}&next_message_id=0&implicit_handshake=true"
    socket = f"{address.replace('http', 'ws')}/_nicegui_ws/socket.io/?EIO=4&transport=websocket&{query}"
    async with connect(socket, origin=address, max_size=None) as line:  # type: ignore[arg-type]
        await line.recv()
        await line.send("40")
        async for message in line:
            if message == "2":
                await line.send("3")
            elif isinstance(message, str):
                delays.take(time.time(), message)
    raise AssertionError(f"the socket of {path} was closed")


async def be_late(delays: Delays) -> None:
    """How late this machine wakes a process that has nothing to do: nothing on the page can be faster than that."""
    while True:
        until = time.time() + 0.1
        await asyncio.sleep(0.1)
        delays.note(time.time() - until)


class Console:
    """The console's process."""

    def __init__(self, folder: Path, port: int) -> None:
        ssh = f"{sys.executable} -S -E {ROOT}/benchmarks/fleet/load/nodes.py {folder}"
        command = [sys.executable, "-m", "torchtitan", "console", "--no-browser", "--port", str(port)]
        command += ["--home", f"{folder}/home", "--runs", f"{folder}/none", "--nodes", f"{folder}/nodes.toml"]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*command, "--ssh", ssh], cwd=ROOT, stdout=subprocess.DEVNULL)

    def memory(self) -> float:
        """MB that it holds."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1]) / 1000

    def seconds(self) -> float:
        """Of all cores, so far."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    async def wait_for(self, nodes: int, runs: int) -> list[str]:
        """The ids of its runs, once all nodes and runs are there."""
        import httpx

        async with httpx.AsyncClient(base_url=self.address, timeout=60) as client:
            for _ in range(120):
                await asyncio.sleep(1)
                try:
                    there = [one["is_connected"] for one in (await client.get("/api/nodes")).json()]
                    ids = sorted(run["id"] for run in (await client.get("/api/runs")).json())
                except httpx.TransportError:
                    continue
                if sum(there) == nodes + 1 and len(ids) == runs:
                    return ids
        raise SystemExit(f"{sum(there)} nodes and {len(ids)} runs are there after two minutes")


async def open_chromium(driver: Any, console: Console, ids: list[str], program: Path, nice: int) -> tuple[Any, Any]:
    """A page with the log of the first run, and one with the list of runs."""
    program.write_text(f'#!/bin/sh\necho {nice} >/proc/self/autogroup\nexec {shutil.which("chromium")} "$@"\n')
    program.chmod(0o755)
    chromium = await driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
    first, second = await chromium.new_page(), await chromium.new_page()
    for page in (first, second):
        page.set_default_timeout(120_000)
    await first.goto(f"{console.address}/run/{ids[0]}")
    await first.get_by_role("tab", name="Log").click()
    await first.locator(".log").get_by_text("line 0").first.wait_for()
    await second.goto(console.address)
    await second.get_by_text(f"run{len(ids) - 1:03}").wait_for()
    await asyncio.sleep(WARM_SECONDS)
    await first.evaluate(WATCH_LOG)
    await second.evaluate(WATCH_LIST)
    return first, second


async def measure(folder: Path, console: Console, args: argparse.Namespace) -> None:
    from playwright.async_api import async_playwright

    ids = await console.wait_for(args.nodes, args.runs)
    log, listed, sockets = Delays("a log in Chromium"), Delays("the list in Chromium"), [Delays("waking up alone")]
    others = [asyncio.create_task(be_late(sockets[0]))]
    for number in range(1, args.pages + 1):
        of_list = Delays("a list over its socket") if number % 2 == 0 else None
        if of_list is None:
            sockets.append(Delays(f"the log of run {number} over its socket"))
        path = "/" if of_list else f"/run/{ids[number]}"
        others.append(asyncio.create_task(hold_page(console.address, path, of_list or sockets[-1])))
    begun = float((folder / "begun").read_text())
    async with async_playwright() as driver:
        first, second = await open_chromium(driver, console, ids, folder / "chromium", args.browser_nice)
        for one in sockets:
            one.clear()
        started, spent, held = time.time(), console.seconds(), console.memory()
        for minute in range(round(args.minutes)):
            since, before = time.time(), console.seconds()
            while time.time() < started + 60 * (minute + 1):
                await asyncio.sleep(5)
                for now, text in await first.evaluate(TAKE):
                    log.take(now, text)
                for now, _, step in await second.evaluate(TAKE):
                    listed.note(now - begun - int(step.replace(",", "")) / 1000)
                for task in others:
                    if task.done():
                        task.result()
            share = (console.seconds() - before) / (time.time() - since)
            said = f"after {minute + 1} min: {console.memory():.0f} MB, {share:.0%} of a core"
            print(f"{said}, load of the machine {os.getloadavg()[0]:.1f}", end="; ")
            print("; ".join(one.of_minute() for one in (log, listed, *sockets[:2])), flush=True)
        share = (console.seconds() - spent) / (time.time() - started)
        print(f"memory {held:.0f} MB, after {args.minutes:.0f} min {console.memory():.0f} MB; {share:.0%} of a core")
        print("\n".join(map(str, [log, listed, *sockets])))
        for task in others:
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"nodes": 100, "runs": 50, "lines": 200.0, "pages": 8, "port": 8498, "browser_nice": 0}
    for name, default in {"minutes": 60.0, **numbers}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "none").mkdir()
        tables = (f'[[node]]\nhost = "node{number:03}"\ngpus = 8\n' for number in range(args.nodes))
        (folder / "nodes.toml").write_text("".join(tables))
        command = [
            sys.executable,
            "-m",
            "benchmarks.fleet.load.nodes",
            name,
            *map(str, (args.nodes, args.runs, args.lines)),
        ]
        nodes = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        console = None
        try:
            assert nodes.stdout and nodes.stdout.readline() == b"ready\n"
            console = Console(folder, args.port)
            asyncio.run(measure(folder, console, args))
        finally:
            if console is not None:
                console.process.terminate()
                console.process.wait()
            nodes.kill()
            nodes.wait()


if __name__ == "__main__":
    main()
