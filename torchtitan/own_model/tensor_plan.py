"""The plan of tensor parallelism that a model of transformers brings in its configuration."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.refusal import Refusal

_STYLES: Mapping[str, tuple[type[ParallelStyle], dict[str, Any]]] = {  # transformers' word for each of torch's styles
    "colwise": (ColwiseParallel, {}),
    "colwise_rep": (ColwiseParallel, {"output_layouts": Replicate()}),  # in transformers 4
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise": (RowwiseParallel, {}),
    "replicated_with_grad_allreduce": (
        SequenceParallel,
        {"sequence_dim": 2, "use_local_output": True},
    ),  # a norm that sees this rank's heads
}


def words_of(model: nn.Module, shared: tuple[tuple[str, ...], ...], degree: int, name: str) -> dict[str, str]:
    """The style of each module, in transformers' words; refused if there is none, or one that torch has not."""
    config: Any = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    words = {f"{prefix}{key}": word for key, word in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    if not words:
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {degree}, but {name} has no tensor_plan that says how ranks share "
            "its weights; use 1, or give its ModelSpec a plan for some of these modules: "
            f"{', '.join(_could_be_shared(model)) or 'none could be shared'}"
        )
    words |= {key: word for key, word in (getattr(type(model), "_tp_plan", None) or {}).items() if "." not in key}
    if foreign := sorted(set(words.values()) - set(_STYLES)):
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {degree}: the plan in {name}'s configuration says "
            f"{', '.join(foreign)}, which are no styles of torch; use 1, or give its ModelSpec a tensor_plan"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None) or degree) % degree:
            raise Refusal(f"parallelism.tensor_parallel_degree = {degree} does not divide {name}'s {key} = {heads}")
    several = {other.rpartition(".")[0] for names in shared for other in names}  # a tied weight stays whole
    return {key: word for key, word in words.items() if key not in several}


def styles_of(words: Mapping[str, str]) -> dict[str, ParallelStyle]:
    return {key: kind(**options) for key, word in words.items() for kind, options in [_STYLES[word]]}


def _could_be_shared(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
