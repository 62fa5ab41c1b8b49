"""Four machines as network namespaces, each with its own addresses, host name and firewall, joined by two bridges.

The machines train as one process does, a preflight names what is wrong with them, and no failure waits forever.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import started
from tests.recipe.distributed.test_layouts import differences
from tests.tiny_runs import read_records, train_here
from torchtitan.config.load import load_config
from torchtitan.root import PACKAGES

ROOT = Path(__file__).parents[3]

# Node i is 10.0.0.10+i (eth0) and 10.1.0.10+i (eth1). Node 0 drops packets to port 29999 on eth0, and rejects
# those to ports from 30000 on eth1. Routing rules do this, so the test needs no firewall program.
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
ip netns exec node0 sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'  # else node0 drops packets that it should reject
ip -n node0 rule add pref 10 iif eth0 ipproto tcp dport 29999 blackhole
ip -n node0 rule add pref 11 iif eth1 ipproto tcp dport 30000-65000 unreachable
echo ready
exec sleep 1000
"""
AS_NODE = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; cd "$PLACE"; eval "$BEFORE"; exec "$@"'


class Nodes:
    def __init__(self) -> None:
        command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", SET_UP]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started: list[subprocess.Popen[str]] = []
        assert self.holder.stdout and self.holder.stderr
        if self.holder.stdout.readline() != "ready\n":
            error = self.holder.stderr.read().strip()
            assert re.search("not permitted|not supported|denied|No space left", error), error
            pytest.skip(f"this kernel gives a user no network namespaces: {error}")

    def start(
        self,
        node: int,
        command: list[str],
        name_means: str = "10.0.0.1{}",
        cwd: Path = ROOT,
        before: str = "",
        **env: str,
    ) -> "subprocess.Popen[str]":
        """Run a command on a node whose host name means the address `name_means`; its shell runs `before` first."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount", "--net", "--preserve-credentials"]
        there = ["ip", "netns", "exec", f"node{node}", "unshare", "--mount", "--uts", "sh", "-c", AS_NODE]
        own = {
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "NODE_RANK": str(node),
            "BEFORE": before,
            "PLACE": str(cwd),
        }
        inherited = {k: v for k, v in os.environ.items() if k not in ("CONFIG_FILE", "RANK", "WORLD_SIZE", "NGPU")}
        process = subprocess.Popen(
            [*enter, *there, f"/run/hosts.{node}.{name_means.format(node)}", f"node{node}", *command],
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


CONFIG = str(ROOT / "train_configs/debug_model.toml")
TINY_RUN = """
    --training.seq_len 32 --training.local_batch_size 2 --training.global_batch_size 4 --training.steps 2
    --training.mixed_precision_param float32 --lr_scheduler.warmup_steps 1 --metrics.log_freq 1 --debug.seed 0
    --validation.no_enable --metrics.no_enable_tensorboard
""".split()


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = ["--job.dump_folder", str(tmp_path_factory.mktemp("alone"))]
    return train_here(load_config(["--job.config_file", CONFIG, *TINY_RUN, *folder], 1))


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("num_nodes", "env", "layout", "mesh"),
    [
        pytest.param(
            2,
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "NGPU": "", "MAX_RESTARTS": "1"},
            "",
            "dp_shard 2",
            id="one rank each, of any order",
            marks=pytest.mark.all,
        ),
        pytest.param(
            2,
            {"NNODES": "2", "NGPU": "2", "PREFLIGHT": "1"},
            "--parallelism.pipeline_parallel_degree 2 --parallelism.tensor_parallel_degree 2",
            "pp 2 x tp 2",
            id="two ranks each, in two dimensions",
        ),
    ],
)
def test_nodes_train_as_one_process_does(
    nodes: Nodes, trained_alone: list[dict[str, Any]], tmp_path: Path, num_nodes: int, env: Any, layout: str, mesh: str
) -> None:
    """As on a fresh Debian, each host's name means 127.0.1.1 to itself, and nothing to the other nodes."""
    command = ["./run_llama_train.sh", *TINY_RUN, "--job.dump_folder", str(tmp_path), *layout.split()]
    env = env | {"RDZV_TIMEOUT": "90", "RANK": "7", "WORLD_SIZE": "9"}  # these two count containers
    env["PYTHON"] = started.python(tmp_path)
    outputs = outputs_of([nodes.start(node, command, "127.0.1.1", **env) for node in range(num_nodes)], 200)
    assert f"mesh {mesh}" in outputs[0] and "trained 2 steps" in outputs[0], outputs
    assert "[rank0]:" in outputs[0] and not any("[rank0]:" in output for output in outputs[1:])
    assert all("GLOO_SOCKET_IFNAME=eth0" in output for output in outputs)
    assert all(("preflight passed" in output) == ("PREFLIGHT" in env) for output in outputs)
    records = read_records(tmp_path)
    for key, bound in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert differences(records, trained_alone, key) <= bound


