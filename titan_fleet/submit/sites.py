"""A job in the words of each site: Slurm, Run:ai, Kubernetes and SkyPilot."""

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_fleet.submit.job import Job, Submission, image_of
from titan_fleet.submit.kubernetes import jobset, k8s, k8s_v1
from titan_fleet.submit.yaml_text import to_yaml
from torchtitan.refusal import Refusal

_FOLDER = Path("outputs/launch")


def slurm(job: Job) -> Submission:
    mounts = ",".join(f"{what}:{where}" for what, where in job.mounts)
    container = {"CONTAINER_IMAGE": job.image, "CONTAINER_MOUNTS": mounts}
    if mounts and not job.image:
        raise Refusal(
            f"--mount {mounts} needs a container; add --image, or drop --mount and use the paths of the nodes"
        )
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--gpus-per-node={job.gpus}"]
    variables = {"CONFIG_FILE": job.config, **job.env, **{name: value for name, value in container.items() if value}}
    return Submission(["sbatch", *options, "multinode_trainer.slurm", *job.options], variables)


def runai(job: Job, old: bool = False) -> Submission:
    """For Run:ai's client since about 2.18; `old` is for the client before, with `runai submit-dist pytorch`."""
    several = job.nodes > 1
    kind = ["training", *(["pytorch"] if several else []), "submit", job.name]
    if old:
        kind = [*(["submit-dist", "pytorch"] if several else ["submit"]), "--name", job.name]
    flags = [
        *(["-p", job.project] if job.project else []),
        "-i",
        image_of(job),
        *(["-g", str(job.gpus)] if job.gpus else []),
    ]
    flags += [f"--workers={job.nodes - 1}"] if several else []  # the master comes on top
    flags += ["--large-shm", *(part for name, value in job.variables.items() for part in ("-e", f"{name}={value}"))]
    if job.secret:
        token = ["-e", f"HF_TOKEN=SECRET:{job.secret},HF_TOKEN"]
        flags += token if old else ["--env-secret", f"HF_TOKEN={job.secret},key=HF_TOKEN"]
    for what, where in job.mounts:
        flags += ["--pvc", f"{what}:{where}"] if old else ["--existing-pvc", f"claimname={what},path={where}"]
    return Submission(["runai", *kind, *flags, "--command", "--", *job.command], {})


def sky(job: Job) -> Submission:
    if job.gpus and not job.gpu_kind:
        raise Refusal(
            f"--gpus {job.gpus} comes without --gpu_kind, but SkyPilot searches by the kind of GPU; "
            f"add --gpu_kind H100, or another kind from `sky gpus list`"
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
    return Submission(["sky", "launch", "-c", job.name, *token, str(file)], {}, to_yaml(task), file)


SITES: dict[tuple[str, int], Callable[[Job], Submission]] = {  # (site, --api)
    ("slurm", 2): slurm,
    ("runai", 2): runai,
    ("runai", 1): functools.partial(runai, old=True),
    ("k8s", 2): k8s,
    ("k8s", 1): k8s_v1,
    ("jobset", 2): jobset,
    ("sky", 2): sky,
}
