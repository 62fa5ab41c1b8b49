"""A model in one line, so that a tool's user sees at once whether it reads the wrong folder or file. No torch."""

from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint


def describe_configured(blueprint: Blueprint, config: Config) -> str:
    return describe_model(blueprint, config.training.mixed_precision_param, config.training.seq_len)


def describe_model(blueprint: Blueprint, dtype: str, length: int | None = None) -> str:
    shape = blueprint.shape
    if not blueprint.reads_text:
        return f"{blueprint.name}, a model of your own, {dtype}"
    size = f"{blueprint.num_parameters:,} parameters in " if shape.vocab_size else ""
    context = f"up to {shape.max_seq_len:,} tokens" if length is None else f"{length:,} of {shape.max_seq_len:,} tokens"
    return f"{blueprint.name}, {size}{shape.n_layers} layers of {shape.dim:,}, {dtype}, context {context}"
