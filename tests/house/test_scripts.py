"""The shell scripts as a new user runs them: real processes, a real virtual environment, no training."""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomli

from tests import started

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "check_requirements.py"
TRAIN = ROOT / "run_llama_train.sh"
HERE = {"PYTHON": sys.executable}  # this Python has all packages, so the scripts install nothing


def run(command, cwd=ROOT, **env):
    return finish(start(command, cwd, **env))


def start(command, cwd=ROOT, **env):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "NGPU", "CONFIG_FILE")} | env
    pipe = subprocess.PIPE
    return subprocess.Popen([str(part) for part in command], cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(process):
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def missing(requirements, *, pyproject=None, folder=None):
    """Exit code and lines of check_requirements --missing, if asked with another pyproject.toml, put into `folder`."""
    script = CHECK
    if pyproject:
        (folder / "scripts").mkdir()
        script = Path(shutil.copy(CHECK, folder / "scripts"))
        (folder / "pyproject.toml").write_text(pyproject)
    done = run([sys.executable, script, requirements, "--missing"])
    return done.returncode, done.stdout.splitlines()


def fake_program(folder, name, body):
    """Put a program on PATH that this machine may not have, such as an old Python or nvidia-smi."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the setup scripts. Its only requirement is a tiny package in the folder, so no network is needed."""
    tree = tmp_path / "a checkout"  # paths have spaces
    (tree / "scripts").mkdir(parents=True)
    for name in ("scripts/setup_env.sh", "scripts/check_requirements.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree / name)
    with zipfile.ZipFile(tree / "tinyneed-1.0-py3-none-any.whl", "w") as wheel:
        info = "tinyneed-1.0.dist-info"
        wheel.writestr("tinyneed.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinyneed\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (tree / "requirements.txt").write_text("tinyneed==1.0\n")
    return tree


def start_set_up(tree, path=None, **env):
    """Start the copy's scripts/setup_env.sh, with the folder `path` first on PATH."""
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": tree.as_uri(), "PIP_CONFIG_FILE": os.devnull}
    if path:
        env["PATH"] = f"{path}{os.pathsep}{os.environ['PATH']}"
    return start([tree / "scripts" / "setup_env.sh", "requirements.txt"], cwd=tree.parent, **env)


def set_up(tree, path=None, **env):
    return finish(start_set_up(tree, path, **env))


def test_the_python_of_these_tests_has_the_requirements():
    assert missing(ROOT / "requirements-dev.txt") == (0, [])


def test_what_is_missing_is_listed_a_line_each(tmp_path):
    (tmp_path / "more.txt").write_text("no-such-thing-b==2.0; python_version >= '3.11'\nno-such-thing-b==1.0\n")
    (tmp_path / "requirements.txt").write_text("# a comment\n-r more.txt\npytest==0.0.1  # old\nNo_Such-A\n")
    assert missing(tmp_path / "requirements.txt") == (1, ["no-such-thing-b", "no-such-a"])


def test_a_version_outside_pyprojects_range_counts_as_missing(tmp_path):
    (tmp_path / "requirements.txt").write_text("pytest\npytest_timeout\n")
    pyproject = 'requires-python = ">=3.10"\ndependencies = [\n    "pytest>=1,<1.5",\n    "pytest-timeout>=1.0",\n]\n'
    code, lines = missing(tmp_path / "requirements.txt", pyproject=pyproject, folder=tmp_path)
    assert code == 1 and len(lines) == 1
    assert lines[0].startswith("pytest >=1,<1.5 (installed: ")


def test_a_python_outside_pyprojects_range_counts_as_missing(tmp_path):
    (tmp_path / "requirements.txt").write_text("pytest\n")
    pyproject = 'requires-python = ">=3.90"\ndependencies = [\n]\n'
    code, lines = missing(tmp_path / "requirements.txt", pyproject=pyproject, folder=tmp_path)
    assert code == 1 and lines[0].startswith("python >=3.90 (this is 3.")


def test_a_failed_set_up_is_not_used_and_one_of_two_shells_does_it_anew(checkout):
    wheel = next(checkout.glob("*.whl"))
    wheel.rename(checkout / "elsewhere")
    failed = set_up(checkout)
    assert failed.returncode == 1 and failed.stdout == ""
    assert "tinyneed" in failed.stderr and "run this again" in failed.stderr

    (checkout / "elsewhere").rename(wheel)
    outputs = [process.communicate() for process in [start_set_up(checkout), start_set_up(checkout)]]
    python = f"{checkout}/.venv/bin/python"
    assert [out.strip() for out, _ in outputs] == [python, python], outputs
    assert sum("creating .venv" in err for _, err in outputs) == 1
    assert run([python, "-c", "import tinyneed"]).returncode == 0

    third = set_up(checkout)
    assert (third.stdout.strip(), third.stderr) == (python, "")


@pytest.mark.parametrize("version", ["2.7", "3.8", "3.14"])
def test_a_python_of_the_wrong_version_is_refused(checkout, version):
    for name in ["python3", *(f"python3.{minor}" for minor in range(10, 14))]:
        fake_program(checkout / "bin", name, f"case $1 in -c) echo {version};; *) exit 1;; esac")
    done = set_up(checkout, path=checkout / "bin")
    assert done.returncode == 1 and done.stdout == ""
    assert f"python3 is {version}; Python >= 3.10 and < 3.14 is needed" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_without_the_venv_module_is_told_how_to_get_it(checkout):
    without_venv = "case $1 in -c) echo 3.11;; *) echo ensurepip is not available; exit 1;; esac"
    fake_program(checkout / "bin", "python3", without_venv)
    done = set_up(checkout, path=checkout / "bin")
    assert done.returncode == 1
    assert "sudo apt install python3.11-venv" in done.stderr


def test_a_given_python_that_lacks_something_is_left_as_it_is(checkout):
    done = set_up(checkout, PYTHON=sys.executable)
    assert done.returncode == 1 and done.stdout == ""
    assert f"PYTHON={sys.executable} lacks: tinyneed." in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_given_python_that_does_not_run_is_named(checkout):
    done = set_up(checkout, PYTHON="./no/python")
    assert done.returncode == 1
    assert "no/python does not run as a Python" in done.stderr


def test_a_mistake_in_the_config_is_shown_once_before_any_rank_starts(tmp_path):
    (tmp_path / "mine.toml").write_text("[training]\nstepz = 3\n")
    done = run([TRAIN], cwd=tmp_path, CONFIG_FILE="mine.toml", NGPU="2", CUDA_VISIBLE_DEVICES="0,1", **HERE)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("stepz") == 1, done.stderr
    assert "training.steps" in done.stderr  # the nearest known key


def test_the_config_check_loads_no_torch():
    program = (
        "import runpy, sys\n"
        "sys.argv = ['torchtitan', 'check', '--', '--job.config_file', 'train_configs/debug_model.toml']\n"
        "runpy.run_module('torchtitan', run_name='__main__')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def test_help_lists_the_options_and_starts_nothing(tmp_path):
    done = run([TRAIN, "--help"], cwd=tmp_path, NGPU="2", **HERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Trains what one TOML file describes") and "\nNGPU " in done.stdout
    assert "--training.steps" in done.stdout and "training train_configs" not in done.stdout


@pytest.mark.parametrize("ngpu", ["0", "two", "-1", "1.5"])
def test_an_impossible_number_of_processes_is_refused(ngpu):
    done = run([TRAIN], NGPU=ngpu, **HERE)
    assert done.returncode == 2
    assert f"NGPU = {ngpu} is not a number of processes; use 1 or more" in done.stderr


def test_an_impossible_number_of_restarts_is_refused():
    done = run([TRAIN], MAX_RESTARTS="often", **HERE)
    assert done.returncode == 2
    assert "MAX_RESTARTS = often is not a number of restarts; use 0 or more" in done.stderr


def test_more_processes_than_gpus_are_refused(tmp_path):
    fake_program(tmp_path / "bin", "nvidia-smi", "echo 'GPU 0: A'; echo 'GPU 1: B'")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run([TRAIN], NGPU="3", PATH=path, CUDA_VISIBLE_DEVICES="0,1", **HERE)
    assert done.returncode == 2
    assert "NGPU = 3 is more than the 2 GPUs here" in done.stderr


def test_a_second_way_to_name_the_config_file_is_refused():
    done = run([TRAIN, "--job.config_file=x.toml"], **HERE)
    assert done.returncode == 2
    assert "CONFIG_FILE" in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "run_llama_train.sh",
        "run_tests.sh",
        "scripts/setup_env.sh",
        ".ci/run",
        "multinode_trainer.slurm",
        "tests/recipe/slurm/run.sh",
    ],
)
def test_a_script_is_executable_and_parses(name):
    assert (ROOT / name).stat().st_mode & stat.S_IXUSR
    assert run(["bash", "-n", ROOT / name]).stderr == ""


def test_comm_mode_dry_runs_as_many_ranks_as_asked_for(tmp_path):
    done = run([TRAIN], PYTHON=started.python(tmp_path), COMM_MODE="fake_backend", NGPU="8")
    assert done.returncode == 0, done.stderr
    assert "on 8 ranks, mesh dp_shard 8" in done.stderr
    assert "every pipeline rank" in done.stdout


@pytest.fixture
def cluster(tmp_path):
    """A repository in which nothing trains, and stand-ins for Slurm's programs as one node sees them."""
    for name in ("repository", "repository/scripts"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "multinode_trainer.slurm", tmp_path / "repository")
    fake_program(tmp_path / "repository" / "scripts", "setup_env.sh", "echo python")
    address = "echo 'NodeName=gpu1 Arch=x86_64'; echo '   NodeAddr=10.0.0.1 NodeHostName=gpu1'"
    scontrol = f"case $2 in hostnames) echo gpu1; echo gpu2;; node) {address};; *) echo scontrol $@;; esac"
    fake_program(tmp_path / "bin", "scontrol", scontrol)
    fake_program(tmp_path / "bin", "srun", 'echo srun "$1"; while [ "$1" != bash ]; do shift; done; exec "$@"')

    def submit(node, *options, **env):
        fake_program(tmp_path / "repository", "run_llama_train.sh", node)
        env |= {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        env["SLURM_JOB_NODELIST"] = "gpu[1-2]"
        return run(["./multinode_trainer.slurm", *options], cwd=tmp_path / "repository", **env)

    return submit


def test_slurms_nodes_are_told_the_address_of_the_first_and_each_starts_the_run_script(cluster):
    done = cluster('echo "$MASTER_ADDR $PYTHON $SRUN_CPUS_PER_TASK: $@"', "--a", "b c", SLURM_CPUS_ON_NODE="8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["srun --wait=330", "10.0.0.1 python 8: --checkpoint.enable --a b c"]


def test_a_container_sees_the_repository_and_what_is_mounted(cluster):
    done = cluster("echo ran", CONTAINER_IMAGE="image.sqsh", CONTAINER_MOUNTS="/data:/data")
    assert done.stdout.splitlines() == ["srun --container-image=image.sqsh", "ran"]


@pytest.mark.parametrize("signal_name", ["USR1", "TERM"])
def test_a_slurm_job_that_was_told_to_end_is_queued_again(cluster, signal_name):
    done = cluster(f"kill -{signal_name} $PPID; sleep 0.3; echo saved; exit 1")
    assert done.returncode == 75
    assert done.stdout.splitlines()[1:] == [
        "saved",
        "asked to end: queued again, resumes from the newest checkpoint",
        "scontrol requeue 7",
    ]


@pytest.mark.parametrize(("node", "code"), [("exit 3", 3), ("kill -USR1 $PPID; sleep 0.3", 0)])
def test_a_slurm_job_that_failed_or_is_done_is_not_queued_again(cluster, node, code):
    done = cluster(node)
    assert done.returncode == code and "requeue" not in done.stdout


def test_a_slurm_job_outside_the_repository_is_refused(tmp_path):
    done = run([ROOT / "multinode_trainer.slurm"], cwd=tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} has no run_llama_train.sh; run sbatch in the repository" in done.stderr


def test_what_is_copied_into_the_image_is_enough_to_start_a_run(tmp_path):
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    assert {".git", ".venv*", "outputs", "tests/*"} <= set(ignored)
    for name in run(["git", "ls-files"]).stdout.splitlines():
        top = Path(name).parts[0]
        if top not in ignored and (top != "tests" or name.startswith("tests/assets/")) and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    done = run([tmp_path / "run_llama_train.sh"], cwd=tmp_path, DRY_RUN="1", **HERE)
    assert done.returncode == 0, done.stderr
    config = tomli.loads((tmp_path / "train_configs" / "debug_model.toml").read_text())
    for file in ("tests/assets/pydocs/train.jsonl", config["model"]["hf_assets_path"]):
        assert (tmp_path / file).exists()


def test_the_image_is_of_a_python_that_fits_runs_as_no_root_and_starts_the_run_script():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    minor = next(int(line.split("python:3.")[1].split("-")[0]) for line in lines if line.startswith("FROM "))
    assert 10 <= minor < 14
    steps = [line.split()[0] for line in lines if line[:1].isupper()]
    assert lines[-2:] == ["USER 1000", 'CMD ["./run_llama_train.sh"]']
    assert steps.index("COPY") < len(steps) - 4, "packages are installed before the code is copied"
