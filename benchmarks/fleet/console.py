"""Seconds from the console's command to its first answer, and the memory that it takes then.

python -m benchmarks.fleet.console
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS, PORT = 3, 8499


def main() -> None:
    import httpx

    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "torchtitan", "console", "--no-browser", "--port", str(PORT), "--home", home]
        for _ in range(REPEATS):
            begun = time.monotonic()
            console = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                while time.monotonic() - begun < 60:
                    try:
                        httpx.get(f"http://127.0.0.1:{PORT}/api/runs").raise_for_status()
                        break
                    except httpx.HTTPError:
                        time.sleep(0.02)
                seconds = time.monotonic() - begun
                held = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{console.pid}/status").read_text())
                assert held is not None
                print(f"first answer after {seconds:.1f} s, {int(held[1]) / 1000:.0f} MB")
            finally:
                console.terminate()
                console.wait()


if __name__ == "__main__":
    main()
