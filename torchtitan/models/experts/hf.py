"""A decoder with experts in Hugging Face's files, where each expert's matrices are tensors of their own; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.models.decoder.hf import SIZES, DecoderFiles
from torchtitan.models.experts.args import ExpertArgs
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class ExpertFiles(DecoderFiles):
    """What is a family's own in these files."""

    router: str = ""  # its module in a layer
    expert: str = ""  # the module of an expert's matrix: `*` is the expert's number, {} the matrix
    parts: Mapping[str, str] = field(default_factory=dict)  # our names of these matrices, and theirs
    sizes: Mapping[str, str] = field(default_factory=dict)  # keys of config.json, and the fields that they are

    @property
    def block_names(self) -> Mapping[str, str]:
        stacks = {f"feed_forward.experts.{ours}": self.expert.format(theirs) for ours, theirs in self.parts.items()}
        return {**super().block_names, "feed_forward.router": self.router, **stacks}

    @property
    def size_names(self) -> Mapping[str, str]:
        plain = {theirs: ours for theirs, ours in SIZES.items() if ours != "hidden_dim"}
        return {**plain, "num_experts_per_tok": "experts_per_token", **self.sizes}

    def to_config(self, args: Any, dtype: str, bos_id: int | None, eos_id: int) -> dict[str, Any]:
        assert isinstance(args, ExpertArgs)
        if args.balance == "bias":
            raise Refusal(
                f'model.balance = "bias" has trained a bias for each expert, for which Hugging Face\'s {self.name} has '
                'no place, and without which other experts would be chosen; train with model.balance = "loss"'
            )
        return {
            # Of layers without experts, which these models do not have.
            "intermediate_size": args.hidden_dim * args.experts_per_token,
            **super().to_config(args, dtype, bos_id, eos_id),
            "router_aux_loss_coef": args.balance_rate if args.balance == "loss" else 0.0,
            "output_router_logits": False,
        }

    def from_config(self, config: dict[str, Any]) -> Any:
        """The shape that config.json describes. transformers 5 writes num_local_experts for any family."""
        if "num_experts" in self.sizes and "num_local_experts" in config:
            config = {"num_experts": config["num_local_experts"]} | config
        coefficient = config.get("router_aux_loss_coef", 0.001)
        balance = {"balance_rate": float(coefficient)} if coefficient else {"balance": "none"}
        return replace(super().from_config(config), **balance)
