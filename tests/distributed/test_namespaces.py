"""Machines that are network namespaces: addresses, host names and firewalls of their own, joined by two bridges.

They train as one process does, a preflight tells what is wrong with them, and no failure waits without an end.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.differences import differences
from tests.tiny_runs import read_records, train_here
from torchtitan.config.load import load_config

ROOT = Path(__file__).parents[2]
NUM_NODES = 4
DROPPED = {"the head's port": 29999, "all but the head's port": (30000, 65535)}  # by node 0's firewall

# Node i is 10.0.0.10+i (eth0) and 10.1.0.10+i (eth1). Node 0 drops what comes to port 29999 by eth0, and to ports from
# 30000 by eth1: rules of routing do it, so that no firewall's program is needed.
SET_UP = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/netns
for bridge in br0 br1; do ip link add $bridge type bridge; ip link set $bridge up; done
for i in 0 1 2 3; do
  ip netns add node$i
  for net in 0 1; do
    ip link add port$net.$i type veth peer name eth$net netns node$i
    ip link set port$net.$i master br$net up
    ip -n node$i address add 10.$net.0.1$i/24 dev eth$net
    ip -n node$i link set eth$net up
  done
  ip -n node$i link set lo up
  for name in 10.0.0.1$i 10.1.0.1$i 127.0.1.1; do
    printf '127.0.0.1 localhost\\n%s node%s\\n' $name $i > /run/hosts.$i.$name
  done
done
ip -n node0 rule add pref 100 lookup local
ip -n node0 rule delete pref 0
ip -n node0 rule add pref 10 iif eth0 ipproto tcp dport 29999 blackhole
ip -n node0 rule add pref 11 iif eth1 ipproto tcp dport 30000-65535 blackhole
echo ready
exec sleep 1000
"""
AS_NODE = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; eval "$BEFORE"; exec "$@"'


class Nodes:
    def __init__(self) -> None:
        command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", SET_UP]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started: list[subprocess.Popen[str]] = []
        assert self.holder.stdout and self.holder.stderr
        if self.holder.stdout.readline() != "ready\n":
            pytest.skip(f"no network namespaces here: {self.holder.stderr.read().strip()}")

    def start(
        self, node: int, command: list[str], name_means: str = "10.0.0.1{}", cwd: Path = ROOT, before: str = "", **env: str
    ) -> "subprocess.Popen[str]":
        """On a node, whose host name means an address; `before` is what its shell does first."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount", "--net", "--preserve-credentials"]
        there = ["ip", "netns", "exec", f"node{node}", "unshare", "--mount", "--uts", "sh", "-c", AS_NODE]
        own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NODE_RANK": str(node), "BEFORE": before}
        inherited = {k: v for k, v in os.environ.items() if k not in ("CONFIG_FILE", "RANK", "WORLD_SIZE", "NGPU")}
        process = subprocess.Popen(
            [*enter, *there, f"/run/hosts.{node}.{name_means.format(node)}", f"node{node}", *command],
            cwd=cwd,
            env=inherited | own | {"MASTER_ADDR": "10.0.0.10", "NGPU": "1", "RDZV_TIMEOUT": "20"} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def stop(self) -> None:
        for process in [*self.started, self.holder]:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if not all(shutil.which(program) for program in ("unshare", "nsenter", "ip")):
        pytest.skip("unshare, nsenter or ip is not here")
    machines = Nodes()
    yield machines
    machines.stop()


def outputs_of(processes: list["subprocess.Popen[str]"], seconds: float = 100) -> list[str]:
    end = time.monotonic() + seconds
    return [process.communicate(timeout=max(1, end - time.monotonic()))[0] for process in processes]


TINY_RUN = textwrap.dedent("""
    --training.seq_len 32 --training.local_batch_size 2 --training.global_batch_size 4 --training.steps 2
    --training.mixed_precision_param float32 --lr_scheduler.warmup_steps 1 --metrics.log_freq 1 --debug.seed 0
    --validation.no_enable --job.config_file
""")
