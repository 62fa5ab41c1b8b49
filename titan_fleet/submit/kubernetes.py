"""Manifests for Kubernetes: a TrainJob, the PyTorchJob of the older operator, and a JobSet, which needs neither."""

from typing import Any

from titan_fleet.submit.job import Job, Submission, image_of
from titan_fleet.submit.yaml_text import to_yaml
from torchtitan.launch.node import SECONDS_TO_SAVE

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


def jobset(job: Job) -> Submission:
    """A JobSet of one indexed Job. Node 0 is reached by the name that the JobSet gives its first pod."""
    pod = _pod_settings(job)
    rank = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    place = {"NNODES": str(job.nodes), "NGPU": str(max(1, job.gpus)), "MASTER_ADDR": f"{job.name}-node-0-0.{job.name}"}
    env = [{"name": name, "value": value} for name, value in place.items() if name not in job.variables]
    container = {
        "name": "node",
        "image": image_of(job),
        "command": [_literal(word) for word in job.command],
        "env": [*env, {"name": "NODE_RANK", "valueFrom": {"fieldRef": rank}}, *_env(job)],
        "resources": _resources(job),
        "volumeMounts": pod.pop("volumeMounts"),
    }
    of_node = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,  # one pod's failure fails the Job, and the JobSet starts all pods again
        "template": {"spec": {**pod, "restartPolicy": "Never", "containers": [container]}},
    }
    spec = {
        "failurePolicy": {"maxRestarts": 3},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": of_node}}],
    }
    return _kubectl("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec)


def _env(job: Job) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in job.variables.items()]
    if job.secret:
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "HF_TOKEN"}}})
    return env


def _literal(text: str) -> str:
    return text.replace("$", "$$")  # Kubernetes expands $(NAME) and turns $$ into $


def _resources(job: Job) -> dict[str, Any]:
    limits = ({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}) | dict(job.resources)
    return {"limits": limits} if limits else {}


def _pod_settings(job: Job) -> dict[str, Any]:
    """A pod's settings outside its container; it mounts /dev/shm, for NCCL needs more than the default there."""
    claims = [
        {"name": f"mount-{i}", "persistentVolumeClaim": {"claimName": what}} for i, (what, _) in enumerate(job.mounts)
    ]
    mounts = [{"name": f"mount-{i}", "mountPath": where} for i, (_, where) in enumerate(job.mounts)]
    chosen: dict[str, Any] = {"nodeSelector": dict(job.node_labels)} if job.node_labels else {}
    if job.pull_secrets:
        chosen["imagePullSecrets"] = [{"name": name} for name in job.pull_secrets]
    return chosen | {
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE + 10,
        "securityContext": {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *mounts],
    }


def _kubectl(version: str, kind: str, job: Job, spec: dict[str, Any]) -> Submission:
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace:
        metadata["namespace"] = job.namespace
    if job.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": job.queue}
    manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    return Submission(["kubectl", "apply", "-f", "-"], {}, to_yaml(manifest))
