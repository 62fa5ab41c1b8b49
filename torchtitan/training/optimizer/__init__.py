"""The optimizer: `build` makes it and `apply` applies it.

torch has AdamW. `muon` joins it and Muon into one optimizer, `bfloat16` is AdamW with smaller moments, and
`average` keeps a moving average of the weights.
"""

from torchtitan.training.optimizer.apply import apply_update, make_states, plain
from torchtitan.training.optimizer.build import build_optimizer

__all__ = ["apply_update", "build_optimizer", "make_states", "plain"]
