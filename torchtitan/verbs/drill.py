"""Breaks a run in many ways, starts it again each time, and compares its end with that of an undisturbed run.

python -m torchtitan drill -- --job.config_file train_configs/debug_model.toml --checkpoint.interval 5
"""

import argparse
import random
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchtitan.checkpoint.storage import Storage
from torchtitan.config.load import load_config
from torchtitan.refusal import Refusal
from torchtitan.verbs.drill_faults import FAULTS, FILLS_THE_DISK, Run
from torchtitan.weights.targets import make_empty

_SMALL_DISK_BYTES = 4 << 30  # a disk of this size may be filled without harm to others
_MOST_STEPS_OF_A_FAULT = 8


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The verb; returns 0 if nothing was lost."""
    steps = load_config(["--checkpoint.enable", *options], args.ranks).training.steps
    out, chance, begin = Path(args.out).absolute(), random.Random(args.seed), time.monotonic()
    make_empty(out)
    deadline = begin + 60 * args.minutes
    untouched = Run(out / "untouched", args.ranks, options, deadline)
    untouched.start()
    if untouched.end()[0]:
        raise Refusal(f"the run fails even without a fault; see {untouched.log.name}, and repair the command first")
    broken = Run(out / "broken", args.ranks, options, deadline)
    print(f"{args.faults} faults for a run of {steps} steps on {args.ranks} ranks\n")
    print("| fault | at step | complete before | ended with | complete after |\n| --- | --- | --- | --- | --- |")
    names = [name for name in FAULTS if name != FILLS_THE_DISK or shutil.disk_usage(out).total <= _SMALL_DISK_BYTES]
    order = [name for _ in range(-(-args.faults // len(names))) for name in chance.sample(names, len(names))]
    problems: list[str] = []
    for name in order[: args.faults]:
        if len(broken.records()) > steps - _MOST_STEPS_OF_A_FAULT:
            problems += _finish(broken, untouched, steps)
            shutil.rmtree(broken.folder)  # the next fault meets a fresh run
        problems += _break_once(broken, name, chance)
    problems += _finish(broken, untouched, steps)
    seconds = time.monotonic() - begin
    print(f"\n{'; '.join(problems) or 'nothing was lost: all tensors are the same to the bit'} ({seconds:.0f} s)")
    return 1 if problems else 0


def _break_once(broken: Run, name: str, chance: random.Random) -> list[str]:
    """Start the run, break it, wait until it ends and print a row of the table; returns what went wrong."""
    broken.start()
    broken.wait_for_steps(chance.randint(1, 4))
    time.sleep(chance.random() * 0.5)
    before, at = broken.complete(), (broken.records() or [0])[-1]
    damaged = FAULTS[name](broken, chance)
    (code, left), after = broken.end(), broken.complete()
    oldest = min(after, default=-1)  # retention removes older ones, and nothing may remove others
    lost = [step for step in before if step not in after and step > oldest and step != damaged]
    print(f"| {name} | {at} | {before} | {code} | {after} |", flush=True)
    problems = [f"{name}: the damage to step {damaged} went unnoticed"] if damaged in after else []
    problems += [f"{name} at step {at} lost step {step}" for step in lost]
    return problems + [f"{name} at step {at} left process {process} behind" for process in left]


def _finish(broken: Run, untouched: Run, steps: int) -> list[str]:
    """Let the run reach its end; returns how it differs there from the untouched run."""
    broken.start()
    code, left = broken.end()
    if code:
        return [f"the run did not reach its end; see {broken.log.name}"]
    problems = [f"process {process} was left behind" for process in left]
    return problems + _differences(broken.storage(), untouched.storage(), steps)


def _differences(ours: Storage, theirs: Storage, step: int) -> list[str]:
    """The tensors that are not the same to the bit."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads here
    read: list[dict[str, torch.Tensor]] = []
    for storage in (ours, theirs):
        about: Any = storage.reader(step).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in about.items()}
        dcp.load(tensors, storage_reader=storage.reader(step), no_dist=True)
        read.append(tensors)
    names = read[0].keys() | read[1].keys()
    return [
        f"{n} differs"
        for n in sorted(names)
        if n not in read[0] or n not in read[1] or not read[0][n].equal(read[1][n])
    ]
