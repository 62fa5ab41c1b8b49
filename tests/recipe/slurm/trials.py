"""Tests of multinode_trainer.slurm on the Slurm of cluster.py; run.sh starts them inside its namespaces."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.recipe.slurm.cluster import NODES, Cluster, Job, run, wait_for

STEPS = 40
OPTIONS = f"""--training.steps {STEPS} --training.seq_len 32 --training.local_batch_size 1
--training.global_batch_size 4 --metrics.log_freq 1 --metrics.no_enable_tensorboard --validation.no_enable""".split()


class Trials:
    """Each trial is a method. It raises AssertionError if something is wrong, and returns measured seconds."""

    def __init__(self, folder: Path, hold_seconds: int) -> None:
        self.folder, self.hold_seconds = folder, hold_seconds
        self.reference: list[dict[str, Any]] = []

    def trains(self) -> dict[str, float]:
        """two nodes with two ranks each train to the end"""
        job = self._submit("trains")
        measured = {"submit to first step": self._until_step(job, "trains", 1)}
        assert hosts_of_ranks() == {0: "node1", 1: "node1", 2: "node2", 3: "node2"}, hosts_of_ranks()
        job.wait_for("COMPLETED", 120)
        port = 20000 + int(job.id) % 10000
        for rank in (0, 1):
            understood = f"NNODES=2, NODE_RANK={rank}, head {NODES[0][1]}:{port}, NGPU=2 (NVIDIA GPUs here: "
            assert job.log.count(understood) == 1, job.log
        assert "[rank0]:" in job.log and f"trained {STEPS} steps" in job.log, job.log
        self.reference = self._records("trains")
        assert [record["step"] for record in self.reference] == list(range(1, STEPS + 1))
        return measured

    def told(self) -> dict[str, float]:
        """USR1: the job saves, is requeued and resumes, with the losses of an uninterrupted run"""
        job = self._submit("told")
        self._until_step(job, "told", STEPS // 4)
        told = time.monotonic()
        run("scancel", "--signal=USR1", job.id)
        measured = self._saves(job, "told", told) | self._goes_on(job, "told", told)
        job.wait_for("COMPLETED", 120)
        self._equals_reference("told")
        return measured

    def preempted(self) -> dict[str, float]:
        """preempted by a job of a higher partition: the job saves, makes room, and resumes when the other is done"""
        job = self._submit("preempted")
        self._until_step(job, "preempted", STEPS // 4)
        told = time.monotonic()
        other = Job(["--partition=high", "--nodes=2", "--exclusive", "--wrap", "sleep 5"], self.folder / "other.log")
        measured = self._saves(job, "preempted", told)
        other.wait_for("COMPLETED", 90)
        assert job.about("JobState") == "PENDING", "the job should wait for the other"
        measured |= self._goes_on(job, "preempted", told)
        job.wait_for("COMPLETED", 120)
        self._equals_reference("preempted")
        return measured

    def out_of_time(self) -> dict[str, float]:
        """near its time limit: the job saves, is requeued and resumes; then plain scancel ends it for good"""
        # Slurm checks every 30 s, so the signal comes 40 to 70 s after the start.
        job = self._submit("out_of_time", "--time=2", "--signal=USR1@50", steps=100_000)
        self._until_step(job, "out_of_time", 1)
        begin = time.monotonic()
        self._saves(job, "out_of_time", begin)
        self._goes_on(job, "out_of_time", begin)
        run("scancel", job.id)
        job.wait_for("CANCELLED", 90)
        self._stays_gone(job, restarts=1)
        return {}

    def fails(self) -> dict[str, float]:
        """a broken document stops the run, and the job is not requeued"""
        data = self.folder / "broken.jsonl"
        data.write_text("".join(json.dumps({"text": "words " * 20} if n % 50 else {}) + "\n" for n in range(2000)))
        job = self._submit("fails", options=["--training.dataset", "broken", "--training.dataset_path", str(data)])
        job.wait_for("FAILED", 120)
        assert re.search(r"ValueError: \S+broken.jsonl:\d+: no key 'text'", job.log), job.log
        assert self._records("fails"), "the job should fail after its first steps, but took none"
        self._stays_gone(job, restarts=0)
        return {}

    def _submit(self, name: str, *lines: str, steps: int = STEPS, options: list[str] | None = None) -> Job:
        words = ["--gpus-per-node=0", *lines, "multinode_trainer.slurm", *OPTIONS, *(options or [])]
        words += ["--job.dump_folder", str(self.folder / name), "--training.steps", str(steps)]
        return Job(words, self.folder / f"{name}.log", NGPU="2")

    def _records(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _until_step(self, job: Job, name: str, step: int) -> float:
        def taken() -> bool:
            assert job.about("JobState") in ("PENDING", "CONFIGURING", "RUNNING"), job.log
            return any(record["step"] >= step for record in self._records(name))

        wait_for(f"step {step} of {name}", 120, taken)
        return time.monotonic() - job.submitted

    def _saves(self, job: Job, name: str, told: float) -> dict[str, float]:
        """The checkpoint is saved first, then the job is requeued."""
        job.wait_for_line("saved step ", 60)
        measured = {"signal to saved": time.monotonic() - told}
        job.wait_for_line("asked to end: queued again", 90)
        assert re.findall(r"saved step (\d+): |asked to end: (queued) again", job.log) == [
            (str(self._records(name)[-1]["step"]), ""),
            ("", "queued"),
        ], job.log
        measured["signal to requeued"] = time.monotonic() - told
        return measured

    def _goes_on(self, job: Job, name: str, told: float) -> dict[str, float]:
        """The first step after the restart follows the last step before it."""
        step = self._records(name)[-1]["step"]
        job.wait_for_line(f"resuming from step {step} in ", 180 + self.hold_seconds)
        wait_for(f"step {step + 1}", 90, lambda: self._records(name)[-1]["step"] > step)
        assert job.about("Restarts") == "1"
        return {"signal to first step after the restart": time.monotonic() - told}

    def _equals_reference(self, name: str) -> None:
        exact = [
            [{key: record[key] for key in ("step", "loss", "grad_norm", "tokens_seen")} for record in records]
            for records in (self.reference, self._records(name))
        ]
        assert exact[0] == exact[1], f"{name} differs from the uninterrupted run: {exact}"

    def _stays_gone(self, job: Job, restarts: int) -> None:
        state = job.about("JobState")
        time.sleep(3)  # after a requeue the job would be PENDING at once
        assert (job.about("JobState"), job.about("Restarts")) == (state, str(restarts))


def hosts_of_ranks() -> dict[int, str]:
    """The node of each rank, read from the environment of its process."""
    hosts = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(
                part.split("=", 1) for part in (process / "environ").read_text().split("\0") if "=" in part
            )
        except OSError:  # the process has just ended
            continue
        if "RANK" in environment:
            hosts[int(environment["RANK"])] = environment["SLURMD_NODENAME"]
    return hosts


TRIALS = {t.__name__: t for t in (Trials.trains, Trials.told, Trials.preempted, Trials.out_of_time, Trials.fails)}


def main(folder: Path, hold_seconds: int, timeout_seconds: int, names: list[str]) -> int:
    if unknown := set(names) - set(TRIALS):
        print(f"{', '.join(sorted(unknown))}: no such trial; use {', '.join(TRIALS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done after {timeout_seconds} s; set TIMEOUT to allow more"))
    signal.alarm(timeout_seconds)
    Cluster(folder, hold_seconds)
    print(f"{run('sinfo', '--version')}, which holds a requeued job for {hold_seconds} s", flush=True)
    trials, failed = Trials(folder, hold_seconds), 0
    for name, trial in TRIALS.items():
        if names and name not in ("trains", *names):  # the other trials compare themselves with this one
            continue
        begin, held, measured = time.monotonic(), "held", {}
        try:
            measured = trial(trials)
        except AssertionError as error:
            held, failed = f"DID NOT HOLD: {error}", failed + 1
        print(f"{name}: {trial.__doc__}: {held}; {time.monotonic() - begin:.0f} s in all", flush=True)
        for what, seconds in measured.items():
            print(f"    {what:40} {seconds:6.1f} s", flush=True)
        if not trials.reference:
            break
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
