"""Sends the curves to Weights & Biases, an optional package."""

from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.refusal import Refusal


class WeightsAndBiases:
    """Logs to Weights & Biases, which reads its own environment variables (WANDB_PROJECT, WANDB_MODE=offline, ...)."""

    def __init__(self, run_folder: Path, config: Config) -> None:
        known = run_folder / "wandb" / "id"  # a run that resumes goes on in the same curves
        known.parent.mkdir(exist_ok=True)
        self._run = import_wandb().init(
            dir=str(run_folder),
            id=known.read_text(encoding="utf-8") if known.exists() else None,
            resume="allow",
            config=config.model_dump(),
            notes=config.job.description,
        )
        known.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def import_wandb() -> Any:
    """Import the optional package, or refuse with the line that installs it."""
    try:
        import wandb
    except ImportError:
        raise Refusal("metrics.enable_wandb = true, but Weights & Biases is not installed; pip install wandb") from None
    return wandb
