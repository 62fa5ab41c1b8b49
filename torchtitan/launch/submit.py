"""`python -m torchtitan launch WHERE`: one description of a job, translated for Slurm, Run:ai, Kubernetes or SkyPilot.

    python -m torchtitan launch k8s --config train_configs/llama3_8b.toml --nodes 2 --gpus 8 --image IMAGE --dry-run

The job is run_llama_train.sh on each node. Nothing is installed or built; the site's own client submits.
"""

import argparse
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.models.families import load_run_or_exit
from torchtitan.refusal import Refusal

SECONDS_TO_SAVE = 290  # from a warning to the end; pods are given ten more
_SCRIPT = "./run_llama_train.sh"
_USER = 1000  # of the Dockerfile: volumes are made writable for it
_FOLDER = Path("outputs/launch")
_BARE = re.compile("(?!(?i:y|n|yes|no|on|off|true|false|null)$)[A-Za-z_]+")  # a key that YAML takes as it stands


@dataclass(frozen=True)
class Job:
    """What to run and on what, for every site alike."""

    name: str
    config: str
    nodes: int
    gpus: int  # of a node; 0: the CPU
    gpu_kind: str | None
    image: str | None
    mounts: Sequence[tuple[str, str]]  # what, where
    env: Mapping[str, str]
    secret: str | None  # of Kubernetes, with the key HF_TOKEN
    has_token: bool  # HF_TOKEN is set where the job is submitted
    options: Sequence[str]  # of train.py

    @property
    def command(self) -> list[str]:
        return [_SCRIPT, *self.options]

    @property
    def variables(self) -> dict[str, str]:
        seconds = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}
        return {"CONFIG_FILE": self.config, **seconds, **self.env}


@dataclass(frozen=True)
class Submission:
    """A client's command, with variables set for it and text that it reads: as a file where the site wants one."""

    command: list[str]
    variables: Mapping[str, str]
    text: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        pipe = " <<'END'\n" + self.text + "END" if self.text and not self.file else ""
        written = f"# {self.file}\n{self.text}" if self.file else ""
        return written + " ".join([*settings, shlex.join(self.command)]) + pipe


def slurm(job: Job) -> Submission:
    mounts = ",".join(f"{what}:{where}" for what, where in job.mounts)
    container = {"CONTAINER_IMAGE": job.image, "CONTAINER_MOUNTS": mounts}
    if mounts and not job.image:
        raise Refusal(f"--mount {mounts} is for a container; give its --image, or use the paths as the nodes see them")
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--gpus-per-node={job.gpus}"]
    variables = {"CONFIG_FILE": job.config, **job.env, **{name: value for name, value in container.items() if value}}
    return Submission(["sbatch", *options, "multinode_trainer.slurm", *job.options], variables)


def runai(job: Job, old: bool = False) -> Submission:
    """The client since about 2.18; the older one had other names: `runai submit-dist pytorch`."""
    several = job.nodes > 1
    kind = ["training", *(["pytorch"] if several else []), "submit", job.name]
    if old:
        kind = [*(["submit-dist", "pytorch"] if several else ["submit"]), "--name", job.name]
    flags = ["-i", _image(job), *(["-g", str(job.gpus)] if job.gpus else [])]
    flags += [f"--workers={job.nodes - 1}"] if several else []  # besides the master
    flags += ["--large-shm", *(part for name, value in job.variables.items() for part in ("-e", f"{name}={value}"))]
    if job.secret:
        token = ["-e", f"HF_TOKEN=SECRET:{job.secret},HF_TOKEN"]
        flags += token if old else ["--env-secret", f"HF_TOKEN={job.secret},key=HF_TOKEN"]
    for what, where in job.mounts:
        flags += ["--pvc", f"{what}:{where}"] if old else ["--existing-pvc", f"claimname={what},path={where}"]
    return Submission(["runai", *kind, *flags, "--command", "--", *job.command], {})


