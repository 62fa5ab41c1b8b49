"""A run's place among the sites of a swarm. A run without [swarm] trains alone, and loads none of titan_fleet/swarm."""

import pkgutil
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchtitan.config.schema import Config
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.run import Run


class NoSwarm:
    """What train.py asks of a swarm, for a run that is in none. titan_fleet/swarm/site.py says it for the others."""

    seed: int | None = None  # the swarm's
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


def join_swarm(config: Config, run: Run) -> NoSwarm:
    if not config.swarm.addresses:
        return NoSwarm()
    site: NoSwarm = pkgutil.resolve_name("titan_fleet.swarm.join:join")(config, run)
    return site
