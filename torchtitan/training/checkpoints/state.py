"""The contents of a checkpoint: tensors under names that do not depend on the layout, and the place in the data."""

import json
from typing import Any

import torch
from torch import Tensor

from torchtitan.data.loader import Loader
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.optimizer import make_states
from torchtitan.training.optimizer.apply import plain

Tensors = dict[str, Tensor]


def model_tensors(model: ModelParts) -> Tensors:
    return {f"model.{name}": plain(parameter.detach()) for name, parameter in model.saved_parameters().items()}


def optimizer_tensors(model: ModelParts, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's states. Creates those of parameters that had no update yet."""
    named = model.saved_parameters()
    make_states(optimizer)
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def data_tensors(loader: Loader) -> Tensors:
    """The place of each of this rank's streams, as bytes of JSON. `data_header` has what all streams share."""
    texts = {f"data.{name}": json.dumps(state) for name, state in loader.state_dict()["streams"].items()}
    return {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in texts.items()}


def data_header(loader: Loader) -> dict[str, Any]:
    return {key: value for key, value in loader.state_dict().items() if key != "streams"}


def load_data(loader: Loader, header: dict[str, Any], streams: Tensors) -> None:
    states = {name.removeprefix("data."): json.loads(bytes(value.tolist())) for name, value in streams.items()}
    loader.load_state_dict(header | {"streams": states})
