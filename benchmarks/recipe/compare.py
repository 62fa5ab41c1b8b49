"""Compares the speed of this tree with another commit: both train the same preset in turn, and the ratio counts.

    python -m benchmarks.recipe.compare HEAD~1 --preset cpu-60m --repeats 3

Absolute times drift on a shared machine, but two runs one after the other see the same drift. A temporary git worktree
holds the other commit while the benchmark runs. Both trees run with this Python and this tree's preset.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.recipe.run import PRESETS, ROOT, measure

FIGURES = {"tokens_per_second": "tokens/s", "memory_gib": "memory, GiB", "first_step_seconds": "first step, s"}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with the revision's files."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        done = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{revision} cannot be checked out ({done.stderr.strip()}); name a commit, branch or tag")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the commit, branch or tag to compare this tree with")
    parser.add_argument("--preset", choices=PRESETS, default="cpu-60m", help="what both train (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each tree (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="how many first steps to ignore (default: %(default)s)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    pairs = []
    with checked_out(args.revision) as tree:
        for _ in range(args.repeats):
            pairs.append([measure(args.preset, options, args.warmup, root) for root in (tree, ROOT)])
    print(f"{args.preset}, {args.repeats} runs of each in turn; medians\n")
    print(f"| | {args.revision} | this tree | this tree / theirs |\n| --- | --- | --- | --- |")
    for key, name in FIGURES.items():
        before, after = (statistics.median(pair[i][key] for pair in pairs) for i in (0, 1))
        ratios = sorted(new[key] / old[key] for old, new in pairs)
        print(
            f"| {name} | {before:,.2f} | {after:,.2f} | {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}) |"
        )


if __name__ == "__main__":
    main()
