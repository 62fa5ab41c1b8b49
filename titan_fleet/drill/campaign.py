"""A run in one place that is broken again and again, beside the same run undisturbed."""

import argparse
import json
import random
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from titan_fleet.drill.faults import FAULTS
from titan_fleet.drill.places import ThisMachine
from titan_fleet.drill.run import BreakableRun
from torchtitan.checkpoint.storage import Storage
from torchtitan.config.load import load_config
from torchtitan.refusal import Refusal

_STEPS_OF_A_FAULT = 8  # at most; with fewer left, the run is finished and a fresh one meets the next fault


class Campaign:
    """One configuration in one place: an undisturbed run, and one that is broken again and again."""

    def __init__(
        self,
        out: Path,
        ranks: int,
        options: Sequence[str],
        place: ThisMachine,
        deadline: float,
        args: argparse.Namespace,
    ) -> None:
        self.out, self.chance = out, random.Random(f"{args.seed} {out.name}")
        section = load_config(["--checkpoint.enable", *options], ranks)
        steps = section.training.steps
        if section.checkpoint.interval > steps // 4:  # a fault needs a checkpoint to break, and one before it
            options = [*options, "--checkpoint.interval", str(max(1, steps // 12))]
            print(f"checkpoint.interval = {options[-1]}, so that each fault has something to break")
        self.untouched = BreakableRun(out / "untouched", ranks, steps, options, deadline, place)
        self.broken = BreakableRun(out / "broken", ranks, steps, options, deadline, place)

    def ride(self, count: int) -> list[str]:
        """Returns what was lost."""
        begin, untouched, broken = time.monotonic(), self.untouched, self.broken
        names = [name for name, fault in FAULTS.items() if fault.fits(broken.place, self.out)]
        count = count or len(names)
        order = [name for _ in range(-(-count // len(names))) for name in self.chance.sample(names, len(names))]
        print(f"{count} faults for a run of {broken.steps} steps on {broken.ranks} ranks; first the run by itself")
        untouched.start()
        codes, _ = untouched.end()
        if any(codes):
            raise Refusal(f"the run fails even without a fault; repair the command first; {untouched.last_words()}")
        print("\n| fault | at step | complete before | ended with | complete after |\n| --- | --- | --- | --- | --- |")
        problems: list[str] = []
        idle = 0
        for name in order[:count]:
            if len(broken.records()) > broken.steps - _STEPS_OF_A_FAULT:
                problems += self._finish()
                self._begin_anew()
            broke, found = self._break_once(name)
            idle, problems = idle + (not broke), problems + found
        problems += self._finish()
        verdict = "; ".join(problems) or "nothing was lost: all tensors and records are the same to the bit"
        said = f"; {idle} of {count} faults had nothing to break" if idle else ""
        print(f"\n{verdict}{said} ({time.monotonic() - begin:.0f} s)", flush=True)
        return problems

    def _break_once(self, name: str) -> tuple[bool, list[str]]:
        """Start the run, break it, wait for its end and print a row; returns whether it broke and what went wrong."""
        broken, chance, fault = self.broken, self.chance, FAULTS[name]
        print(f"| {name} ", end="", flush=True)
        broken.start()
        broken.wait_for_steps(chance.randint(1, 4))
        if fault.needs_checkpoint:  # and another one to go back to: with none left a start is refused
            broken.wait_until(lambda: len(broken.complete()) > 1)
        time.sleep(chance.random() * 0.5)
        before, at = broken.complete(), (broken.records() or [0])[-1]
        outcome = fault.act(broken, chance)
        (codes, left), after = broken.end(), broken.complete()
        oldest = min(after, default=-1)  # retention removes older ones, and nothing may remove others
        lost = [step for step in before if step not in after and step > oldest and step not in outcome.damaged]
        ended = "/".join(map(str, codes)) + ("" if outcome.broke else ", nothing to break")
        print(f"| {at} | {_join(before)} | {ended} | {_join(after)} |", flush=True)
        problems = [f"the damage to step {step} went unnoticed" for step in outcome.damaged if step in after]
        problems += [f"step {step} is lost" for step in lost] + list(outcome.problems)
        problems += [f"process {process} stayed behind" for process in left]
        row = {"fault": name, "at": at, "before": before, "ended": codes, "after": after, "broke": outcome.broke}
        with (self.out / "faults.jsonl").open("a") as file:
            file.write(json.dumps(row | {"problems": problems}) + "\n")
        return outcome.broke, [f"{name} at step {at}: {problem}" for problem in problems]

    def _begin_anew(self) -> None:
        storage = self.broken.storage()
        if storage.fs.exists(storage.root):
            storage.fs.rm(storage.root, recursive=True)
        shutil.rmtree(self.broken.folder)

    def _finish(self) -> list[str]:
        """Let the run reach its end; returns how it differs there from the untouched run."""
        self.broken.start()
        codes, left = self.broken.end()
        if any(codes):
            return [f"the run did not reach its end; {self.broken.last_words()}"]
        found = [f"process {process} stayed behind" for process in left]
        for name in ("metrics.jsonl", "validation.jsonl"):
            kept = ("step", "loss", "grad_norm", "validation_loss", "validation_tokens")
            ours, theirs = ([{key: r.get(key) for key in kept} for r in of.told(name)] for of in self._both())
            found += [] if ours == theirs else [f"{name} differs"]
        return found + _differences(self.broken.storage(), self.untouched.storage(), self.broken.steps)

    def _both(self) -> tuple[BreakableRun, BreakableRun]:
        return self.broken, self.untouched


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


def _join(steps: Sequence[int]) -> str:
    return " ".join(map(str, steps)) or "none"
