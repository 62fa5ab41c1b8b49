"""A model in one line, so that a tool's user sees at once whether it reads the wrong folder or file. No torch."""

from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint


def describe_configured(blueprint: Blueprint, config: Config) -> str:
    return describe_model(blueprint, config.training.mixed_precision_param, config.training.seq_len)


def describe_model(blueprint: Blueprint, dtype: str, length: int | None = None) -> str:
    shape = blueprint.shape
    if not blueprint.reads_text:
        return f"{blueprint.name}, a model of your own, {dtype}"
    size = f"{describe_size(blueprint)} in " if shape.vocab_size else ""
    context = f"up to {shape.max_seq_len:,} tokens" if length is None else f"{length:,} of {shape.max_seq_len:,} tokens"
    return f"{blueprint.name}, {size}{shape.n_layers} layers of {shape.dim:,}, {dtype}, context {context}"


def describe_size(blueprint: Blueprint) -> str:
    unused = sum(part.unused for part in blueprint.parts()) if blueprint.num_experts else 0
    of_token = f", of which a token uses {blueprint.num_parameters - unused:,}" if unused else ""
    return f"{blueprint.num_parameters:,} parameters{of_token}"