def k8s(job: Job) -> Submission:
    """A TrainJob of Kubeflow Trainer 2.3, on its runtime torch-distributed."""
    pod = _pod_settings(job)
    containers = [{"name": "node", "volumeMounts": pod.pop("volumeMounts")}]
    patch = {"name": "node", "template": {"spec": {"template": {"spec": {**pod, "containers": containers}}}}}
    trainer = {
        "image": _image(job),
        "command": [_literal(word) for word in job.command],
        "numNodes": job.nodes,
        "numProcPerNode": max(1, job.gpus),
        "env": _env(job),
        "resourcesPerNode": _resources(job),
    }
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "torchtitan/launch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}}}
        ],
    }
    return _kubectl("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec)


def k8s_v1(job: Job) -> Submission:
    """A PyTorchJob of the older Training Operator."""
    pod = _pod_settings(job)
    container = {  # the operator looks for this name
        "name": "pytorch",
        "image": _image(job),
        "command": [_literal(word) for word in job.command],
        "env": _env(job),
        "resources": _resources(job),
        "volumeMounts": pod.pop("volumeMounts"),
    }
    template = {"spec": {**pod, "containers": [container]}}
    counts = {"Master": 1, "Worker": job.nodes - 1}
    replicas = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
        for role, count in counts.items()
        if count
    }
    spec = {
        "nprocPerNode": str(max(1, job.gpus)),
        "runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": replicas,
    }
    return _kubectl("kubeflow.org/v1", "PyTorchJob", job, spec)


def sky(job: Job) -> Submission:
    if job.gpus and not job.gpu_kind:
        raise Refusal(
            f"--gpus {job.gpus}: SkyPilot looks for a kind of GPU; give it as --gpu_kind H100 (`sky gpus list`)"
        )
    resources = {"accelerators": f"{job.gpu_kind}:{job.gpus}"} if job.gpus else {}
    resources |= {"image_id": f"docker:{job.image}"} if job.image else {}
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources, "workdir": "."}
    task["envs"] = job.variables
    if job.has_token:
        task["secrets"] = {"HF_TOKEN": None}
    if job.mounts:
        task["file_mounts"] = {
            where: {"source": what, "mode": "MOUNT"} if "://" in what else what for what, where in job.mounts
        }
    task |= {"setup": "scripts/setup_env.sh requirements.txt", "run": shlex.join(job.command)}
    file = _FOLDER / f"{job.name}.sky.yaml"
    token = ["--secret", "HF_TOKEN"] if job.has_token else []
    return Submission(["sky", "launch", "-c", job.name, *token, str(file)], {}, _yaml(task), file)


SITES: dict[tuple[str, int], Callable[[Job], Submission]] = {  # with the generation of its interface
    ("slurm", 2): slurm,
    ("runai", 2): runai,
    ("runai", 1): functools.partial(runai, old=True),
    ("k8s", 2): k8s,
    ("k8s", 1): k8s_v1,
    ("sky", 2): sky,
}


def _image(job: Job) -> str:
    if not job.image:
        raise Refusal("no --image is given, and the nodes have no code without one; build and push it (Dockerfile)")
    return job.image


def _env(job: Job) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in job.variables.items()]
    if job.secret:
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "HF_TOKEN"}}})
    return env


def _literal(text: str) -> str:
    return text.replace("$", "$$")  # Kubernetes fills in $(NAME), and makes $ of $$


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(job.gpus)}} if job.gpus else {}


def _pod_settings(job: Job) -> dict[str, Any]:
    """What a pod needs besides its container; shared memory is NCCL's, which has too little of it by default."""
    claims = [
        {"name": f"mount-{i}", "persistentVolumeClaim": {"claimName": what}} for i, (what, _) in enumerate(job.mounts)
    ]
    mounts = [{"name": f"mount-{i}", "mountPath": where} for i, (_, where) in enumerate(job.mounts)]
    return {
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE + 10,
        "securityContext": {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *mounts],
    }


def _kubectl(version: str, kind: str, job: Job, spec: dict[str, Any]) -> Submission:
    manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}
    return Submission(["kubectl", "apply", "-f", "-"], {}, _yaml(manifest))


