"""The load of the experts: counted in forward, summed over all ranks once an update, and what follows from it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torchtitan.config.layout import plan_batch
from torchtitan.config.schema import Config
from torchtitan.models.describe import describe_size
from torchtitan.models.mixture import MixtureOfExperts
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger
from torchtitan.parallel.collectives import sum_over
from torchtitan.parallel.loss_scale import LossScale
from torchtitan.parallel.mesh import Mesh


class Load:
    """How often the experts of this rank's stages were chosen."""

    def __init__(
        self,
        stages: Iterable[nn.Module],
        layers: Sequence[str],
        ranks: ProcessGroup,
        pipeline: ProcessGroup,
        num_experts: int,
        batch_tokens: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`ranks` hold the same stages, `pipeline` the others; `layers` are the names of the whole model's."""
        self.layers, self.ranks, self.pipeline, self.num_experts = layers, ranks, pipeline, num_experts
        self.device = torch.device("cpu")
        modules = {name: module for stage in stages for name, module in stage.named_modules()}
        self.mixtures = {name: m for name, m in modules.items() if isinstance(m, MixtureOfExperts)}
        for mixture in self.mixtures.values():
            mixture.batch_tokens, mixture.loss_scale = batch_tokens, loss_scale
        self._seen: Tensor | None = None  # choices since the last `read`, [this rank's mixtures, experts]

    def reset(self, device: torch.device) -> None:
        """Begin with no choices, on the device of the activations."""
        self.device = device
        for mixture in self.mixtures.values():
            mixture.counts, mixture.before = (torch.zeros_like(mixture.counts, device=device) for _ in range(2))

    @torch.no_grad()
    def after_update(self, gradient_norm: Tensor) -> None:
        """Sum the counts over the global batch, and move each bias against them (arXiv:2408.15664).

        An update that is left out, since the norm is not finite, moves none.
        """
        if not self.mixtures:
            return
        counts = sum_over(torch.stack([mixture.counts for mixture in self.mixtures.values()]), self.ranks)
        for mixture, now in zip(self.mixtures.values(), counts, strict=True):
            mixture.before.copy_(now)
            mixture.counts.zero_()
            bias, router = mixture.router.bias, mixture.router
            if bias is not None and router.weight.requires_grad:  # a frozen router keeps its bias
                whole = bias.to_local() if isinstance(bias, DTensor) else bias
                step = (now.sum() - now * len(now)).sign() * gradient_norm.to(now.device).isfinite()
                whole.add_(step, alpha=router.args.balance_rate)
        self._seen = counts if self._seen is None else self._seen + counts

    def tensors(self) -> dict[str, Tensor]:
        """What the next step's balancing loss needs, under the names of a checkpoint."""
        return {f"experts.{name}": mixture.before for name, mixture in self.mixtures.items()}

    def read(self) -> dict[str, Any]:
        """The load since the last call, in all layers; all ranks call it, and the host waits for the device."""
        numbers = [self.layers.index(".".join(name.split(".")[:2])) for name in self.mixtures]
        every = torch.zeros(len(self.layers), self.num_experts, dtype=torch.int64, device=self.device)
        if self._seen is not None:  # a stage may hold no mixture, and still sums with the others
            every[numbers] = self._seen
        self._seen = None
        return describe_load([row for row in sum_over(every, self.pipeline).tolist() if any(row)])


def build_load(
    stages: Iterable[nn.Module], blueprint: Blueprint, mesh: Mesh, config: Config, loss_scale: LossScale | None
) -> Load:
    ranks = mesh.tokens.get_group()
    if mesh.dims.tp > 1:  # a stage's tensor-parallel ranks route different positions
        ranks = mesh.devices["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage").get_group()
    shape, means = blueprint.shape, {"loss": "an added loss of coefficient", "bias": "a bias that moves in steps of"}
    balance = f"balanced by {means[shape.balance]} {shape.balance_rate:g}" if shape.balance in means else "not balanced"
    logger.info(f"{blueprint.name} has {describe_size(blueprint)}, which MFU counts; its experts are {balance}")
    if config.float8 is not None:
        logger.info("float8 leaves experts and routers as they are: it computes the other linear layers")
    tokens = plan_batch(config.training, mesh.dims.dp).global_batch_size * config.training.seq_len
    return Load(stages, blueprint.layers, ranks, mesh.stage_group, blueprint.num_experts, tokens, loss_scale)


def describe_load(counts: Sequence[list[int]]) -> dict[str, Any]:
    """Numbers of a record, of how often each expert of each layer was chosen."""
    shares = [[count / sum(row) for count in row] for row in counts]
    entropies = [-sum(share * math.log(share) for share in row if share) / math.log(max(2, len(row))) for row in shares]
    largest, dead = [max(row) * len(row) for row in shares], [row.count(0) for row in counts]
    return {
        "expert_load": max(largest),  # largest over mean, in the worst layer
        "dead_experts": sum(dead),
        "expert_entropy": sum(entropies) / len(entropies),  # 1: all experts alike; 0: one takes all
        "expert_load_by_layer": [round(each, 4) for each in largest],
        "dead_experts_by_layer": dead,
        "expert_entropy_by_layer": [round(each, 4) for each in entropies],
    }
