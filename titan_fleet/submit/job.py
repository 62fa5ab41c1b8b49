"""A job, described alike for every site, and the command by which a site's client submits it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.launch.node import SECONDS_TO_SAVE
from torchtitan.refusal import Refusal

_SCRIPT = "./run_llama_train.sh"


@dataclass(frozen=True)
class Job:
    """What to run and on which machines; the same for every site."""

    name: str
    config: str
    nodes: int
    gpus: int  # a node; 0: train on the CPU
    gpu_kind: str | None
    image: str | None
    mounts: Sequence[tuple[str, str]]  # (claim, bucket or folder; path on the nodes)
    env: Mapping[str, str]
    secret: str | None  # name of a Kubernetes secret that has the key HF_TOKEN
    has_token: bool  # HF_TOKEN is set on the machine that submits the job
    options: Sequence[str]  # for train.py
    project: str | None = None  # of Run:ai
    namespace: str | None = None  # this and what follows are for Kubernetes
    queue: str | None = None  # of Kueue
    pull_secrets: Sequence[str] = ()  # for the registry of the image
    resources: Mapping[str, str] = field(default_factory=dict)  # a node's, besides GPUs
    node_labels: Mapping[str, str] = field(default_factory=dict)  # that a node must have

    @property
    def command(self) -> list[str]:
        return [_SCRIPT, *self.options]

    @property
    def variables(self) -> dict[str, str]:
        seconds = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}
        return {"CONFIG_FILE": self.config, **seconds, **self.env}


@dataclass(frozen=True)
class Submission:
    """A client's command, its environment variables, and the text that it reads: from a file or from stdin."""

    command: list[str]
    variables: Mapping[str, str]
    text: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        pipe = " <<'END'\n" + self.text + "END" if self.text and not self.file else ""
        written = f"# {self.file}\n{self.text}" if self.file else ""
        return written + " ".join([*settings, shlex.join(self.command)]) + pipe


def image_of(job: Job) -> str:
    if not job.image:
        raise Refusal(
            "no --image is given, but the nodes get their code from an image; build one from the Dockerfile, push it, "
            "and add --image NAME"
        )
    return job.image
