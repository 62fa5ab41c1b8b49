"""Draws docs/fleet/console.png: the console on a folder of runs, in this machine's Chromium, at the newest run.

.venv/bin/python scripts/draw_console.py --home ~/.torchtitan-recipe --runs outputs
"""

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docs/fleet/console.png from real runs.")
    parser.add_argument("--home", default="~/.torchtitan-recipe", help="the console's (default: %(default)s)")
    parser.add_argument("--runs", default="outputs", help="the folder of runs (default: %(default)s)")
    parser.add_argument(
        "--out", default=str(ROOT / "docs/fleet/console.png"), help="the picture (default: %(default)s)"
    )
    args = parser.parse_args()
    command = [sys.executable, "-m", "torchtitan", "console", "--no-browser", "--port", "0"]
    command += ["--home", args.home, "--runs", args.runs]
    console = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        address = console.stdout.readline().split()[1]
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1200, "height": 760}, base_url=address)
            page.goto("/")
            page.locator("tbody a").first.click()
            page.locator("canvas").nth(3).wait_for()
            page.wait_for_timeout(1000)
            page.screenshot(path=args.out)
    finally:
        console.send_signal(signal.SIGINT)
        console.wait(20)


if __name__ == "__main__":
    main()
