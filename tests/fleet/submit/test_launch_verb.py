"""One description of a job, as each site is given it, or a refusal that names the option."""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from titan_fleet.submit import verb as submit
from titan_fleet.submit.kubernetes import _literal
from titan_fleet.submit.yaml_text import to_yaml
from torchtitan.__main__ import main

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "launched"  # what each site is given; to renew a file, run its command with --print
TWO_NODES = "--config train_configs/llama3_8b.toml --nodes 2 --env MAX_RESTARTS=3"
KUBERNETES = f"{TWO_NODES} --image registry.example/torchtitan:1 --mount data:/data --secret hugging-face"
OPTIONS = ["--job.dump_folder", "/data/runs/8b", "--job.description", "two nodes: 'a' \"b\" $(HOME) #c"]
SUBMITTED = {
    "slurm": f"slurm {TWO_NODES} --image image.sqsh --mount /scratch:/data",
    "slurm_without_gpus": "slurm --nodes 2 --gpus 0 --env NGPU=4",
    "runai": f"runai {KUBERNETES}",
    "runai_one_node": "runai --image registry.example/torchtitan:1 --gpus 1 --name try",
    "runai_v1": f"runai --api 1 {KUBERNETES}",
    "runai_v1_one_node": "runai --api 1 --image registry.example/torchtitan:1 --gpus 1 --name try",
    "k8s": f"k8s {KUBERNETES}",
    "k8s_v1": f"k8s --api 1 {KUBERNETES}",
    "jobset": f"jobset {KUBERNETES} --namespace team --queue gpus --pull_secret registry --pull_secret mirror "
    "--resource rdma/ib=8 --node_label pool=h100 --download",
    "runai_project": "runai --image registry.example/torchtitan:1 --gpus 1 --name try --project team --download o/n",
    "sky": f"sky {TWO_NODES} --gpu_kind H100 --mount s3://bucket/data:/data --mount texts:/texts",
}


