"""The best validation so far. It decides which checkpoint is kept beside the newest, and whether a run ends early."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.observe.log import logger
from torchtitan.parallel.collectives import from_rank_0


@dataclass
class Best:
    """Best is the lowest loss or, as `name` says, the highest metric of this name; of "-NAME", the lowest."""

    name: str
    patience: int | None  # validations in a row without a better one, after which the run ends
    step: int = 0  # 0: there is none yet
    value: float = math.nan
    worse: int = 0  # validations since then

    def judge(self, step: int, values: Mapping[str, Any]) -> None:
        """Called by all ranks; rank 0 has the values."""
        name, is_low = self.name.removeprefix("-"), self.name == "loss" or self.name.startswith("-")
        found = values.get(name, math.nan)
        value = from_rank_0(float(found) if isinstance(found, int | float) else math.nan)
        if math.isnan(value):
            logger.warning(f"{name} after step {step} is no number, so this validation is not the best")
        is_better = value < self.value if is_low else value > self.value
        if is_better or (self.step == 0 and not math.isnan(value)):
            self.step, self.value, self.worse = step, value, 0
            return
        self.worse += 1
        if self.is_over:
            logger.info(
                f"{self.worse} validations in a row were not better than {self} (validation.patience), so the run ends"
            )

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.worse >= self.patience

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "step": self.step, "value": self.value, "worse": self.worse}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was saved, unless that looked at another metric."""
        if state["name"] == self.name:
            self.step, self.value, self.worse = state["step"], state["value"], state["worse"]

    def __str__(self) -> str:
        return f"{self.name.removeprefix('-')} {self.value:.4f} after step {self.step}"
