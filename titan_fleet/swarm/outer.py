"""The outer step: what the mean of the sites' differences does to the anchor (DiLoCo, arXiv 2311.08105)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outer:
    """Nesterov's momentum on the mean difference, anchor minus weights, as if it were a gradient."""

    rate: float
    momentum: float

    @classmethod
    def of(cls, method: str, rate: float, momentum: float) -> "Outer":
        return cls(1.0, 0.0) if method == "average" else cls(rate, momentum)

    def step(self, mean: Tensor, velocity: Tensor) -> Tensor:
        """What to subtract from the anchor. Changes the velocity in place."""
        velocity.mul_(self.momentum).add_(mean)
        return (mean + self.momentum * velocity) * self.rate


def taken(anchor: Tensor, update: Tensor) -> Tensor:
    """The anchor after an update as it travelled: everyone who subtracts it has the same bits."""
    return anchor - update


def mixed(weights: Tensor, sent: Tensor, anchor: Tensor, mix: float) -> Tensor:
    """A site's weights once the anchor is known: what it learned while its difference travelled stays.

    `mix` of the weights before remains besides; 0 takes the anchor.
    """
    arrived = anchor + (weights - sent)
    return arrived if mix == 0 else arrived.lerp(weights, mix)