Failure = tuple[dict[int, dict[str, Any]], dict[int, list[str]]]
NO_ANSWER = "no answer: a firewall drops it, or no machine has this address"
NO_ROUTE = "no route to host: no such machine in this node's networks, or a firewall rejects it"
REJECTED = NO_ROUTE.replace("no route to host", "network is unreachable")
UNLIKE = [
    "node 1 (node1): GLOO_SOCKET_IFNAME = eth7, but this node has no such interface with an address; use one of "
    "eth0 (10.0.0.11), eth1 (10.1.0.11)",
    "torchtitan/models/decoder/model.py: one on nodes 0, 2, 3, another on node 1 (node1); give all nodes the same",
    "debug.seed: 0 on nodes 0, 1, 2, 5 on node 3 (node3); start all nodes with the same file and options",
    "node 2 (node2): its clock is +60.",
    "but node 3 (node3) does not see the file that node 0 wrote there; set job.dump_folder to a folder that",
]
TWO_INTERFACES = (
    f"node 1 (node1) cannot reach node 0 (node0) at 10.1.0.10 (eth1): {REJECTED}; gloo uses eth1 on nodes 0, 1, but "
    f"the route to the head is eth0; to use eth0, set GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 on these nodes"
)
# For each failure: the settings of each node, and the messages that nodes print. `options` go to train.py.
FAILURES: dict[str, Failure] = {
    "wrong addresses and a wrong port": (
        {0: {}, 1: {"MASTER_ADDR": "10.0.0.99"}, 2: {"MASTER_ADDR": "10.0.0.12"}, 3: {"MASTER_PORT": "29500"}},
        {
            0: ["nodes 1, 2, 3 of 4 did not connect to 10.0.0.10:29520 within 20 s (RDZV_TIMEOUT); see the output"],
            1: [
                f"node 1 (node1) cannot reach the head 10.0.0.99:29520 within 20 s: {NO_ROUTE}. This node has "
                f"eth0 (10.0.0.11), eth1 (10.1.0.11); set MASTER_ADDR to an address of node 0, MASTER_PORT to"
            ],
            2: ["MASTER_ADDR = 10.0.0.12 is node 2 (node2) itself; use an address of node 0 that all nodes reach"],
            3: ["10.0.0.10:29500 within 20 s: connection refused: a machine is there, but nothing listens"],
        },
    ),
    "an address that is not node 0's": (
        {0: {"MASTER_ADDR": "10.0.0.99", "NNODES": "2"}},
        {0: [f"10.0.0.99:29521 does not lead to node 0 itself ({NO_ROUTE}); set MASTER_ADDR to one of eth0 ("]},
    ),
    "a name that nobody knows": (
        {1: {"MASTER_ADDR": "head", "NNODES": "2", "RDZV_TIMEOUT": "2"}},
        {1: ["cannot reach the head head:29522 within 2 s: that name has no address here; use one that the"]},
    ),
    "a port that is taken": (
        {0: {"before": "{python} -c '{server}' >/dev/null 2>&1 & sleep 1"}, 1: {"before": "sleep 1"}},
        {
            0: ["MASTER_PORT = 29523 is a port on which node 0 cannot listen: another program uses it; set"],
            1: ["node 1 (node1): the connection to the head 10.0.0.10:29523 broke off"],
        },
    ),
    "a head whose port a firewall closes": (
        {0: {"MASTER_PORT": "29999"}, 1: {"MASTER_PORT": "29999"}},
        {
            0: ["node 1 of 2 did not connect to 10.0.0.10:29999 within 20 s"],
            1: [f"node 1 (node1) cannot reach the head 10.0.0.10:29999 within 20 s: {NO_ANSWER}"],
        },
    ),
    "other ports that a firewall closes": (
        dict.fromkeys((0, 1), {"MASTER_ADDR": "10.1.0.10", "name_means": "10.1.0.1{}"}),
        dict.fromkeys((0, 1), [f"at 10.1.0.10 (eth1): {REJECTED}; open all ports between the nodes, not only"]),
    ),
    "names that lead to another interface": (
        dict.fromkeys((0, 1), {"name_means": "10.1.0.1{}"}),
        dict.fromkeys((0, 1), [TWO_INTERFACES]),
    ),
    "a node that never comes": (
        dict.fromkeys((0, 2), {"NNODES": "3"}),
        dict.fromkeys((0, 2), ["node 1 of 3 did not connect to 10.0.0.10:29527 within 20 s"]),
    ),
    "two nodes of one rank": (
        {0: {}, 1: {}, 2: {"NODE_RANK": "1"}},
        dict.fromkeys((0, 1, 2), ["both have NODE_RANK = 1; give each node its own"]),
    ),
    "nodes that are unlike": (
        {
            0: {},
            1: {"cwd": "{copy}", "GLOO_SOCKET_IFNAME": "eth7"},
            2: {"PYTHONPATH": "{ahead}"},
            3: {"before": "mount -t tmpfs tmpfs {folder}", "options": "--debug.seed 5"},
        },
        dict.fromkeys(range(4), UNLIKE),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    """The output and exit code of each node. All failures run at once, because they mostly wait.

    "gloo" is one more failure: two ranks without torchrun, whose names mean an interface behind a firewall.
    """
    folder, copy, ahead = (tmp_path_factory.mktemp(name) for name in ("run", "copy", "ahead"))
    for package in PACKAGES:
        shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    with (copy / "torchtitan/models/decoder/model.py").open("a") as model:
        model.write("# a line more\n")
    (ahead / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 60\n")
    server = 'import socket, time; s = socket.create_server(("", 29523)); s.accept()[0].close(); time.sleep(20)'
    words = {"copy": copy, "ahead": ahead, "folder": folder, "python": sys.executable, "server": server}
    connect = "import torch; from torchtitan.parallel import collectives as c; from torchtitan.observe import log; "
    connect += "log.start_logging({0}, False); c.start_process_group(torch.device('cpu'), {0}, 2, 3)"
    env = {"MASTER_PORT": "29510", "WORLD_SIZE": "2", "name_means": "10.1.0.1{}"}
    ranks = {rank: [sys.executable, "-c", connect.format(rank)] for rank in (0, 1)}
    outputs = {"gloo": {rank: nodes.start(rank, ranks[rank], RANK=str(rank), **env) for rank in ranks}}
    for i, (name, (settings, _)) in enumerate(FAILURES.items()):
        outputs[name] = {}
        for node, given in settings.items():
            env = {"NNODES": str(len(settings)), "MASTER_PORT": str(29520 + i), "CONFIG_FILE": CONFIG}
            env |= {key: value if key == "name_means" else value.format(**words) for key, value in given.items()}
            options = ["--job.dump_folder", str(folder), "--checkpoint.enable", *env.pop("options", "").split()]
            command = [sys.executable, "-m", "torchtitan", "preflight", "--", *options]
            outputs[name][node] = nodes.start(node, command, cwd=Path(env.pop("cwd", ROOT)), **env)
    return {
        name: {node: (outputs_of([process])[0], process.returncode) for node, process in of.items()}
        for name, of in outputs.items()
    }


@pytest.mark.parametrize("name", FAILURES)
def test_a_preflight_says_on_each_node_what_is_wrong(ended: dict[str, dict[int, Any]], name: str) -> None:
    for node, messages in FAILURES[name][1].items():
        output, code = ended[name][node]
        said = re.findall("^run_llama_train.sh: preflight: (.*)$", output, re.MULTILINE)
        assert code == 1 and "Traceback" not in output, output
        assert len(said) == len(messages), output
        for line, message in zip(said, messages, strict=True):
            assert message in line, output


def test_a_rank_that_others_do_not_reach_by_gloo_ends_and_says_so(ended: dict[str, dict[int, Any]]) -> None:
    """gloo alone would let the first rank wait five times its timeout."""
    (first, first_code), (second, second_code) = ended["gloo"].values()
    assert first_code == 1 and "another rank has not connected to this rank over gloo within 8 s; gloo uses" in first
    # The second rank reports gloo's error, or on a busy machine that gloo reported nothing in time.
    heard = "Refusal: this rank cannot connect to another rank over gloo ("
    assert second_code == 1 and (heard in second or "has not connected to this rank over gloo" in second), second


ONLY_IPV6 = 'ip link set lo up; ip address delete 127.0.0.1/8 dev lo; exec "$@"'


def test_ranks_meet_on_a_machine_whose_loopback_has_only_ipv6(nodes: Nodes, tmp_path: Path) -> None:
    """The host name means 127.0.0.1, as in the files of this machine."""
    script = ["./run_llama_train.sh", *TINY_RUN, "--job.dump_folder", str(tmp_path)]
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", ONLY_IPV6, "sh", *script]
    env = os.environ | {"PYTHON": started.python(tmp_path), "OMP_NUM_THREADS": "1", "NGPU": "2", "CONFIG_FILE": CONFIG}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(read_records(tmp_path)) == 2
