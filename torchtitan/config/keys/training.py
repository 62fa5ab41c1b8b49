"""Keys of the training: its data, batch and precision, its optimizer and learning rate, and its validation."""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan.config.section import (
    AllOrCount,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class Optimizer(Section):
    """AdamW or Muon, and their hyperparameters."""

    name: Literal["AdamW", "Muon"] = "AdamW"
    """`AdamW` updates all parameters. `Muon` (not in torchtitan) updates the matrices within blocks, with momentum
    0.95, and AdamW the rest, with the values below."""

    lr: PositiveFloat = 8e-4
    """Peak learning rate, reached at the end of the warmup."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay rate for the running mean of the gradient."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay rate for the running mean of the squared gradient."""

    eps: PositiveFloat = 1e-8
    """AdamW adds this number to the denominator of its update."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay: each step multiplies a parameter by 1 minus this number times the learning rate."""

    weight_decay_norms_and_biases: bool = True
    """Applies weight decay to one-dimensional parameters too, as torchtitan does. Set it to false to leave out norms
    and biases. Not in torchtitan."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How torch runs the update. `fused` is the fastest, and the only one that can leave out an update on the
    device."""

    early_step_in_backward: bool = False
    """Updates each parameter during backward and frees its gradient at once (with replicas: after backward), to save
    memory. Gradients can then be neither clipped nor accumulated."""

    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's two moments. `bfloat16` halves their memory, rounds stochastically, and needs
    `implementation = "fused"`. `float32` keeps them in the type that `training.dtype` names. Not in torchtitan."""

    average_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keeps a moving average of the weights, such as 0.999: this part of the average so far, and the rest of the new
    weights. Validation, samples, generate, eval and exports use the average. Not in torchtitan."""

    @property
    def leaves_out_updates(self) -> bool:
        """Whether the device skips, without the host, an update whose gradient norm is not finite."""
        return self.implementation == "fused" and self.name != "Muon" and not self.early_step_in_backward


class LRScheduler(Section):
    """The learning rate over the steps: linear warmup, plateau, decay (arXiv:2404.06395)."""

    warmup_steps: NonNegativeInt = 200
    """Number of steps in which the learning rate rises linearly from zero to its peak."""

    total_steps: PositiveInt | None = None
    """Length of the schedule in steps. None: the file's `training.steps`, also if the command line trains fewer. With a
    larger number the run ends before the schedule does."""

    decay_ratio: Fraction | None = None
    """Share of the schedule that the decay at its end takes. None: the decay starts where the warmup ends."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Fraction = 0.0
    """The learning rate decays to this share of its peak."""


class Documents(Section):
    """Which documents are read."""

    dataset_path: Annotated[str, Field(min_length=1)] | None = None
    """Local data: JSONL, Parquet or text files (a file, a folder or a glob), prepared tokens, or a saved Hugging Face
    dataset."""

    text_key: str = "text"
    """Field or column that holds the text of a document. Several become one text by a template, in which each name
    stands in braces: "{question} {answer}". Not in torchtitan."""

    chat: Annotated[str, Field(pattern=r"^\w+(,\w+)*$")] | None = None
    """Rows are conversations (docs/recipe/fine-tuning.md), and the model learns `all` that the assistant says, its
    `last` message, or the messages of the roles that are named: "assistant,tool". Not in torchtitan."""


class DataSource(Documents):
    """One source of a mix, a `[[training.sources]]` table. Not in torchtitan."""

    dataset: str
    """The same as `training.dataset`, for this source."""

    weight: PositiveFloat = 1.0
    """Share of the tokens that come from this source, relative to the other weights."""

    epochs: AllOrCount | None = None
    """The same as `training.epochs`, for this source. None: the value of `training.epochs`."""


class Training(Documents):
    """Data, batch, length and precision of the training."""

    dataset: str = "c4_test"
    """A name that the recipe knows (pydocs, c4, ...) or a Hugging Face dataset `owner/name`. If `dataset_path` is set,
    this key is only a label."""

    sources: list[DataSource] = []
    """Mixes several sources by weight, instead of `dataset` and `dataset_path`: one `[[training.sources]]` table each,
    in the TOML file only. Not in torchtitan."""

    epochs: AllOrCount = 1
    """How many times the data may be read, in a new order each time; the run ends when the data ends. -1 repeats the
    data without end, as torchtitan does. Not in torchtitan."""

    preference_beta: PositiveFloat | None = None
    """Learns from pairs to prefer the chosen conversation (DPO, arXiv:2305.18290): how strongly it is held to the model
    that it began with, as 0.1. Not in torchtitan."""

    shuffle: bool = True
    """Reads the documents in an order drawn from `debug.seed`, a new one in each epoch. false reads them in the order
    of the file. Not in torchtitan."""

    num_streams: AllOrCount = -1
    """Number of independent streams of documents that fill the batch, a multiple of the data-parallel degree. -1: one
    for each sequence of the global batch. Use fewer if there are few documents. Not in torchtitan."""

    local_batch_size: PositiveInt = 8
    """Number of sequences that a device takes through the model at once. Lower it if memory runs out."""

    global_batch_size: AllOrCount = -1
    """Number of sequences in one optimizer step. -1: `local_batch_size` times the data-parallel degree. A larger number
    accumulates gradients over several local batches."""

    seq_len: PositiveInt = 2048
    """Number of tokens in a sequence."""

    train_only: list[str] = []
    """Names of the only weights, or modules, that are trained, with `*`: ["layers.30.*", "output"]. All others are
    frozen. []: none is. Not in torchtitan."""

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Scales gradients down if their global norm is larger than this number. `inf` switches clipping off."""

    steps: PositiveInt = 10000
    """Number of optimizer steps to train."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of parameters, gradients and optimizer states. `bfloat16` halves their memory and keeps no float32 copy of
    the weights."""

    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type that the parameters are cast to for forward and backward, on one device too. Use `float32` on a CPU that is
    slow in bfloat16. `float16` is for a GPU without bfloat16 (V100, T4): the loss is scaled, and an update whose
    gradients overflow is left out."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are summed over ranks."""

    enable_cpu_offload: bool = False
    """Keeps parameters, gradients and optimizer states in host memory and updates them on the CPU. Use it if a model
    does not fit the GPUs."""

    gc_freq: PositiveInt = 50
    """Number of steps between Python's garbage collections, which do not run at any other time, so that no rank pauses
    while the others wait."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens when the loss or the gradient norm is not finite: `stop` ends the run; `skip` leaves out the update
    if the norm is not finite, and ends the run if only the loss is not. Not in torchtitan."""

    max_consecutive_skips: PositiveInt = 10
    """With `on_nonfinite = "skip"`, more updates left out in a row than this number end the run. Not in torchtitan."""


class Validation(Documents):
    """Loss on held-out data, measured at an interval."""

    enable: bool = False
    """Validates every `freq` steps and at the end of the run."""

    dataset: str = "c4_validation"
    """The same as `training.dataset`, for the held-out data."""

    local_batch_size: PositiveInt | None = None
    """Number of sequences that a device takes through the model at once; None: as many as in training. All devices
    together validate batches as large as the training's global batch. torchtitan's default is 8."""

    seq_len: PositiveInt = 2048
    """Number of tokens in a validation sequence."""

    freq: PositiveInt = 10
    """Number of steps from one validation to the next."""

    steps: AllOrCount = -1
    """Number of batches in one validation. -1: all the data; ignored tokens fill the last batch."""

    tasks: list[str] = []
    """Tasks of lm-evaluation-harness that the model answers at each validation, by name or as a YAML file, as
    `["arc_easy"]`. With `chat` they are asked by the chat template. This needs `pip install lm-eval`. Not in
    torchtitan."""

    tasks_limit: PositiveInt | None = None
    """Number of documents of each task; None: all. Fewer make a curve, not a score to report. Not in torchtitan."""

    patience: PositiveInt | None = None
    """Ends the run when so many validations in a row were not better than the best before, by what
    `checkpoint.keep_best` names, or by the loss."""
