"""The learning rate as a pure function of the step: linear warmup, a plateau, a decay (arXiv:2404.06395)."""

import math
from collections.abc import Callable

from torchtitan.config.schema import LRScheduler

_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def learning_rate_factor(step: int, config: LRScheduler, training_steps: int) -> float:
    """The factor on `optimizer.lr` at a step; steps count from 1.

    The decay would reach `min_lr_factor` one step after the last one, so that no step trains at a rate of zero.
    """
    total = config.total_steps or training_steps
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    decay_steps = total - config.warmup_steps if config.decay_ratio is None else round(total * config.decay_ratio)
    done = step - 1 - (total - decay_steps)
    if done <= 0:
        return 1.0
    return config.min_lr_factor + (1 - config.min_lr_factor) * _DECAY[config.decay_type](done / decay_steps)
