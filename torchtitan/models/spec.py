"""All that the recipe knows of a family of models, and of one model. Importing this file imports no torch.

A family is one `Family` (docs/recipe/models.md), a model of your own one `ModelSpec` (docs/recipe/any-model.md). Their
functions import torch when they are called, so that a launcher or a planner reads shapes in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchtitan.config.schema import Config, Optimizer
from torchtitan.refusal import Refusal

IGNORED = -100  # label of a position that adds nothing to the loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel.style import ParallelStyle


@dataclass(frozen=True)
class Part:
    """A module that stays in one piece: a pipeline cuts between parts, FSDP gathers a part at a time."""

    name: str  # in the model, as `layers.3`
    parameters: int
    flops: int  # model FLOPs of forward and backward of one token
    kind: Literal["lookup", "layer", "other"] = "other"  # backward of a lookup needs no weights
    tied: int = 0  # how many of these parameters an earlier part has counted already
    unused: int = 0  # how many of them a token passes by: those of other experts


@dataclass(frozen=True)
class HuggingFace:
    """The same model in Hugging Face's files."""

    model_type: str  # in config.json
    to_name: Callable[[str], str]  # a parameter's name -> its name in safetensors
    to_config: Callable[[Any, str, int | None, int], dict[str, Any]]  # shape, dtype, bos id, eos id -> config.json
    from_config: Callable[[dict[str, Any]], Any]  # config.json -> shape; refuses what the model cannot be


@dataclass(frozen=True)
class OtherFormat:
    """Weights in a publisher's own files."""

    shape: Any
    outline: Mapping[str, Tensor]  # on the meta device, under the model's names
    read: Callable[[str], Tensor]  # one whole tensor


@dataclass(frozen=True)
class Family:
    """A family of models that read text. Its shape is a frozen dataclass whose fields are keys of [model]."""

    build: Callable[[Any], nn.Module]  # takes a shape, and builds the whole model on torch's current device
    shape: type[Any]
    parts: Callable[[Any, int], Sequence[Part]]  # of a shape, at a length of sequence; in the order of forward
    initialize: Callable[[str, Tensor, Any, torch.Generator], None]  # a whole parameter, by its name
    flavors: Mapping[str, Any] = field(default_factory=dict)
    # Styles of tensor parallelism by module, `layers.*.` for every layer: shape, split_sequence, loss_parallel.
    tensor_plan: Callable[[Any, bool, bool], Mapping[str, ParallelStyle]] | None = None
    tied: Callable[[Any], tuple[str, str] | None] = lambda shape: None  # names of one parameter; the first is saved
    operations: Callable[[Any, Any], Any] | None = None  # shape, models.operations.Share -> Work, for the planner
    takes_muon: Callable[[str], bool] = lambda name: False  # whether Muon updates this matrix, rather than AdamW
    refusals: Callable[[Any, Config], Iterator[str]] = lambda shape, config: iter(())  # what cannot be, and why
    hugging_face: Callable[[], HuggingFace] | None = None
    other_formats: Mapping[str, Callable[[Path], OtherFormat]] = field(default_factory=dict)  # by the marking file


@dataclass(frozen=True)
class ModelSpec:
    """A model of your own, with its data: the recipe derives the rest from the module and one sample.

    docs/recipe/any-model.md explains each field.
    """

    build: Callable[[], nn.Module]
    data: Any = None  # a torch Dataset of (inputs, target), or a function that returns one and may take `split`
    loss: Callable[[Any, Any], Any] | None = None  # output, target -> a mean over samples, or (sum, count)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)  # likewise, for validation
    metrics_of_all: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)  # of all outputs and targets
    step: Callable[[nn.Module, Any, Any], Any] | None = None  # model, inputs, target -> the loss, instead of `loss`
    local_loss: bool = False  # a loss or metric compares the samples of a batch, and may do so within each piece of it
    layers: str | None = None  # the name of the list of layers; without it, the module's children are cut between
    tensor_plan: Callable[[Any, bool, bool], Mapping[str, ParallelStyle]] | None = None  # see Family; shape is None
    collate: Callable[[Sequence[Any]], Any] | None = None  # samples -> (inputs, target) as batches, or with `labels`
    length: Callable[[Any], int] | None = None  # of a sample; batches then hold samples of like length
    # named parameters, section [optimizer] -> a torch.optim.Optimizer or a list; their groups may have rates
    optimizer: Callable[[Sequence[tuple[str, nn.Parameter]], Optimizer], Any] | None = None
    schedule: Callable[[int, int], float] | None = None  # a step, counted from 1, and how many -> the factor on rates
    data_workers: int = 0  # processes that read samples
    data_is_random: bool = False  # a sample draws random numbers, which are then seeded by epoch and number


@dataclass(frozen=True)
class Blueprint:
    """One model of a family, before it is built."""

    name: str
    spec: Family
    shape: Any
    reads_text: ClassVar[bool] = True  # false of a model of one's own (own.py)
    run: ClassVar[str] = "torchtitan.training.run:Run"  # the class that runs it, imported when it does

    def takes_muon(self, name: str) -> bool:
        return self.spec.takes_muon(name)

    @property
    def tied(self) -> tuple[str, str] | None:
        """The two names of a parameter that is both embedding and output."""
        return self.spec.tied(self.shape)

    def leading_name(self, name: str) -> str:
        """The name under which a parameter is initialised, saved and loaded; tied parameters share the first."""
        return self.tied[0] if self.tied and name == self.tied[1] else name

    def parts(self, seq_len: int = 1) -> Sequence[Part]:
        return self.spec.parts(self.shape, seq_len)

    @property
    def layers(self) -> list[str]:
        return [part.name for part in self.parts() if part.kind == "layer"]

    @property
    def num_experts(self) -> int:
        return getattr(self.shape, "num_experts", 0)  # of a layer

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a tied one counts once."""
        return sum(part.parameters - part.tied for part in self.parts())

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of forward and backward, counted as torchtitan and PaLM (arXiv:2204.02311, appendix B) do.

        6 per parameter of a matrix product (a lookup is none), and 12 * heads * head size * seq_len for each layer's
        attention, not halved for causality.
        """
        return sum(part.flops for part in self.parts(seq_len))

    def with_vocabulary(self, tokenizer_size: int) -> Blueprint:
        """The same model with a fixed vocabulary: the tokenizer's size, unless the flavor or [model] fixed it."""
        rows = self.shape.vocab_size or tokenizer_size
        if tokenizer_size > rows:
            raise Refusal(
                f"the tokenizer has {tokenizer_size} ids, but {self.name} has only {rows} rows in its embedding; set "
                f"model.vocab_size = {tokenizer_size} or more, or model.hf_assets_path to this model's tokenizer"
            )
        return replace(self, shape=replace(self.shape, vocab_size=rows))
