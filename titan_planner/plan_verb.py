"""Finds the fastest layouts of a run on machines that a file describes, before the run is paid for.

python -m torchtitan plan CONFIG.toml --cluster FILE.toml
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.schema import Config
from torchtitan.models.describe import describe_configured
from torchtitan.models.families import load_run_or_exit
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from titan_planner.places.unlike import Unlike
    from titan_planner.plan.like import Like

HELP = "find the fastest layouts of a run on given machines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="CONFIG.toml", help="Plan this run; the search replaces its layout")
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="FILE.toml", help="Plan for these machines (see clusters/)"
    )
    parser.add_argument("--show", type=int, default=8, metavar="N", help="List N layouts (default: %(default)s)")
    parser.add_argument("--explain", action="store_true", help="Break down the best step, its memory and its traffic")
    parser.add_argument("--what_if", action="store_true", help="Search again with other machines")
    parser.add_argument(
        "--swarm", metavar="REGION", help="Also plan a swarm of the file's regions, with its syncer in REGION"
    )
    parser.add_argument("--schedules", action="store_true", help="Simulate the best pipeline under torch's schedules")
    parser.add_argument(
        "--drawing", type=Path, metavar="FILE", help="Draw the best pipeline, or on unlike nodes a map (SVG)"
    )
    parser.add_argument("--out", type=Path, metavar="PLAN.toml", help="Write the best layout as a configuration")
    parser.add_argument(
        "--each",
        type=Path,
        metavar="FOLDER",
        help="Write every listed layout into FOLDER, as --out does, and draw each pipeline",
    )
    parser.add_argument("--verify", type=int, metavar="K", help="Train the best K and --others on this machine")
    parser.add_argument(
        "--others", type=int, default=5, help="Number of other layouts that --verify draws (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="Runs of a layout under --verify (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=8, help="Steps of a run of --verify, 5 or more (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=20, help="Minutes after which --verify stops (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="Change it to draw or search anew (default: %(default)s)")
    parser.add_argument(
        "--runs", type=Path, default=Path("outputs/verify"), metavar="FOLDER", help="Put --verify's runs here"
    )
    parser.epilog = "Give options of train.py after --; the search keeps keys of the layout that you give there."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    began = time.perf_counter()
    if args.show < 1:
        raise Refusal(f"--show {args.show}: use 1 or more")
    config, blueprint = load_run_or_exit(["--job.config_file", args.file, *options], None, 0, prog="plan")
    plan = _plan(args, config, blueprint, options)
    print(
        f"{config.job.description} on {plan.name} ({plan.num_devices:,} devices): {plan.job.global_batch} sequences of "
        f"{plan.job.seq_len:,} tokens a step\n{describe_configured(blueprint, config)}\n"
        f"{plan.counted()}, {time.perf_counter() - began:.1f} s; rests on {plan.rests_on}"
    )
    for line in plan.notes:
        print(f"not known: {line}")
    if args.swarm is not None:
        print("\n".join(plan.swarm(args.swarm, options)))
    if not plan.found:
        raise Refusal(plan.nothing_fits())
    print(plan.listing())
    if args.explain:
        print(plan.explained())
    if args.what_if:
        print("what would change the answer:")
        for name, other in plan.others().items():
            print(f"  {name}: {_compared(plan, other)}")
    plan.draw(args.drawing, args.schedules)
    if args.out:
        plan.write(args.out, [args.file, *options])
    if args.each or args.verify is not None:
        from titan_planner.plan.like import Like

        assert isinstance(plan, Like)  # Unlike refuses both
        _write_and_verify(args, options, config, plan)


def _write_and_verify(args: argparse.Namespace, options: Sequence[str], config: Config, plan: "Like") -> None:
    if args.each:
        plan.write_each(args.each, [args.file, *options])
    if args.verify is not None:
        from titan_planner.plan.verify import verify

        verify(args, options, config, plan.job, plan.cluster, plan.answer)


def _plan(args: argparse.Namespace, config: Config, blueprint: Blueprint, options: Sequence[str]) -> "Like | Unlike":
    from titan_planner.places.network import is_unlike

    if is_unlike(args.cluster):
        from titan_planner.places.unlike import Unlike

        return Unlike(args, config, blueprint, options)
    from titan_planner.plan.like import Like

    return Like(args, config, blueprint, options)


def _compared(plan: "Like | Unlike", other: Any) -> str:
    if (found := plan.on(other)) is None:
        return f"nothing fits, or the batch of {plan.job.global_batch} does not divide"
    seconds, name = found
    return f"{seconds:.3f} s ({seconds / plan.seconds() - 1:+.1%}), {name}"
