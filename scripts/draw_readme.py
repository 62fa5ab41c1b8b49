"""Draws two pictures: README's run of the debug model in a terminal, and the planner's page's pipeline.

python scripts/draw_readme.py    # docs/recipe/run.svg and docs/planner/pipeline.svg, in about two minutes on two cores
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS, LINES = 100, 30
RUN, UNTIL = "./run_llama_train.sh", "step  60/100"
PLAN = "train_configs/llama3_70b.toml --cluster clusters/h100_32x8.toml --show 1"
LAYOUT = "--parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule 1F1B"


def on_a_terminal(command: list[str], until: str) -> str:
    """What a terminal shows of a command as soon as a line matches `until`; the command is then stopped."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    shown = ""
    with subprocess.Popen(command, cwd=DOCS.parent, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        while not re.search(until, shown):
            shown += os.read(ours, 65536).decode(errors="replace")
        process.kill()
    os.close(ours)
    # "\r\033[K" erases a line, to write it anew.
    lines = [line.rstrip("\r").split("\r\033[K")[-1] for line in shown.split("\n")]
    return "\n".join(line for line in lines if line)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shown = on_a_terminal([RUN, "--job.dump_folder", f"{folder}/run"], until=f"{UNTIL}.*\n.* left  loss .*tok/s")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown.replace(f"{folder}/run", "outputs")))
    svg = console.export_svg(title=RUN)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a page's picture may not load fonts
    (DOCS / "recipe/run.svg").write_text(svg, encoding="utf-8")
    plan = [sys.executable, "-m", "torchtitan", "plan", *PLAN.split(), "--drawing", str(DOCS / "planner/pipeline.svg")]
    subprocess.run([*plan, "--", *LAYOUT.split()], cwd=DOCS.parent, check=True)


if __name__ == "__main__":
    main()
