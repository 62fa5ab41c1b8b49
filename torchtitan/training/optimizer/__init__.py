"""The optimizer: `build` makes it, `update` applies it, `muon` and `bfloat16` are the two kinds that torch lacks."""

from torchtitan.training.optimizer.build import build_optimizer
from torchtitan.training.optimizer.update import apply_update, make_states, update_in_backward

__all__ = ["apply_update", "build_optimizer", "make_states", "update_in_backward"]
