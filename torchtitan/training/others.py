"""Whom a run may meet after a step. A run that no section of another package takes to others trains alone."""

import pkgutil
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchtitan.config.schema import Config, other_sections
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.run import Run


class NoOthers:
    """What train.py asks of whom a run meets, where it meets nobody; titan_fleet/swarm/site.py meets some."""

    seed: int | None = None  # that all of them have
    part = 0, 1  # of the training data, and how many parts there are

    def warming(self, factor: Callable[[int], float]) -> Callable[[int], float]:
        """The learning rate's factor, lower for a while where a site joined late with an empty optimizer."""
        return factor

    def attach(self, model: ModelParts) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def state(self) -> dict[str, Any] | None:
        return None

    def load(self, state: dict[str, Any]) -> None: ...

    def begin(self, step: int) -> int:
        """Join, once the weights are there. Returns the step to go on from."""
        return step

    def meet(self, step: int, is_asked_to_stop: Callable[[], bool]) -> None: ...

    def close(self, step: int) -> None: ...


def join_others(config: Config, run: Run) -> NoOthers:
    for section in other_sections(config):
        if section.joins is not None:
            site: NoOthers = pkgutil.resolve_name(section.joins)(config, run)
            return site
    return NoOthers()
