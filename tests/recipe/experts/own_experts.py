"""A family of experts that is no part of the package: a test copies this file elsewhere and names it as model.name.

As DeepSeek V3 routes: sigmoids, groups of experts, a shared expert, a bias that follows the load.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.experts.family import EXPERTS


@dataclass(frozen=True)
class Args(ExpertArgs):
    balance: Literal["loss", "bias", "none"] = "bias"
    balance_rate: float = 0.01
    score: Literal["softmax", "sigmoid"] = field(default="sigmoid", init=False)
    score_scale: float = field(default=1.5, init=False)
    num_groups: int = field(default=4, init=False)
    groups_per_token: int = field(default=2, init=False)
    num_shared_experts: int = field(default=1, init=False)
    num_dense_layers: int = field(default=1, init=False)
    dense_hidden_dim: int | None = field(default=96, init=False)


SPEC = replace(EXPERTS, shape=Args, flavors={"small": Args(64, 4, 4, 4, 32, num_experts=8, experts_per_token=2)})
