"""A job to submit, and the submission that a site's client takes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS_TO_SAVE = 290  # between the stop signal and the kill; pods get ten seconds more
_SCRIPT = "./run_llama_train.sh"


@dataclass(frozen=True)
class Job:
    """The run and the machines that it needs, the same for every site."""

    name: str
    config: str
    nodes: int
    gpus: int  # per node; 0: the CPU
    gpu_kind: str | None
    image: str | None
    mounts: Sequence[tuple[str, str]]  # claim, URL or folder; path in the container
    env: Mapping[str, str]
    secret: str | None  # a Kubernetes secret with the key HF_TOKEN
    has_token: bool  # HF_TOKEN is set on the submitting machine
    options: Sequence[str]  # options of train.py

    @property
    def command(self) -> list[str]:
        return [_SCRIPT, *self.options]

    @property
    def variables(self) -> dict[str, str]:
        seconds = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}
        return {"CONFIG_FILE": self.config, **seconds, **self.env}


@dataclass(frozen=True)
class Submission:
    """A client's command, its variables, and the text that it reads from stdin, or from `file` if that is set."""

    command: list[str]
    variables: Mapping[str, str]
    text: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        pipe = " <<'END'\n" + self.text + "END" if self.text and not self.file else ""
        written = f"# {self.file}\n{self.text}" if self.file else ""
        return written + " ".join([*settings, shlex.join(self.command)]) + pipe
