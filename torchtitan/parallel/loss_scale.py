"""The factor that keeps small gradients of a float16 run from becoming zero."""

import torch
from torch import Tensor

FIRST_FACTOR, STEPS_TO_DOUBLE = 2.0**16, 2000


class LossScale:
    """Multiplies the loss, and so every gradient until the update, by a factor that it adapts.

    The factor halves when a gradient overflows, and that step's update is left out; it doubles after many steps
    without an overflow. All ranks see the same gradient norm, so they agree. No value travels to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), FIRST_FACTOR, device=device)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def adapt(self, norm: Tensor) -> None:
        """Set the factor of the next step."""
        overflowed = (~norm.isfinite()).float().to(self.factor.device)
        torch._amp_update_scale_(self.factor, self._steps, overflowed, 2.0, 0.5, STEPS_TO_DOUBLE)

    def state(self) -> list[float]:
        return [self.factor.item(), self._steps.item()]

    def load(self, state: list[float]) -> None:
        self.factor.fill_(state[0])
        self._steps.fill_(state[1])
