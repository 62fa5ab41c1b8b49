"""Where the drill's runs run and where their checkpoints go: this machine, an object store's stand-in, two nodes."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_planner.netem.namespaces import entered, unshared
from torchtitan.launch.node import Node, environment_here, torchrun_here
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

Launcher = tuple[Sequence[str], Sequence[str], Mapping[str, str]]  # words before Python, torchrun, environment


class ThisMachine:
    """This machine and a folder on its disk."""

    def launchers(self, ranks: int) -> list[Launcher]:
        """What starts a node's ranks, for each node."""
        return [([], torchrun_here(ranks), environment_here(ranks))]

    def checkpoints(self, folder: Path) -> str:
        """checkpoint.folder of the run in this folder."""
        return "checkpoint"

    def is_on_disk(self) -> bool:
        return True

    def close(self) -> None: ...


_MOTO = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class ObjectStore(ThisMachine):
    """moto, a server that speaks S3, in a process of its own."""

    def __init__(self) -> None:
        if not all(importlib.util.find_spec(name) for name in ("moto", "flask", "s3fs")):
            raise Refusal("an object store's stand-in needs packages: pip install 'moto[s3]' flask flask-cors s3fs")
        self.server = subprocess.Popen([sys.executable, "-c", _MOTO], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.server.stdout
        if not (port := self.server.stdout.readline().strip().decode()):
            raise Refusal("moto, the object store's stand-in, does not start; `python -m moto.server` shows why")
        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_MAX_ATTEMPTS": "1"}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # a client of an earlier stand-in would still ask that one
        s3fs.S3FileSystem(skip_instance_cache=True).mkdirs("drill", exist_ok=True)

    def checkpoints(self, folder: Path) -> str:
        return f"s3://drill/{folder.parent.name}/{folder.name}"

    def is_on_disk(self) -> bool:
        return False

    def away(self, is_away: bool) -> None:
        """While it is away, it takes connections and answers nothing."""
        self.server.send_signal(signal.SIGSTOP if is_away else signal.SIGCONT)

    def close(self) -> None:
        self.server.kill()
        self.server.wait()


_TWO_NODES = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/netns
for i in 0 1; do ip netns add node$i; ip -n node$i link set lo up; done
ip link add eth0 netns node0 type veth peer name eth0 netns node1
for i in 0 1; do ip -n node$i address add 10.9.0.1$i/24 dev eth0; ip -n node$i link set eth0 up; done
echo ready
exec sleep infinity
"""


class TwoNodes(ThisMachine):
    """Two network namespaces of this machine, joined by a cable that can be pulled."""

    def __init__(self) -> None:
        command = [*unshared(), "sh", "-c", _TWO_NODES]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.holder.stdout is not None
        if (said := self.holder.stdout.readline()) != "ready\n":
            raise Refusal(f"this kernel gives a user no network namespaces ({said.strip()}); leave the two nodes out")

    def _enter(self, *command: str) -> list[str]:
        return [*entered(self.holder.pid), f"--wd={ROOT}", *command]

    def launchers(self, ranks: int) -> list[Launcher]:
        nodes = [Node(2, i, ranks // 2, "10.9.0.10:29500", "drill", 0, 60, ()) for i in (0, 1)]
        env = environment_here(ranks) | {"GLOO_SOCKET_IFNAME": "eth0"}
        return [(self._enter("ip", "netns", "exec", f"node{i}"), n.torchrun("0"), env) for i, n in enumerate(nodes)]

    def pull(self, is_out: bool) -> None:
        state = "down" if is_out else "up"
        subprocess.run(self._enter("ip", "-n", "node1", "link", "set", "eth0", state), check=True)

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()
