"""Breaks a run in many ways, starts it again each time, and compares its end with that of an undisturbed run.

python -m torchtitan drill                                    a small model and every kind of fault: some minutes
python -m torchtitan drill -- --job.config_file mine.toml     a run of your own
python -m torchtitan drill --on all --faults 180 --seed 7     a small model on each layout, with each kind of storage
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.drill.places import ObjectStore, ThisMachine, TwoNodes
from torchtitan.refusal import Refusal

_SMALL = """--job.config_file train_configs/debug_model.toml --model.dim 64 --model.n_layers 4 --model.n_heads 4
    --model.n_kv_heads 2 --model.hidden_dim 160 --training.steps 60 --training.seq_len 32 --training.local_batch_size 1
    --training.global_batch_size 2 --lr_scheduler.warmup_steps 5 --metrics.log_freq 1 --metrics.no_enable_tensorboard
    --metrics.sample_freq None --validation.seq_len 32 --validation.steps 2 --validation.freq 10 --checkpoint.interval 2
    --checkpoint.keep_latest_k 4 --comm.train_timeout_seconds 15""".split()
_PIPELINE = "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2".split()
_LAYOUTS = {
    "FSDP 2": (2, []),
    "PP 2": (2, _PIPELINE),
    "TP 2 x FSDP 2": (4, ["--parallelism.tensor_parallel_degree", "2"]),
}
_SAVES = {"sync": ["--checkpoint.async_mode", "disabled"], "async": ["--checkpoint.async_mode", "async"]}
_PLACES = {"disk": ThisMachine, "store": ObjectStore, "two nodes": TwoNodes}
RIDES = {", ".join(names): names for names in itertools.product(_LAYOUTS, _SAVES, _PLACES)}
HELP = "break a run in many ways; it must end as if nothing had happened"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=0, help="how many (default: one of each kind that fits)")
    parser.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="LAYOUT, SAVE, PLACE",
        help="the small model on a layout, with a way to save, in a place, such as 'PP 2, async, store'; may be "
        "repeated; all: each of them",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides which fault comes when (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="limit of the whole drill (default: %(default)s)")
    parser.add_argument(
        "--out", default="outputs/drill", help="folder; an earlier drill's is emptied (default: %(default)s)"
    )
    parser.epilog = "After --: options of train.py; without any, a small model is drilled."


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The verb; returns 0 if nothing was lost."""
    deadline, out = time.monotonic() + 60 * args.minutes, Path(args.out).absolute()
    if args.on and options:
        raise Refusal("--on drills the small model of this verb; give it, or options of a run of your own after --")
    if unknown := [name for name in args.on if name != "all" and name not in RIDES]:
        raise Refusal(f"--on {unknown[0]!r} is no ride; use all, or one of: {'; '.join(RIDES)}")
    from titan_fleet.drill.campaign import Campaign
    from titan_fleet.drill.faults import FAULTS
    from torchtitan.weights.targets import make_empty

    mark = make_empty(out)
    if not args.on:
        return 1 if Campaign(out, args.ranks, options or _SMALL, ThisMachine(), deadline, args).ride(args.faults) else 0
    names = list(RIDES) if "all" in args.on else args.on
    lost: list[str] = []
    for number, name in enumerate(names):
        layout, save, place = RIDES[name]
        ranks, keys = _LAYOUTS[layout]
        count = len(range(number, args.faults or len(names) * len(FAULTS), len(names)))
        where = _PLACES[place]()
        print(f"\n## {name}\n", flush=True)
        try:
            folder = mark.parent / name.replace(" ", "-").replace(",", "")
            folder.mkdir()
            small = [*_SMALL, *keys, *_SAVES[save]]
            lost += Campaign(folder, ranks, small, where, deadline, args).ride(count)
        finally:
            where.close()
    print(f"\n{len(lost)} problems on {len(names)} rides")
    return 1 if lost else 0
