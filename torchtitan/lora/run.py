"""A run that trains a part of a family's model: an adapter beside frozen weights, or some weights alone."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from torchtitan.lora.adapter import Adapter, AdapterParts
from torchtitan.lora.layers import attach, initialize
from torchtitan.lora.names import is_adapter
from torchtitan.lora.work import describe_part, flops_per_token
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.model import draw_weights, give_memory
from torchtitan.training.run import Run


@dataclass(frozen=True)
class PartRun(Run):
    """What differs from a run that trains all weights."""

    def prepared(self) -> Run:
        """Whoever builds the model gets one with adapters, or with frozen weights."""
        family, blocks = self.blueprint.spec, self.blueprint.layers

        def build(shape: object) -> nn.Module:
            model = family.build(shape)
            attach(model, self.config, blocks)
            return model

        def draw(name: str, weight: torch.Tensor, shape: object, generator: torch.Generator) -> None:
            if is_adapter(name):
                initialize(name, weight, generator)
            else:
                family.initialize(name, weight, shape, generator)

        spec = replace(family, build=build, initialize=draw)
        return replace(self, blueprint=replace(self.blueprint, spec=spec))

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.blueprint, self.config)

    def describe_model(self) -> str:
        parameters = f"{self.blueprint.num_parameters:,} parameters"
        return super().describe_model().replace(parameters, parameters + describe_part(self.blueprint, self.config))

    def lay_out_model(self) -> ModelParts:
        model = super().lay_out_model()
        if self.config.lora.rank is None:
            return model
        adapter = Adapter(self.config.lora)
        model = AdapterParts(**vars(model) | {"adapter": adapter})
        adapter.load_base = partial(self.load_weights, model)
        return model

    def build_model(self, seed: int) -> ModelParts:
        model = self.lay_out_model()
        give_memory(model, self.config, self.device)
        drawn = dict(model.named_parameters())
        if model.adapter is not None:  # the base is loaded
            drawn = {name: parameter for name, parameter in drawn.items() if is_adapter(name)}
        draw_weights(drawn, self.blueprint, self.mesh, self.device, seed)
        return model

    def load_weights(self, model: ModelParts) -> None:
        if model.adapter is None:
            super().load_weights(model)
            return
        from torchtitan.weights.base import find_base
        from torchtitan.weights.peft import start_on
        from torchtitan.weights.stored import check_shape, load_weights, open_model

        # The newest checkpoint is looked for once: a run that still trains may save another meanwhile.
        base = find_base(self.config.checkpoint.initial_load_path or self.config.model.hf_assets_path)
        source = open_model(base.where, self.config.model.name)
        check_shape(source, self.blueprint)
        load_weights(source, model)
        naming = self.blueprint.spec.hugging_face
        start_on(model, base, naming().to_name if naming else None)
