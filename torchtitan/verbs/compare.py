"""Trains two configurations from the same seed, one after the other, and reports how far their losses differ.

    python -m torchtitan compare A.toml B.toml

Each training is a run of train.py in its own processes. Pairs whose steps cannot be compared are refused first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal
from torchtitan.verbs.compare_report import compare_records, describe, draw, import_figure
from torchtitan.verbs.compare_runs import plan_runs, train


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The verb; exit codes as `diff` has them: 0 alike, 1 different, 2 not compared."""
    try:
        import_figure()
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
    draw(a, b, comparison, out / "compare.png")
    print(f"\n{text}\nin {out}: compare.txt, compare.png, the runs a and b")
    return 0 if comparison.alike else 1
