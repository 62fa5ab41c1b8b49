"""A Slurm of two nodes inside one machine's namespaces. Each node has its own network, address and host name.

As on a fresh Debian, the host name means 127.0.1.1 to the node itself. Run this only inside the namespaces of run.sh.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[3]
LOGIN = ("login", "10.99.0.1")  # where slurmctld runs and jobs are submitted
NODES = (("node1", "10.99.0.11"), ("node2", "10.99.0.12"))
# Waits are shorter than on a real cluster. Slurm holds a requeued job for cred_expire seconds, by default 120.
CONFIGURATION = """
ClusterName=trial
SlurmctldHost={login[0]}({login[1]})
SlurmUser=root
AuthInfo=cred_expire={hold_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
Answer = TypeVar("Answer")


def wait_for(what: str, seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Ask until the answer is not empty, and return it."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > end:
            raise AssertionError(f"no {what} after {seconds:.0f} s")
        time.sleep(0.1)
    return answer


def run(*command: object, **options: Any) -> str:
    """The output of a program. If it fails, the error holds its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, **options)
    if done.returncode:
        raise AssertionError(f"{' '.join(words)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


class Cluster:
    """The constructor starts the daemons; they stop when the process namespace ends."""

    def __init__(self, folder: Path, hold_seconds: int) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")  # files that jobs leave behind are removed with the folder
        run("mount", "-t", "tmpfs", "run", "/run")  # for munge's socket and the names of network namespaces
        self._connect()
        self._start_munge()
        (folder / "state").mkdir()
        nodes = "\n".join(f"NodeName={name} NodeAddr={address} CPUs=2 State=UNKNOWN" for name, address in NODES)
        text = CONFIGURATION.format(login=LOGIN, nodes=nodes, folder=folder, hold_seconds=hold_seconds)
        (folder / "slurm.conf").write_text(text)
        # slurmd looks for cgroups although none are used; with version 1 it accepts that they are not mounted.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        self._start("slurmctld", "slurmctld", "-D")
        for name, _ in NODES:
            (folder / name).mkdir(exist_ok=True)
            hosts = self._write_hosts(name, "127.0.1.1")
            alone = f'hostname {name}; mount --bind {hosts} /etc/hosts; exec "$@"'
            inside = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "bash", "-c", alone, "bash"]
            self._start(name, *inside, "slurmd", "-D", "-N", name)
        wait_for("two idle nodes", 30, lambda: self._states() == ["idle", "idle"])

    def _connect(self) -> None:
        hosts = self._write_hosts(LOGIN[0], LOGIN[1])
        run("mount", "--bind", hosts, "/etc/hosts")
        run("hostname", LOGIN[0])
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "addr", "add", f"{LOGIN[1]}/24", "dev", "bridge")
        run("ip", "link", "set", "bridge", "up")
        for name, address in NODES:
            run("ip", "netns", "add", name)
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", name, "master", "bridge", "up")
            for words in ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"):
                run("ip", "-n", name, *words.split())

    def _write_hosts(self, own_name: str, own_address: str) -> Path:
        names = {"localhost": "127.0.0.1", **dict((LOGIN, *NODES)), own_name: own_address}
        file = self.folder / f"{own_name}.hosts"
        file.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        return file

    def _start_munge(self) -> None:
        Path("/run/munge").mkdir(mode=0o755)
        key, seed = self.folder / "munge.key", self.folder / "munge.seed"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--seed-file={seed}")
        wait_for("answer of munged", 10, lambda: subprocess.run(["munge", "-n"], capture_output=True).returncode == 0)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.console", "w") as console:
            subprocess.Popen(command, stdout=console, stderr=console, stdin=subprocess.DEVNULL)

    def _states(self) -> list[str]:
        done = subprocess.run(["sinfo", "-hN", "-p", "low", "-o", "%T"], capture_output=True, text=True)
        return done.stdout.split()


class Job:
    """A submitted job."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log_file = log
        words = ["sbatch", "--parsable", f"--output={log}", *command]
        self.submitted = time.monotonic()
        self.id = run(*words, cwd=ROOT, env=os.environ | environment)

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def about(self, key: str) -> str:
        """One field of `scontrol show job`."""
        found = re.search(rf"\b{key}=(\S+)", run("scontrol", "show", "job", "-o", self.id))
        return found[1] if found else ""

    def wait_for(self, state: str, seconds: float) -> None:
        wait_for(f"{state} of job {self.id}", seconds, lambda: self.about("JobState") == state)

    def wait_for_line(self, text: str, seconds: float) -> None:
        wait_for(f"{text!r} in {self.log_file}", seconds, lambda: text in self.log)
