"""Translates a job into the command and manifest of each site: Slurm, Run:ai, Kubernetes and SkyPilot."""

import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.launch.job import SECONDS_TO_SAVE, Job, Submission
from torchtitan.refusal import Refusal

_USER = 1000  # the Dockerfile's user: Kubernetes makes volumes writable for it
_FOLDER = Path("outputs/launch")
_BARE = re.compile("(?!(?i:y|n|yes|no|on|off|true|false|null)$)[A-Za-z_]+")  # a key that needs no quotes in YAML


def slurm(job: Job) -> Submission:
    mounts = ",".join(f"{what}:{where}" for what, where in job.mounts)
    container = {"CONTAINER_IMAGE": job.image, "CONTAINER_MOUNTS": mounts}
    if mounts and not job.image:
        raise Refusal(f"--mount {mounts} is for a container; give its --image, or use the paths as the nodes see them")
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--gpus-per-node={job.gpus}"]
    variables = {"CONFIG_FILE": job.config, **job.env, **{name: value for name, value in container.items() if value}}
    return Submission(["sbatch", *options, "multinode_trainer.slurm", *job.options], variables)


def runai(job: Job, old: bool = False) -> Submission:
    """Run:ai's client since about 2.18; with `old`, the one before, whose command was `runai submit-dist pytorch`."""
    several = job.nodes > 1
    kind = ["training", *(["pytorch"] if several else []), "submit", job.name]
    if old:
        kind = [*(["submit-dist", "pytorch"] if several else ["submit"]), "--name", job.name]
    flags = ["-i", _image(job), *(["-g", str(job.gpus)] if job.gpus else [])]
    flags += [f"--workers={job.nodes - 1}"] if several else []  # the master is not counted
    flags += ["--large-shm", *(part for name, value in job.variables.items() for part in ("-e", f"{name}={value}"))]
    if job.secret:
        token = ["-e", f"HF_TOKEN=SECRET:{job.secret},HF_TOKEN"]
        flags += token if old else ["--env-secret", f"HF_TOKEN={job.secret},key=HF_TOKEN"]
    for what, where in job.mounts:
        flags += ["--pvc", f"{what}:{where}"] if old else ["--existing-pvc", f"claimname={what},path={where}"]
    return Submission(["runai", *kind, *flags, "--command", "--", *job.command], {})


def k8s(job: Job) -> Submission:
    """A TrainJob for Kubeflow Trainer 2.3, which uses its runtime torch-distributed."""
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
    """A PyTorchJob for the older Training Operator."""
    pod = _pod_settings(job)
    container = {  # the operator requires this name
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


SITES: dict[tuple[str, int], Callable[[Job], Submission]] = {  # (site, --api)
    ("slurm", 2): slurm,
    ("runai", 2): runai,
    ("runai", 1): functools.partial(runai, old=True),
    ("k8s", 2): k8s,
    ("k8s", 1): k8s_v1,
    ("sky", 2): sky,
}


def _image(job: Job) -> str:
    if not job.image:
        raise Refusal(
            "no --image is given, and the nodes have no code without one; build one (Dockerfile), push it, give --image"
        )
    return job.image


def _env(job: Job) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in job.variables.items()]
    if job.secret:
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "HF_TOKEN"}}})
    return env


def _literal(text: str) -> str:
    return text.replace("$", "$$")  # Kubernetes expands $(NAME), and turns $$ into $


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(job.gpus)}} if job.gpus else {}


def _pod_settings(job: Job) -> dict[str, Any]:
    """A pod's settings outside its container. NCCL needs more shared memory than a pod has by default."""
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
    """Tables, lists and plain values as YAML. Strings are quoted as in JSON, which YAML reads the same."""
    lines = []
    for key, inner in value.items() if isinstance(value, dict) else (("-", item) for item in value):
        head = indent + (key if key == "-" else f"{key if _BARE.fullmatch(key) else json.dumps(key)}:")
        if not isinstance(inner, (dict, list)) or not inner:
            lines.append(f"{head} {json.dumps(inner, ensure_ascii=False)}\n")
        elif key == "-":  # a table in a list begins on the same line as its dash
            lines.append(f"{indent}- {_yaml(inner, indent + '  ')[len(indent) + 2 :]}")
        else:
            lines.append(f"{head}\n{_yaml(inner, indent + '  ')}")
    return "".join(lines)
