"""A run on pairs. The reference is the base of the run's adapter, or without one a second, frozen model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchtitan.lora.layers import LoraLinear
from torchtitan.lora.run import PartRun
from torchtitan.parallel.parts import ModelParts
from torchtitan.preference.step import Logits, PreferenceStep
from torchtitan.refusal import Refusal
from torchtitan.training.model import give_memory, lay_out_model
from torchtitan.training.run import Run
from torchtitan.weights.base import find_base
from torchtitan.weights.stored import check_shape, load_weights, open_model


@dataclass(frozen=True)
class PreferenceRun(PartRun):
    """What differs from a run that learns texts."""

    def prepared(self) -> Run:
        return super().prepared() if self.config.trains_a_part else self

    @property
    def flops_per_token(self) -> int:
        """With the reference's forward."""
        whole = self.blueprint.flops_per_token(self.config.training.seq_len)
        return (super().flops_per_token if self.config.trains_a_part else whole) + whole // 3

    def describe_model(self) -> str:
        part = super().describe_model() if self.config.trains_a_part else Run.describe_model(self)
        return f"{part}, on pairs beside a reference (DPO, beta {self.config.training.preference_beta:g})"

    def build_model(self, seed: int) -> ModelParts:
        model = super().build_model(seed) if self.config.trains_a_part else Run.build_model(self, seed)
        return model if model.adapter is not None else replace(model, reference=self._open_reference())

    def _open_reference(self) -> "Reference":
        base = find_base(self.config.checkpoint.initial_load_path or self.config.model.hf_assets_path)
        source = open_model(base.where, self.config.model.name)
        check_shape(source, self.blueprint)
        model = lay_out_model(self.config, self.blueprint, self.mesh)
        give_memory(model, self.config, self.device)
        load_weights(source, model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return Reference(base.where, base.fingerprint(shared=True), model.stages[0])

    def build_forward_backward(self, parts: ModelParts) -> PreferenceStep:
        config = self.config
        beta = config.training.preference_beta
        assert beta is not None
        reference = parts.reference.logits if parts.reference is not None else _without_adapter(parts)
        # It has a loss of its own.
        return PreferenceStep(beta, reference, parts, None, self.mesh, config.training, config.parallelism, self.device)


@dataclass(frozen=True)
class Reference:
    """The model that the run began with, also if it goes on."""

    where: str
    hash: str
    logits: Logits

    def state(self) -> dict[str, str]:
        return {"where": self.where, "hash": self.hash}

    def check(self, state: Mapping[str, str]) -> None:
        if state["hash"] != self.hash:
            raise Refusal(
                f"this run's reference was {state['where']} (SHA-256 {state['hash'][:12]}), and {self.where} holds "
                f"other weights ({self.hash[:12]}); put the former back, or start another run, in another "
                "job.dump_folder"
            )


def _without_adapter(parts: ModelParts) -> Logits:
    model = parts.stages[0]
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert layers, "a run on pairs has a reference or an adapter"

    @contextmanager
    def switched_off() -> Iterator[None]:
        kept = [layer.scaling for layer in layers]
        try:
            for layer in layers:
                layer.scaling = 0.0
            yield
        finally:
            for layer, scaling in zip(layers, kept, strict=True):
                layer.scaling = scaling

    def logits(*args: Any, **kwargs: Any) -> Tensor:
        with switched_off():
            found: Tensor = model(*args, **kwargs)
            return found

    return logits
