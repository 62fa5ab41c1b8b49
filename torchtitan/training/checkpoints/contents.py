"""What a checkpoint holds, listed once: saving and loading walk the same list.

Tensors have names that do not depend on the layout.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchtitan.data.loader import Loader
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.optimizer import make_states, plain
from torchtitan.training.others import NoOthers

if TYPE_CHECKING:
    from torchtitan.training.checkpoints.best import Best
    from torchtitan.training.optimizer.average import Average

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Content:
    """A part of a run's state: tensors whose names begin with `name`, and plain data under `name` in the manifest."""

    name: str
    taken_with: Literal["weights", "optimizer", "data", "resume"]  # the field of `Start` that decides on loading it
    tensors: Callable[[], Tensors] = dict
    state: Callable[[], Any] = lambda: None  # None: the manifest has no entry
    load: Callable[[Any, Tensors], None] = lambda state, tensors: None  # the tensors are filled by then
    begin: Callable[[], None] = lambda: None  # instead of `load`, if the run starts without it
    varies: bool = False  # the tensors have other sizes in the checkpoint, and some may be missing there

    def room(self, shapes: dict[str, torch.Size]) -> Tensors:
        """The tensors that a checkpoint with these shapes is read into."""
        own = self.tensors()
        if not self.varies:
            return own
        return {name: torch.empty(shapes[name], dtype=own[name].dtype) for name in own if name in shapes}


def list_contents(
    model: ModelParts,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    best: "Best | None",
    average: "Average | None",
    others: NoOthers,
) -> list[Content]:
    """All that a run saves. The weights come first, because the average may begin with them."""

    def fill_copies(states: Any, *_: Any) -> None:
        for tie in model.ties:
            tie.copy_first(states)

    optimizer_tensors = partial(_optimizer_tensors, model, optimizer)
    data = partial(_data_tensors, loader), partial(_data_header, loader), partial(_load_data, loader)
    contents = [
        Content("model", "weights", partial(_model_tensors, model), load=partial(fill_copies, {})),
        Content("optimizer", "optimizer", optimizer_tensors, load=partial(fill_copies, optimizer.state)),
        Content("data", "data", *data, varies=True),
        Content("swarm", "resume", others.tensors, others.state, lambda state, _: others.load(state)),
    ]
    if average is not None:
        load = partial(fill_copies, average.states)
        contents.append(Content("average", "optimizer", average.tensors, load=load, begin=average.begin))
    if model.load is not None:
        contents.append(Content("experts", "optimizer", model.load.tensors))
    if (scale := model.loss_scale) is not None:
        contents.append(Content("loss_scale", "optimizer", state=scale.state, load=lambda state, _: scale.load(state)))
    if model.adapter is not None:
        contents.insert(1, Content("lora", "weights", **model.adapter.about(model, average)))
    if (beside := model.reference) is not None:
        contents.append(Content("reference", "resume", state=beside.state, load=lambda state, _: beside.check(state)))
    if best is not None:
        contents.append(Content("best", "resume", state=best.state, load=lambda state, _: best.load(state)))
    return contents


def weights_alone(contents: list[Content], dtype: torch.dtype) -> Tensors:
    """The weights as they are exported: their average, if the run keeps one, in this type."""
    by_name = {content.name: content for content in contents}
    tensors = by_name["model"].tensors()
    if "average" in by_name:
        averages = by_name["average"].tensors()
        tensors |= {f"model.{name.partition('.')[2]}": average for name, average in averages.items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _model_tensors(model: ModelParts) -> Tensors:
    return {f"model.{name}": plain(parameter.detach()) for name, parameter in model.saved_parameters().items()}


def _optimizer_tensors(model: ModelParts, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's states. Creates those of parameters that had no update yet."""
    named = model.saved_parameters()
    make_states(optimizer)
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _data_tensors(loader: Loader) -> Tensors:
    """The place of each of this rank's streams, as bytes of JSON. `_data_header` has what all streams share."""
    texts = {f"data.{name}": json.dumps(state) for name, state in loader.state_dict()["streams"].items()}
    return {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in texts.items()}


def _data_header(loader: Loader) -> dict[str, Any]:
    return {key: value for key, value in loader.state_dict().items() if key != "streams"}


def _load_data(loader: Loader, header: dict[str, Any], streams: Tensors) -> None:
    states = {name.removeprefix("data."): json.loads(bytes(value.tolist())) for name, value in streams.items()}
    loader.load_state_dict(header | {"streams": states})