def _yaml(value: Any, indent: str = "") -> str:
    """YAML of tables, lists and plain values; a string is quoted as JSON does, which YAML reads the same."""
    lines = []
    for key, inner in value.items() if isinstance(value, dict) else (("-", item) for item in value):
        head = indent + (key if key == "-" else f"{key if _BARE.fullmatch(key) else json.dumps(key)}:")
        if not isinstance(inner, (dict, list)) or not inner:
            lines.append(f"{head} {json.dumps(inner, ensure_ascii=False)}\n")
        elif key == "-":  # a table in a list begins on the line of its dash
            lines.append(f"{indent}- {_yaml(inner, indent + '  ')[len(indent) + 2 :]}")
        else:
            lines.append(f"{head}\n{_yaml(inner, indent + '  ')}")
    return "".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("site", choices=("slurm", "runai", "k8s", "sky"), help="whose client submits it")
    parser.add_argument("--config", default="train_configs/debug_model.toml", help="TOML file (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each; 0: the CPU (default: %(default)s)")
    parser.add_argument("--gpu_kind", help="as H100; SkyPilot asks for it")
    parser.add_argument("--image", help="of the container (Dockerfile); needed by runai and k8s")
    parser.add_argument(
        "--mount", action="append", default=[], metavar="WHAT:WHERE", help="claim, bucket's URL or folder, and its path"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the job")
    parser.add_argument("--secret", help="Kubernetes secret whose key HF_TOKEN is the Hugging Face token")
    parser.add_argument("--name", help="of the job (default: from the file's name)")
    parser.add_argument("--api", type=int, choices=(1, 2), default=2, help="1: runai submit-dist, PyTorchJob")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    parser.epilog = "After --: options of train.py."


def plan_job(args: argparse.Namespace, options: Sequence[str], has_token: bool) -> Job:
    for name, least in (("nodes", 1), ("gpus", 0)):
        if getattr(args, name) < least:
            raise Refusal(f"--{name} {getattr(args, name)} is no number of {name}; use {least} or more")
    if args.secret and args.site in ("slurm", "sky"):
        raise Refusal(f"--secret {args.secret} is of Kubernetes, not {args.site}; set HF_TOKEN where you submit")
    if args.gpu_kind and args.site != "sky":
        raise Refusal(f"--gpu_kind {args.gpu_kind} is for SkyPilot; ask {args.site} for it in its own way")
    for given in args.env:
        if not re.match("[A-Za-z_][A-Za-z0-9_]*=", given):
            raise Refusal(f"--env {given} sets nothing; use NAME=VALUE")
        if given.startswith(("HF_TOKEN=", "HUGGING_FACE_HUB_TOKEN=")):
            raise Refusal(
                f"--env {given.partition('=')[0]}=... would show the token to all who see the job; use --secret, "
                f"or under Slurm and SkyPilot set HF_TOKEN where you submit"
            )
    for given in args.mount:
        if not re.fullmatch(".+:/.*", given):
            raise Refusal(f"--mount {given} is no claim or folder and its path; use WHAT:/WHERE")
    name = args.name or re.sub("[^a-z0-9]+", "-", Path(args.config).stem.lower()).strip("-")
    if not re.fullmatch("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise Refusal(f"--name {name} cannot name a job; use a letter, then up to 39 of a-z, 0-9 and -")
    return Job(
        name=name,
        config=args.config,
        nodes=args.nodes,
        gpus=args.gpus,
        gpu_kind=args.gpu_kind,
        image=args.image,
        mounts=[(what, where) for what, _, where in (given.rpartition(":") for given in args.mount)],
        env=dict(given.split("=", 1) for given in args.env),
        secret=args.secret,
        has_token=has_token,
        options=options,
    )


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    if (args.site, args.api) not in SITES:
        raise Refusal(f"--api {args.api}: {args.site} has one way to submit; leave it out")
    job = plan_job(args, options, has_token="HF_TOKEN" in os.environ)
    processes = job.env.get("NGPU", str(max(1, job.gpus)))
    world_size = job.nodes * int(processes) if processes.isdigit() else None
    load_run_or_exit(["--job.config_file", job.config, *options], world_size, rank=0)
    submission = SITES[args.site, args.api](job)
    if args.dry_run:
        print(submission)
        return 0
    client = submission.command[0]
    if not shutil.which(client):
        raise Refusal(f"{client} is not on PATH; install {args.site}'s client here, or give --dry-run's output to it")
    if submission.file:
        submission.file.parent.mkdir(parents=True, exist_ok=True)
        submission.file.write_text(submission.text, encoding="utf-8")
    print(shlex.join(submission.command), file=sys.stderr)
    text = None if submission.file else submission.text.encode()
    return subprocess.run(
        submission.command, input=text or None, env={**os.environ, **submission.variables}, check=False
    ).returncode
