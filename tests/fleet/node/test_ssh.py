"""`launch ssh` over a real sshd: two hosts, one with a key that may only run the node program, one bare.

For root the hosts are network namespaces with addresses of their own, else two ports of loopback.
"""

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from tests.fleet.node.machines import ROOT, processes_of, wait_until_nothing_runs
from tests.ports import free_port
from titan_planner.plan.cluster import read_cluster

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (Path(SSHD).exists() and shutil.which("ssh")), reason="openssh-server is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="runs are started on Linux alone"),
]
SHORT = "--training.seq_len 32 --training.local_batch_size 2 --training.global_batch_size 4"
SHORT += " --lr_scheduler.warmup_steps 1 --validation.no_enable --metrics.log_freq 1"
# A machine from which both hosts are reached by a bridge.
NETWORK = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/netns /run/sshd
ip link add br0 type bridge
ip address add 10.77.0.100/24 dev br0
ip link set br0 up
for i in 1 2; do
  ip netns add node$i
  ip link add port$i type veth peer name eth0 netns node$i
  ip link set port$i master br0 up
  ip -n node$i address add 10.77.0.$i/24 dev eth0
  ip -n node$i link set eth0 up
  ip -n node$i link set lo up
done
echo ready
exec sleep 1000
"""


def network() -> "subprocess.Popen[str] | None":
    """The process that holds the namespaces, for root where the kernel gives them."""
    if os.getuid() or not all(shutil.which(program) for program in ("unshare", "nsenter", "ip")):
        return None
    pipe = subprocess.PIPE
    command = ["unshare", "--mount", "--net", "sh", "-c", NETWORK]
    holder = subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert holder.stdout
    if holder.stdout.readline() == "ready\n":
        return holder
    holder.wait()
    return None


class Hosts:
    """Two sshd. `keyed` knows a key with a forced command, `bare` a key that may do anything."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, {}
        self.launched: list[subprocess.Popen[str]] = []
        self.holder = network()
        self.enter = (
            ["nsenter", f"--target={self.holder.pid}", "--mount", "--net", f"--wd={ROOT}"] if self.holder else []
        )
        for key in ("host", "mine"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / key], check=True)
        public = (folder / "mine.pub").read_text()
        node = f"cd {ROOT}; exec {sys.executable} -m torchtitan node --home {folder}/keyed"
        (folder / "authorized.keyed").write_text(f'command="{node}",restrict {public}')
        (folder / "authorized.bare").write_text(public)
        config = []
        for number, name in enumerate(("keyed", "bare"), 1):
            address, port = (f"10.77.0.{number}", 22) if self.holder else ("127.0.0.1", free_port())
            lines = [f"ListenAddress {address}:{port}", f"HostKey {folder}/host", f"PidFile {folder}/{name}.pid"]
            lines += [f"AuthorizedKeysFile {folder}/authorized.{name}", "StrictModes no", "UsePAM no"]
            lines += ["PasswordAuthentication no", f"SetEnv PYTHON={sys.executable} OMP_NUM_THREADS=1"]
            (folder / f"sshd.{name}").write_text("\n".join(lines) + "\n")
            config += [f"Host {name}", f"  HostName {address}", f"  Port {port}", f"  IdentityFile {folder}/mine"]
            config += [f"  User {getpass.getuser()}", "  IdentitiesOnly yes", "  StrictHostKeyChecking no"]
            config += [f"  UserKnownHostsFile {folder}/known", "  LogLevel ERROR"]
            self.serve(name)
        (folder / "ssh_config").write_text("\n".join(config) + "\n")
        (folder / "hosts.txt").write_text(f"keyed {'' if self.holder else 'address=127.0.0.1'} gpus=0\nbare gpus=0\n")
        self.ssh = f"ssh -F {folder}/ssh_config"

    def serve(self, name: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        there = ["ip", "netns", "exec", f"node{1 + (name == 'bare')}"] if self.holder else []
        command = [*self.enter, *there, SSHD, "-D", "-e", "-f", str(self.folder / f"sshd.{name}")]
        self.daemons[name] = subprocess.Popen(command, stderr=log)

    def cut(self, name: str) -> None:
        """End this host's connections, and let nobody in for a second."""
        daemon = self.daemons[name]
        below = subprocess.run(["ps", "-o", "pid=", "--ppid", str(daemon.pid)], capture_output=True, text=True).stdout
        daemon.kill()
        daemon.wait()
        for pid in map(int, below.split()):
            os.kill(pid, signal.SIGKILL)
        time.sleep(1)
        self.serve(name)

    def launch(self, *options: str) -> "subprocess.Popen[str]":
        command = [
            *self.enter,
            sys.executable,
            "-m",
            "torchtitan",
            "launch",
            "ssh",
            "--hosts",
            f"{self.folder}/hosts.txt",
        ]
        command += ["--ssh", self.ssh, "--home", str(self.folder / "bare"), "--name", options[0], "--", *SHORT.split()]
        out = subprocess.PIPE
        run = subprocess.Popen([*command, *options[1:]], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True)
        self.launched.append(run)
        return run

    def processes(self) -> dict[int, str]:
        return processes_of(self.folder / "keyed") | processes_of(self.folder / "bare")

    def wait_until_nothing_runs(self) -> None:
        wait_until_nothing_runs(self.folder / "keyed", self.folder / "bare")

    def stop(self) -> None:
        for run in self.launched:
            run.kill()
            run.wait()
        for pid in self.processes():  # of a test that failed
            os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        if self.holder:
            self.holder.kill()
            self.holder.wait()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    machines = Hosts(tmp_path_factory.mktemp("hosts"))
    for name in ("keyed", "bare"):
        end = time.monotonic() + 20
        while "Server listening" not in (machines.folder / f"{name}.log").read_text():
            if machines.daemons[name].poll() is not None or time.monotonic() > end:
                pytest.skip(f"sshd does not start here: {(machines.folder / f'{name}.log').read_text()}")
            time.sleep(0.05)
    yield machines
    machines.stop()


def test_a_run_on_two_hosts_outlives_a_broken_connection_and_ends_on_ctrl_c(hosts: Hosts) -> None:
    run = hosts.launch("long", "--training.steps", "100000", "--checkpoint.no_enable")
    assert run.stdout
    lines: list[str] = []
    while not any(re.search(r"^\[keyed\] .*step +2/", line) for line in lines):
        assert (line := run.stdout.readline()), lines
        lines.append(line)
    hosts.cut("keyed")
    while len([line for line in lines if " step " in line]) < 12:
        assert (line := run.stdout.readline()), lines
        lines.append(line)
    run.send_signal(signal.SIGINT)
    lines += run.stdout.readlines()  # `communicate` would pass over what `readline` has read ahead
    run.wait(timeout=100)
    said = "".join(lines)
    assert "[bare] has no node program for this checkout: setting it up" in said, said
    assert "[keyed] has taken the checkout" in said and "mesh dp_shard 2" in said, said
    steps = [int(found[1]) for line in lines if (found := re.search(r"step +(\d+)/", line))]
    assert steps == list(range(1, len(steps) + 1))  # none lost, none doubled
    assert run.returncode == 75 and re.search(r"^\[bare\] stopped", said, re.MULTILINE), said
    assert (hosts.folder / "keyed/runs/long/metrics.jsonl").read_text().count("\n") >= 12
    assert len([*(hosts.folder / "bare/runs/long/node/1/ranks").glob("*/attempt_0/0/stderr.log")]) == 1
    hosts.wait_until_nothing_runs()


def test_a_host_that_lets_nobody_in_is_named_before_anything_runs(hosts: Hosts) -> None:
    (hosts.folder / "authorized.bare").rename(hosts.folder / "kept")
    refused = hosts.launch("other", "--training.steps", "3").communicate(timeout=100)[0]
    (hosts.folder / "kept").rename(hosts.folder / "authorized.bare")
    assert "error: bare: " in refused and "Permission denied" in refused and "try: ssh" in refused
    hosts.wait_until_nothing_runs()


def test_the_key_with_a_forced_command_runs_nothing_else(hosts: Hosts) -> None:
    command = [*hosts.enter, *hosts.ssh.split(), "-o", "BatchMode=yes", "keyed", "touch", str(hosts.folder / "touched")]
    done = subprocess.run(
        command, input='{"id":1,"do":"port"}\n', capture_output=True, text=True, timeout=60, check=False
    )
    assert '"kind":"port"' in done.stdout and not (hosts.folder / "touched").exists()


@pytest.mark.all  # it measures for 20 s; test_several_nodes.py takes in a probe's file, test_probe_ranks.py measures
def test_a_probe_over_the_hosts_finds_the_slow_link_and_writes_a_file_that_the_planner_reads(
    hosts: Hosts, tmp_path: Path
) -> None:
    if not hosts.holder:
        pytest.skip("needs network namespaces")
    out = tmp_path / "here.toml"
    (tmp_path / "hosts.txt").write_text("keyed gpus=0\nbare gpus=0\n")
    slow = "tc qdisc add dev port2 root tbf rate 300mbit burst 256kb latency 400ms"  # what goes to `bare`
    subprocess.run([*hosts.enter, *slow.split()], check=True)
    words = [
        "probe",
        "hosts",
        "--hosts",
        str(tmp_path / "hosts.txt"),
        "--out",
        str(out),
        "--home",
        str(hosts.folder / "bare"),
    ]
    command = [*hosts.enter, sys.executable, "-m", "torchtitan", *words, "--ssh", hosts.ssh]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    subprocess.run([*hosts.enter, *"tc qdisc del dev port2 root".split()], check=True)
    assert done.returncode == 0 and f"{out}: links of 2 nodes" in done.stdout, done.stdout + done.stderr
    found = tomli.loads(out.read_text())["probe"]
    assert found["hosts"] == ["keyed", "bare"]
    print(found["gbit"], found["delay_ms"])
    assert 0.15 < found["gbit"][0][1] < 0.33 and found["gbit"][1][0] > 2 * found["gbit"][0][1]
    assert read_cluster(out).num_devices == 2
    assert not list(hosts.folder.glob("*/runs/probe-*"))
