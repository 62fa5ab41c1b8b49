"""The shape of a decoder with experts, and what follows from it by arithmetic; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan.config.schema import Config, other_sections
from torchtitan.models.decoder import args as decoder
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class ExpertArgs(decoder.DecoderArgs):
    """The shape of one model. `hidden_dim` is the width of one expert."""

    num_experts: int = 8
    experts_per_token: int = 2
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_rate: float = 0.001  # coefficient of the loss, or how far a step moves a bias
    score: Literal["softmax", "sigmoid"] = field(default="softmax", init=False)
    normalizes: bool = field(default=True, init=False)  # the chosen experts' scores of a token sum to 1
    score_scale: float = field(default=1.0, init=False)  # of those scores, last of all
    num_groups: int = field(default=1, init=False)  # of experts, of which a token chooses `groups_per_token` first
    groups_per_token: int = field(default=1, init=False)
    num_shared_experts: int = field(
        default=0, init=False
    )  # that all tokens use, as one network of their width together
    num_dense_layers: int = field(default=0, init=False)  # first layers, which have one network of `dense_hidden_dim`
    dense_hidden_dim: int | None = field(default=None, init=False)
    # Fields on which no weight depends, whatever their values: a run may begin with weights of another.
    of_training: ClassVar[tuple[str, ...]] = ("balance_rate",)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_groups = self.groups_per_token * self.num_experts // self.num_groups
        if not 0 < self.experts_per_token <= in_groups <= self.num_experts or self.num_experts % self.num_groups:
            raise Refusal(
                f"model.experts_per_token = {self.experts_per_token}: a token chooses among {in_groups} of "
                f"num_experts = {self.num_experts} experts, in {self.num_groups} equal groups; use fewer a token, or "
                "more experts"
            )
        if self.num_dense_layers and self.dense_hidden_dim is None:
            raise Refusal("the shape has num_dense_layers, but no dense_hidden_dim; give it both")

    def is_dense(self, layer: int) -> bool:
        return layer < self.num_dense_layers

    @property
    def num_mixtures(self) -> int:
        return self.n_layers - self.num_dense_layers


def parts(args: ExpertArgs, seq_len: int) -> Sequence[Part]:
    def feed_forward(layer: int) -> tuple[int, int]:
        """Parameters of the layer's network, and how many of them a token uses."""
        if args.is_dense(layer):
            dense = 3 * args.dim * (args.dense_hidden_dim or 0)
            return dense, dense
        expert, router = 3 * args.dim * args.hidden_dim, args.dim * args.num_experts
        router += args.num_experts * (args.balance == "bias")
        others = router + args.num_shared_experts * expert
        return others + args.num_experts * expert, others + args.experts_per_token * expert

    return decoder.parts(args, seq_len, feed_forward)


def refusals(args: ExpertArgs, config: Config) -> Iterator[str]:
    """Tensor parallelism splits heads; experts it does not split, and their tokens go to whole ones."""
    if args.balance == "bias" and any(section.joins is not None for section in other_sections(config)):
        yield 'model.balance = "bias": sites that meet exchange what is trained, and no bias; use "loss"'
    if args.balance == "bias" and config.training.enable_cpu_offload:
        yield 'model.balance = "bias" with training.enable_cpu_offload: the bias is needed on the device; use "loss"'
    others = {"hidden units": args.dense_hidden_dim} if args.num_dense_layers else {}
    if args.num_shared_experts:
        others["hidden units of shared experts"] = args.num_shared_experts * args.hidden_dim
    yield from decoder.refusals(args, config, {name: count for name, count in others.items() if count})
