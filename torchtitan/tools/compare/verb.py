"""Trains two configurations from the same seed, one after the other, and reports how far their losses differ.

    python -m torchtitan compare A.toml B.toml

Each training is a run of train.py in its own processes. Pairs whose steps cannot be compared are refused first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal
from torchtitan.tools.compare.report import compare_records, describe, draw
from torchtitan.tools.compare.runs import plan_runs, train

HELP = "train two configurations from one seed and compare their losses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.toml", help="a configuration")
    parser.add_argument("b", metavar="B.toml", help="another, which should train alike")
    parser.add_argument("--out", default="outputs/compare", help="folder for result and runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="only the first steps of both, on the same learning rate curve")
    parser.add_argument("--world_size_a", type=int, help="ranks of A (default: the product of its degrees)")
    parser.add_argument("--world_size_b", type=int, help="ranks of B (default: the product of its degrees)")
    bound = "largest relative difference of %s that counts as alike (default: %%(default)s)"
    parser.add_argument("--loss_bound", type=float, default=1e-5, help=bound % "loss")
    parser.add_argument("--norm_bound", type=float, default=1e-4, help=bound % "gradient norm")
    parser.epilog = "After --: options of train.py, for both."


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The verb; exit codes as `diff` has them: 0 alike, 1 different, 2 not compared."""
    try:
        out = Path(args.out)
        a, b = plan_runs(args, options)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(f"--out = {args.out} cannot be created: {error.strerror}; name another folder") from None
        comparison = compare_records(train(a), train(b), args.loss_bound, args.norm_bound)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    text = describe(a, b, comparison)
    (out / "compare.txt").write_text(text, encoding="utf-8")
    draw(comparison, out / "compare.png")
    print(f"\n{text}\nin {out}: compare.txt, compare.png, the runs a and b")
    return 0 if comparison.alike else 1
