"""Five nodes behind real routers, and a serving machine, as network namespaces of this machine.

zurich has no router; lima's keeps its ports; oslo's changes them for each destination; kyoto stands behind two;
quito's lets no UDP out. Their outside addresses are 198.51.100.21 to .25. oslo's router forgets a way after 8 s.
"""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import started
from titan_planner.netem.namespaces import entered, unshared

ROOT = Path(__file__).parents[3]
CONFIG, PYTHON = str(ROOT / "train_configs/debug_model.toml"), [sys.executable]
NAMES = "zurich", "lima", "oslo", "kyoto", "quito"
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SERVER, SECOND = "198.51.100.10", "198.51.100.11"
ADDRESS = {name: f"10.88.0.{number}" for number, name in enumerate(NAMES, 1)}
OUTSIDE = {name: f"198.51.100.{21 + number}" for number, name in enumerate(NAMES)}

SET_UP = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
add() { ip netns add reach-$1; ip -n reach-$1 link set lo up; mkdir -p /run/of/$1; }
plug() {  # namespace, its device, its address, the switch
  ip link add $1.$2 type veth peer name $2 netns reach-$1
  ip link set $1.$2 master $4 up
  ip -n reach-$1 address add $3 dev $2
  ip -n reach-$1 link set $2 up
}
router() {  # name, outside address, inside address, outside switch, words of masquerade
  add $1; ip link add in-$1 type bridge; ip link set in-$1 up
  plug $1 out $2 $4; plug $1 in $3 in-$1
  ip netns exec reach-$1 sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
  echo "table ip nat { chain post { type nat hook postrouting priority 100; oifname out masquerade $5; }; }
    table ip door { chain way { type filter hook forward priority 0; policy drop;
      iifname in $6 accept; ct state established,related accept; };
      chain own { type filter hook input priority 0; policy drop; iifname in accept;
      ct state established,related accept; }; }" > /run/$1.nft
  ip netns exec reach-$1 nft -f /run/$1.nft
}
ip link add sky type bridge; ip link set sky up
add meet; plug meet eth0 198.51.100.10/24 sky; ip -n reach-meet address add 198.51.100.11/24 dev eth0
add zurich; plug zurich eth0 198.51.100.21/24 sky
router home 198.51.100.22/24 192.168.1.1/24 sky ""
router plant 198.51.100.23/24 192.168.1.1/24 sky "random,fully-random"
ip netns exec reach-plant sh -c 'echo 8 > /proc/sys/net/netfilter/nf_conntrack_udp_timeout'
router provider 198.51.100.24/24 100.64.0.1/24 sky ""
router flat 100.64.0.2/24 192.168.1.1/24 in-provider ""
ip -n reach-flat route add default via 100.64.0.1
router school 198.51.100.25/24 192.168.1.1/24 sky "" "meta l4proto != udp"
for pair in lima=home oslo=plant kyoto=flat quito=school; do
  add ${pair%=*}; plug ${pair%=*} eth0 192.168.1.2/24 in-${pair#*=}
  ip -n reach-${pair%=*} route add default via 192.168.1.1
done
for node in meet zurich lima oslo kyoto quito; do  # as on most machines, a host's name means its own network
  own=$(ip -n reach-$node -4 -br address show dev eth0 | awk '{print $3}')
  printf '127.0.0.1 localhost\n%s %s\n' ${own%/*} $node > /run/hosts.$node
done
echo ready
exec sleep 1000
"""
# lima and oslo get addresses of IPv6; their routers translate none, and let in what was written to.
IPV6 = """
set -e
house() {  # node, its router, its number, the other's number and router
  ip -n reach-$2 address add 2001:db8::$3/64 dev out nodad
  ip -n reach-$2 address add 2001:db8:$3::1/64 dev in nodad
  ip netns exec reach-$2 sh -c 'echo 1 > /proc/sys/net/ipv6/conf/all/forwarding'
  ip -n reach-$2 route add 2001:db8:$4::/64 via 2001:db8::$4
  echo "table ip6 door { chain way { type filter hook forward priority 0; policy drop;
    iifname in accept; ct state established,related accept; }; }" > /run/$2.nft6
  ip netns exec reach-$2 nft -f /run/$2.nft6
  ip -n reach-$1 address add 2001:db8:$3::2/64 dev eth0 nodad
  ip -n reach-$1 route add default via 2001:db8:$3::1
}
house lima home 22 23
house oslo plant 23 22
"""
AS_NODE = """mkdir -p /run/wireguard
mount --bind /run/of/"$0" /run/wireguard; mount --bind /run/hosts."$0" /etc/hosts; hostname "$0"
cd "$1"; shift; exec "$@" """


class World:
    def __init__(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can make routers and WireGuard's interfaces")
        if missing := [name for name in ("ip", "nft", "wg", "nsenter", "unshare", "ping") if not shutil.which(name)]:
            pytest.skip(f"{', '.join(missing)} is not here; apt install iproute2 nftables wireguard-tools iputils-ping")
        self.holder = subprocess.Popen(
            [*unshared(), "sh", "-c", SET_UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started: list[subprocess.Popen[Any]] = []
        assert self.holder.stdout and self.holder.stderr
        if self.holder.stdout.readline() != "ready\n":
            self.holder.kill()
            pytest.skip(f"this kernel makes no routers: {self.holder.stderr.read().strip()}")

    def words(self, node: str, command: list[str]) -> list[str]:
        there = [
            "ip",
            "netns",
            "exec",
            f"reach-{node}",
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            AS_NODE,
            node,
            str(ROOT),
        ]
        return [*entered(self.holder.pid), *there, *command]

    def run(self, node: str, *command: str, check: bool = True, timeout: float = 60) -> str:
        done = subprocess.run(self.words(node, list(command)), capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def add_ipv6(self) -> None:
        subprocess.run([*entered(self.holder.pid), "sh", "-c", IPV6], check=True)

    def start(self, node: str, command: list[str], log: Path, **env: str) -> "subprocess.Popen[str]":
        with log.open("a") as file:
            process = subprocess.Popen(
                self.words(node, command),
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def serve(self, keys: Path, log: Path, *more: str) -> "subprocess.Popen[str]":
        words = [*PYTHON, "-m", "torchtitan", "reach", "serve", "--keys", str(keys), "--second_address", SECOND, *more]
        return self.start("meet", words, log)

    def join(self, node: str, keys: Path, log: Path, *more: str) -> "subprocess.Popen[str]":
        words = [
            *PYTHON,
            "-m",
            "torchtitan",
            "reach",
            "join",
            SERVER,
            "--keys",
            str(keys / node),
            "--out",
            str(log.with_suffix("")),
        ]
        words += more
        return self.start(node, words, log)

    @contextlib.contextmanager
    def open_to_ssh(self, folder: Path) -> Iterator[str]:
        """Inside, an sshd at each node's address in the network; the ssh command whose key may run the node program."""
        for key in ("host", "mine"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / key], check=True)
        self.run("meet", "mkdir", "-p", "/run/sshd")
        daemons = []
        for name in NAMES:
            program = f"cd {ROOT}; exec {sys.executable} -m torchtitan node --home {folder}/{name}"
            (folder / f"{name}.keys").write_text(f'command="{program}",restrict {(folder / "mine.pub").read_text()}')
            words = {"ListenAddress": ADDRESS[name], "HostKey": folder / "host", "PidFile": "none", "UsePAM": "no"}
            words |= {"AuthorizedKeysFile": folder / f"{name}.keys", "StrictModes": "no", "SetEnv": "OMP_NUM_THREADS=1"}
            options = [f"-o{key}={value}" for key, value in words.items()]
            daemons.append(self.start(name, [SSHD, "-De", "-f", "/dev/null", *options], folder / f"{name}.sshd"))
        yield f"ssh -i {folder}/mine -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known"
        for daemon in daemons:
            daemon.kill()
            daemon.wait()

    def train(self, nodes: list[str], log: Path, port: int, options: list[str]) -> "list[subprocess.Popen[Any]]":
        """One rank a node, with the interface that the launcher chooses there."""
        alike = {"WORLD_SIZE": str(len(nodes)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        alike |= {"MASTER_ADDR": ADDRESS[nodes[0]], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "reach0"}
        ranks = []
        for rank, node in enumerate(nodes):
            with log.with_suffix(f".{node}").open("w") as file:
                process = started.Popen(
                    [sys.executable, "train.py", "--job.config_file", CONFIG, *options],
                    env=os.environ | alike | {"RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    preexec_fn=functools.partial(enter, f"/proc/{self.holder.pid}/root/run/netns/reach-{node}"),
                )
            ranks.append(process)
        self.started += ranks
        return ranks

    def processes(self, node: str) -> list[int]:
        listed = subprocess.run(
            [*entered(self.holder.pid), "ip", "netns", "pids", f"reach-{node}"], capture_output=True, text=True
        ).stdout
        return [int(word) for word in re.findall(r"\d+", listed)]

    def left(self) -> list[str]:
        """The command lines of all that still runs, with the node before each."""
        pids = [(node, pid) for node in ("meet", *NAMES) for pid in self.processes(node)]
        return [f"{node}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:300]!r}" for node, pid in pids]

    def end_reach(self, node: str, number: int) -> None:
        for pid in self.processes(node):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if b"torchtitan\0reach" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)

    def lose_power(self, node: str, rank: int) -> None:
        """Kills the network's processes before the rank, which would else end its connections in good order."""
        while others := [pid for pid in self.processes(node) if pid != rank]:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)
        os.kill(rank, signal.SIGKILL)

    def stop(self) -> None:
        for node in ("meet", *NAMES):
            for pid in self.processes(node):
                subprocess.run(["kill", "-9", str(pid)], capture_output=True)
        for process in [*self.started, self.holder]:
            process.kill()
            process.wait()


def enter(namespace: str) -> None:
    """In a process that was forked: from now on its sockets are in this network."""
    with open(namespace) as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
