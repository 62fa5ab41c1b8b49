"""A launcher's variables become one torchrun command, or a refusal that names the variable."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.launch.node import environment_here
from torchtitan.launch.start import count_gpus, plan_start
from torchtitan.launch.variables import first_host, read_node

ROOT = Path(__file__).parents[3]
CONFIG = {"CONFIG_FILE": str(ROOT / "train_configs" / "debug_model.toml")}

# The variables that each platform sets on the second of two nodes with eight GPUs.
PLATFORMS = {
    "by hand": {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
    "PyTorchJob, Run:ai": {
        "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto", "MASTER_ADDR": "head",
        "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2", "RUNAI_NUM_OF_GPUS": "8", "PYTHONUNBUFFERED": "0",
    },
    "Kubeflow Trainer": {
        "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "head",
        "PET_MASTER_PORT": "29500",
    },
    "Slurm": {
        "SLURM_JOB_ID": "9500", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "head,gpu2",
        "SLURM_GPUS_ON_NODE": "8",
    },
    "SkyPilot": {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "head\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    },
}  # fmt: skip


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_launchers_second_node_gets_the_same_command(platform: str) -> None:
    node = read_node(PLATFORMS[platform], gpus=8)
    assert node.torchrun("0") == [
        "-m",
        "torchtitan.launch.ranks",
        "--nnodes=2",
        "--nproc_per_node=8",
        "--max_restarts=0",
        "--rdzv_backend=static",
        "--node_rank=1",
        "--rdzv_endpoint=head:29500",
        f"--rdzv_id={'9500' if platform == 'Slurm' else 'run'}",
        "--rdzv_conf=timeout=900",
        "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--local_ranks_filter=0",
        "--role=rank",
        "--tee=3",
    ]


def test_nothing_set_is_one_node_with_its_gpus_or_one_process() -> None:
    assert [(read_node({}, gpus).num_nodes, read_node({}, gpus).num_processes) for gpus in (0, 4)] == [(1, 1), (1, 4)]
    command = read_node({}, gpus=4).torchrun("0,1")
    here = {"--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.1"}
    assert here | {"--local_ranks_filter=0,1"} <= set(command)


def test_on_a_terminal_the_one_shown_rank_writes_to_the_terminal_itself() -> None:
    node = read_node({"NGPU": "3"}, gpus=0)
    assert "--redirects=0:3,1:0,2:3" in node.torchrun("1", on_terminal=True)
    assert all("--tee=3" in command for command in (node.torchrun("1"), node.torchrun("0,1", on_terminal=True)))


def test_a_run_that_may_be_brought_back_meets_dynamically_with_the_head_as_host() -> None:
    for rank in (0, 1):
        env = PLATFORMS["by hand"] | {"NODE_RANK": str(rank), "MAX_RESTARTS": "3", "RDZV_TIMEOUT": "60"}
        command = read_node(env, gpus=8).torchrun("0")
        conf = f"--rdzv_conf=is_host={int(rank == 0)},join_timeout=60,read_timeout=60"
        assert {"--rdzv_backend=c10d", "--rdzv_endpoint=head:29500", "--max_restarts=3", conf} <= set(command)
        assert not any(option.startswith("--node_rank") for option in command)


def test_an_elastic_pytorchjob_of_one_size_is_numbered_by_torchrun() -> None:
    env = {
        "PET_NNODES": "2:2",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_ID": "j",
    }
    command = read_node(env, gpus=8).torchrun("0")
    conf = "--rdzv_conf=join_timeout=900,read_timeout=900"
    assert {"--nnodes=2", "--rdzv_endpoint=job-worker-0:23456", "--rdzv_id=j", conf} <= set(command)


def test_slurm_speaks_of_this_run_only_inside_srun() -> None:
    outside = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a[1-4]"}
    alone = read_node(outside | {"NNODES": "1"}, gpus=0)
    assert alone.num_nodes == 1 and alone.read == ("NNODES",)
    step = PLATFORMS["Slurm"] | {"SLURM_NNODES": "4", "SLURM_STEP_NODELIST": "gpu[7,9]"}  # two of the job's four nodes
    assert read_node(step, gpus=8).head == "gpu7:29500"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a1,b2", "a1"),
        ("node[01-03,07],gpu5", "node01"),
        ("r[1-2]n[04-09]", "r1n04"),
        ("x[3].site", "x3.site"),
    ],
)
def test_the_first_of_slurms_nodes_is_found_without_scontrol(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


TWO = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "head"}


@pytest.mark.parametrize(
    ("env", "gpus", "message"),
    [
        ({"NNODES": "two"}, 0, "NNODES = two is not a number of nodes; use 1 or more"),
        (TWO | {"PET_NNODES": "4"}, 0, "NNODES = 2, but PET_NNODES = 4: both set the same thing; unset one of them"),
        (
            TWO | {"PET_MASTER_ADDR": "b"},
            0,
            "MASTER_ADDR = head, but PET_MASTER_ADDR = b: both set the same thing; unset one",
        ),
        (TWO | {"PET_NNODES": "1:4"}, 0, "PET_NNODES = 1:4 lets the number of nodes change, .* use 4"),
        (
            {"NODE_RANK": "1"},
            0,
            "NODE_RANK = 1, but the number of nodes is not set; set NNODES and NODE_RANK on each node",
        ),
        (
            {"MASTER_ADDR": "a", "RANK": "1", "WORLD_SIZE": "2"},
            0,
            r"MASTER_ADDR = a, but the number .*: NNODES=\$WORLD_SIZE NODE_RANK=\$RANK.*, or unset MASTER_ADDR",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "a"},
            0,
            "NNODES = 2, but no node rank is set; set NODE_RANK on each node: 0 to 1",
        ),
        (TWO | {"NODE_RANK": "2"}, 0, "NODE_RANK = 2, but NNODES = 2; use a node rank from 0 to 1"),
        (TWO | {"NODE_RANK": "2", "PET_RDZV_ENDPOINT": "a:1"}, 0, "NODE_RANK = 2, but NNODES = 2; use a node rank"),
        (TWO | {"PET_RDZV_ENDPOINT": "a"}, 0, "PET_RDZV_ENDPOINT = a has no port; use a:29400"),
        (
            {"NNODES": "2", "NODE_RANK": "0"},
            0,
            "NNODES = 2, but no head node is set; set MASTER_ADDR to an address of node 0",
        ),
        (TWO | {"MASTER_PORT": "tcp://10.0.0.1:80"}, 0, "MASTER_PORT = tcp://10.0.0.1:80 is not a port; use 1 or more"),
        (TWO | {"PET_RDZV_BACKEND": "etcd"}, 0, "PET_RDZV_BACKEND = etcd is not supported here; use c10d"),
        ({"RDZV_TIMEOUT": "0"}, 0, "RDZV_TIMEOUT = 0 is not a number of seconds; use 1 or more"),
        (
            {"SLURM_NNODES": "4", "SLURM_NODEID": "0"},
            0,
            r"SLURM_NNODES = 4, but srun did not start this script .* or NNODES=1",
        ),
        (
            PLATFORMS["Slurm"] | {"SLURM_STEP_NUM_TASKS": "16"},
            8,
            "SLURM_STEP_NUM_TASKS = 16 on 2 nodes, .* --ntasks-per-node",
        ),
        ({"NGPU": "3"}, 2, "NGPU = 3 is more than the 2 GPUs here; use 2 or fewer"),
        ({"NGPU": "4", "RUNAI_NUM_OF_GPUS": "2"}, 0, "NGPU = 4 is more than RUNAI_NUM_OF_GPUS = 2; use 2 or fewer"),
        ({"NGPU": "2", "PET_NPROC_PER_NODE": "4"}, 0, "NGPU = 2, but PET_NPROC_PER_NODE = 4: both set the same thing"),
        ({"PET_NPROC_PER_NODE": "cpu"}, 0, "PET_NPROC_PER_NODE = cpu is not a number of processes; use 1 or more"),
        ({"RUNAI_NUM_OF_GPUS": "1.5"}, 0, "RUNAI_NUM_OF_GPUS = 1.5 is not a number of GPUs; use 1 or more"),
        (
            {"RUNAI_NUM_OF_GPUS": "8"},
            0,
            "RUNAI_NUM_OF_GPUS = 8, but nvidia-smi shows no GPU here; make nvidia-smi work, or set NGPU",
        ),
        ({"PET_NPROC_PER_NODE": "gpu"}, 0, "PET_NPROC_PER_NODE = gpu, but nvidia-smi shows no GPU here"),
    ],
)
def test_contradictory_and_half_set_variables_are_refused_by_name(env: dict[str, str], gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        read_node(env, gpus)


def test_a_part_of_a_gpu_is_one_process_and_none_is_the_cpu() -> None:
    assert read_node({"RUNAI_NUM_OF_GPUS": "0.5"}, gpus=1).num_processes == 1
    assert read_node({"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, gpus=0).num_processes == 1
    assert read_node({"RUNAI_NUM_OF_GPUS": "2.0"}, gpus=2).num_processes == 2
    assert read_node({"NGPU": "2", "SLURM_GPUS_ON_NODE": "8"}, gpus=8).num_processes == 2


def test_an_address_of_ipv6_is_put_in_brackets() -> None:
    assert read_node(TWO | {"MASTER_ADDR": "fd00::1"}, gpus=0).head == "[fd00::1]:29500"


def test_gpus_are_those_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus(None) == 0
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A'; echo '  MIG 1g'; echo 'GPU 1: B'\n")
    program.chmod(0o755)
    assert [count_gpus(v) for v in (None, "", "0", "1, 0", "GPU-ab,MIG-cd", "-1")] == [2, 0, 1, 2, 2, 0]

    program.write_text("#!/bin/sh\nexec /bin/sleep 5\n")
    monkeypatch.setattr("torchtitan.launch.start._SMI_SECONDS", 0.1)
    with pytest.raises(ValueError, match="nvidia-smi does not answer within 0.1 s: a GPU or its driver hangs"):
        count_gpus(None)


def test_a_tools_own_run_knows_nothing_of_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_NNODES", "PET_MAX_RESTARTS", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    cleared = environment_here(2)
    assert cleared.keys() - os.environ.keys() == {"OMP_NUM_THREADS"} and cleared["OMP_NUM_THREADS"] == "3"
    assert not any(name in cleared for name in ("PET_NNODES", "PET_MAX_RESTARTS", "RANK", "WORLD_SIZE", "LOCAL_RANK"))


GROWS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_one_process_is_train_py_itself_whatever_a_platform_numbered_so() -> None:
    start = plan_start(CONFIG, ["--training.steps", "20"], gpus=1)
    assert start.arguments[0] == "train.py" and start.settings == GROWS
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    assert plan_start(CONFIG | pod, [], gpus=1).settings == {**GROWS, "WORLD_SIZE": "1", "RANK": "0"}


def test_on_cpus_memory_is_kept_and_cores_are_shared_unless_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 8.0, 8.0))
    start = plan_start(CONFIG | {"NGPU": "2", "MALLOC_TOP_PAD_": "1"}, [], gpus=0)
    assert set(start.settings) == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS"}
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    asleep = plan_start(CONFIG | {"NGPU": "2"}, [], gpus=0).settings.keys() - start.settings.keys()
    assert asleep == {"MALLOC_TOP_PAD_", "GOMP_SPINCOUNT"}
    own = plan_start(CONFIG | {"NGPU": "2", "OMP_WAIT_POLICY": "active"}, [], gpus=0).settings
    assert "GOMP_SPINCOUNT" not in own
    assert plan_start(CONFIG | {"NGPU": "2"}, [], gpus=2).settings == GROWS
    assert plan_start(CONFIG | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, [], gpus=1).settings == {}


def test_what_torchrun_would_read_itself_cannot_undo_the_command() -> None:
    env = CONFIG | PLATFORMS["by hand"] | {"PET_STANDALONE": "1", "MAX_RESTARTS": "1", "NGPU": "1"}
    settings = plan_start(env, [], gpus=1).settings
    assert settings["PET_STANDALONE"] == "0" and settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_list_of_ranks_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match="LOG_RANK = all is not a list of ranks; use numbers separated by commas, such as 0,1"
    ):
        plan_start(CONFIG | {"LOG_RANK": "all"}, [], gpus=0)


def test_a_fake_run_needs_neither_head_nor_place() -> None:
    start = plan_start(CONFIG | {"NNODES": "2", "NGPU": "4", "COMM_MODE": "fake_backend"}, [], gpus=0)
    assert start.settings == {"WORLD_SIZE": "8", "RANK": "0"}
    assert start.arguments[:4] == ["-m", "torchtitan", "dry_run", "--"]


def start_pod(folder: Path, **env: str) -> "subprocess.Popen[str]":
    inherited = {k: v for k, v in os.environ.items() if k not in ("NGPU", "CONFIG_FILE", "RANK", "WORLD_SIZE")}
    options = "--training.steps 2 --training.seq_len 32 --training.local_batch_size 1 --training.global_batch_size 2"
    options += " --metrics.log_freq 1 --validation.steps 1 --debug.seed 0 --lr_scheduler.warmup_steps 1"
    return subprocess.Popen(
        [str(ROOT / "run_llama_train.sh"), "--job.dump_folder", str(folder), *options.split()],
        env=inherited | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_dry_run_prints_one_line_and_the_command_and_starts_nothing(tmp_path: Path) -> None:
    pod = start_pod(tmp_path, PRINT_ONLY="1", NGPU="2", LOG_RANK="0,1")
    understood, command = pod.communicate()[0].splitlines()
    assert pod.returncode == 0 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"training \S+, NGPU=2 \(NVIDIA GPUs here: \d+\); read NGPU", understood)
    assert "-m torchtitan.launch.ranks --nnodes=1 --nproc_per_node=2" in command
    assert "--local_ranks_filter=0,1" in command
    assert f"train.py --job.config_file train_configs/debug_model.toml --job.dump_folder {tmp_path}" in command
