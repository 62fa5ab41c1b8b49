"""Manifests for Kubernetes: a TrainJob, and the PyTorchJob of the older operator."""

from typing import Any

from torchtitan.launch.job import SECONDS_TO_SAVE, Job, Submission, image_of
from torchtitan.launch.yaml_text import to_yaml

_USER = 1000  # the Dockerfile's user, who gets write access to the volumes


def k8s(job: Job) -> Submission:
    """A TrainJob for Kubeflow Trainer 2.3, on the runtime torch-distributed."""
    pod = _pod_settings(job)
    containers = [{"name": "node", "volumeMounts": pod.pop("volumeMounts")}]
    patch = {"name": "node", "template": {"spec": {"template": {"spec": {**pod, "containers": containers}}}}}
    trainer = {
        "image": image_of(job),
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
    container = {  # the operator finds the container by the name pytorch
        "name": "pytorch",
        "image": image_of(job),
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


def _env(job: Job) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in job.variables.items()]
    if job.secret:
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "HF_TOKEN"}}})
    return env


def _literal(text: str) -> str:
    return text.replace("$", "$$")  # Kubernetes expands $(NAME) and turns $$ into $


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(job.gpus)}} if job.gpus else {}


def _pod_settings(job: Job) -> dict[str, Any]:
    """A pod's settings outside its container; it mounts /dev/shm, for NCCL needs more than the default there."""
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
    return Submission(["kubectl", "apply", "-f", "-"], {}, to_yaml(manifest))