def launch(command: str, options: list[str] | None = None) -> str:
    """The output of `python -m torchtitan launch`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main(["launch", *command.split(), *(["--", *options] if options else [])])
    return printed.getvalue()


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.mark.parametrize("place", SUBMITTED)
def test_a_dry_run_prints_what_each_site_is_given(place: str, in_the_repository: None) -> None:
    printed = launch(f"{SUBMITTED[place]} --print", OPTIONS if "MAX_RESTARTS" in SUBMITTED[place] else None)
    assert printed == (GOLDEN / f"{place}.txt").read_text()


@pytest.mark.parametrize(("place", "pods"), [("k8s", 1), ("k8s_v1", 2)])
def test_a_manifest_is_yaml_that_keeps_every_word(place: str, pods: int) -> None:
    text = (GOLDEN / f"{place}.txt").read_text()
    manifest = yaml.safe_load(text.partition("<<'END'\n")[2].removesuffix("END\n"))
    specs = [manifest["spec"].get("trainer")]
    if pods == 2:
        replicas = manifest["spec"]["pytorchReplicaSpecs"]
        assert [replicas[role]["replicas"] for role in ("Master", "Worker")] == [1, 1]
        specs = [replica["template"]["spec"]["containers"][0] for replica in replicas.values()]
    for spec in specs:
        assert spec["command"] == ["./run_llama_train.sh", *OPTIONS[:-1], OPTIONS[-1].replace("$(", "$$(")]
        assert {"name": "MAX_RESTARTS", "value": "3"} in spec["env"]
        assert not any("HF_TOKEN" in str(variable.get("value")) for variable in spec["env"])
    assert _literal("a$$b") == "a$$$$b"  # Kubernetes turns two $ into one


def test_a_cluster_is_told_what_the_job_needs_whichever_operator_it_has() -> None:
    chosen = {"nodeSelector": {"pool": "h100"}, "imagePullSecrets": [{"name": "registry"}, {"name": "mirror"}]}
    options = SUBMITTED["jobset"].partition(" ")[2]
    for site in ("jobset", "k8s", "k8s --api 1"):
        manifest = yaml.safe_load(launch(f"{site} {options} --dry-run").partition("<<'END'\n")[2].removesuffix("END\n"))
        assert manifest["metadata"]["namespace"] == "team"
        assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}
        text = json.dumps(manifest)
        assert json.dumps({"nvidia.com/gpu": "8", "rdma/ib": "8"}) in text
        assert all(f"{json.dumps(key)}: {json.dumps(value)}" in text for key, value in chosen.items())
        assert '{"name": "DOWNLOAD", "value": "1"}' in text


@pytest.mark.parametrize(
    "value", [{}, [], {"a": []}, [[1, 2], {"b": None}], {"x.y/z": True, "on": "no", "t": "a\nb: 'c' \u00e9 \U0001f600"}]
)
def test_what_is_written_as_yaml_is_read_as_the_same(value: object) -> None:
    assert yaml.safe_load(to_yaml({"value": value})) == {"value": value}


def test_a_token_is_named_and_never_shown(in_the_repository: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_person")
    for site in ("sky --gpu_kind H100", "slurm", f"k8s {KUBERNETES}", f"runai {KUBERNETES}"):
        assert "hf_of_a_person" not in launch(f"{site} --dry-run")
    assert "--secret HF_TOKEN" in launch("sky --gpu_kind H100 --dry-run")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("slurm --nodes 0", "--nodes 0 is not a number of nodes; use 1 or more"),
        ("slurm --gpus -1", "--gpus -1 is not a number of gpus; use 0 or more"),
        ("slurm --mount /a:/b", "--mount /a:/b needs a container; add --image"),
        (
            "slurm --secret s",
            "--secret s names a Kubernetes secret, which slurm cannot read; set HF_TOKEN where you submit",
        ),
        (
            "slurm --gpu_kind H100",
            "--gpu_kind H100 works only for sky; drop it, and choose the GPU in slurm's own settings",
        ),
        ("slurm --namespace x", "--namespace x works only for k8s and jobset; drop it"),
        ("k8s --image i --project x", "--project x works only for runai; drop it"),
        ("k8s --image i --resource rdma/ib", "--resource rdma/ib is not an assignment; use NAME=VALUE"),
        ("sky --api 1", "--api 1 is given, but sky has only one interface; drop --api"),
        ("sky", "--gpus 8 comes without --gpu_kind, but SkyPilot searches by the kind of GPU; add --gpu_kind H100"),
        ("k8s", "no --image is given, but the nodes get their code from an image; build one"),
        ("k8s --image i --mount data", "--mount data names no path for the job; use WHAT:/WHERE"),
        ("k8s --image i --env A", "--env A is not an assignment; use NAME=VALUE"),
        (
            "k8s --image i --env HF_TOKEN=hf_x",
            "--env HF_TOKEN=... would show the token to everyone who sees the job; use --secret",
        ),
        (
            "k8s --image i --name My_Job",
            "--name My_Job is not a valid name; use a letter, then up to 39 of a-z, 0-9 and -",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused(command: str, message: str, in_the_repository: None) -> None:
    with pytest.raises(SystemExit, match=f"^error: {re.escape(message)}"):
        main(["launch", *command.split(), "--dry-run"])


def test_a_configuration_is_checked_before_it_is_queued_with_seeds_of_32_bits(
    in_the_repository: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "slurm", "--dry-run", "--", "--debug.seed", str(2**32)])
    assert "debug.seed = 4294967296" in capsys.readouterr().err


def test_a_site_without_its_client_is_told_so(in_the_repository: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        SystemExit, match="^error: kubectl is not on PATH; install it here, or take the output of --print"
    ):
        main(["launch", "k8s", "--image", "i"])


@pytest.mark.parametrize("place", ["slurm", "k8s", "sky"])
def test_a_job_is_submitted_by_the_sites_client(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = {"slurm": "sbatch", "k8s": "kubectl", "sky": "sky"}[place]
    (tmp_path / client).write_text(f'#!/bin/sh\n{{ echo "$CONFIG_FILE" "$@"; cat; }} > {tmp_path}/got\nexit 7\n')
    (tmp_path / client).chmod(0o755)
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as ended:
        main(["launch", *SUBMITTED[place].split(), "--", *OPTIONS])
    got = (tmp_path / "got").read_text()
    golden = (GOLDEN / f"{place}.txt").read_text()
    assert ended.value.code == 7
    if place == "slurm":
        assert got.startswith("train_configs/llama3_8b.toml --job-name=llama3-8b --nodes=2")
    elif place == "k8s":
        assert got.splitlines()[1:] == golden.splitlines()[1:-1]
    else:
        written = (tmp_path / "outputs/launch/llama3-8b.sky.yaml").read_text()
        assert written == golden.partition("\n")[2].rpartition("\nsky launch")[0] + "\n"


def test_each_job_with_a_preflight_gets_a_secret_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    submit.add_arguments(parser)
    words = ["k8s", "--image", "i", "--nodes", "2", "--env", "PREFLIGHT=1"]
    first, second = (submit.plan_job(parser.parse_args(words), [], False).env["PREFLIGHT_SECRET"] for _ in range(2))
    assert len(first) == 32 and first != second
    given = submit.plan_job(parser.parse_args([*words, "--env", "PREFLIGHT_SECRET=mine"]), [], False)
    assert given.env["PREFLIGHT_SECRET"] == "mine"
    assert "PREFLIGHT_SECRET" not in submit.plan_job(parser.parse_args(words[:5]), [], False).env
