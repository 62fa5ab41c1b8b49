"""Every key a run understands, one frozen model per TOML section; torch is never imported here.

Names and defaults are torchtitan v0.2.2's wherever it has the key. A key that is ours says so in its doc.
What torchtitan has and this version does not is listed in `not_yet.py`, and refused there.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("zero", "0 would do nothing; use 1 or more, or -1 (see --help)")
    return value


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(gt=0, le=10**8)]  # three years: torch cannot wait for ever
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AllOrCount = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # -1 means "as many as fit"


class Section(BaseModel):
    """What all sections share: unknown keys and silent conversions are refused, and values never change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )


class Job(Section):
    """The run itself: where its configuration comes from and where its files go."""

    config_file: str | None = None
    """TOML file to read; keys it does not set keep their defaults, and the command line overrides it."""

    dump_folder: Annotated[str, Field(min_length=1)] = "./outputs"
    """The run folder: config.toml, metrics.jsonl, tb/ and traces are written here."""

    description: str = "default job"
    """One line about this run, for whoever reads its log later."""

    print_config: bool = False
    """Print the resolved configuration at start."""


class Profiling(Section):
    """torch profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write a torch profiler trace (Chrome/Perfetto format) every `profile_freq` steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for the traces, inside the run folder."""

    profile_freq: PositiveInt = 10
    """Steps from one trace to the next; each trace covers the last `profiler_active` of them."""

    profiler_active: PositiveInt = 1
    """Steps each trace records."""

    profiler_warmup: NonNegativeInt = 3
    """Steps the profiler warms up, unrecorded, before each trace."""

    enable_memory_snapshot: bool = False
    """Write a CUDA memory snapshot every `profile_freq` steps and when memory runs out (GPUs only)."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for the memory snapshots, inside the run folder."""


class Metrics(Section):
    """What is measured and where it goes; metrics.jsonl is always written."""

    log_freq: PositiveInt = 10
    """Steps from a logged line to the next, averaged over; between, only saves and validations wait for the device."""

    enable_tensorboard: bool = False
    """Write the numbers for TensorBoard, too."""

    disable_color_printing: bool = False
    """Print the console lines without colour."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard's files, inside the run folder."""

    enable_wandb: bool = False
    """Send the numbers to Weights & Biases, too (pip install wandb; WANDB_* variables apply)."""


class RopeScaling(Section):
    """Llama 3.1's stretching of the low rotation frequencies, for contexts longer than the first training's."""

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: PositiveInt = 8192


class Model(Section):
    """Which model to train."""

    name: str = "llama3"
    """Model family: llama3 or llama2."""

    flavor: str = "debugmodel"
    """Size within the family, for example 8B."""

    hf_assets_path: str = "./tests/assets/tokenizer"
    """Folder or file of the tokenizer: Hugging Face tokenizer.json, or a tiktoken or SentencePiece tokenizer.model."""

    vocab_size: PositiveInt | None = None
    """Rows of the embedding (ours). None: the flavor's, and the tokenizer's size where the flavor fixes none."""

    attn_mask_type: Literal["causal", "block_causal"] = "causal"
    """What a token may attend to: all before it in the sequence, or only what belongs to its own document (ours)."""

    dim: PositiveInt | None = None
    n_layers: PositiveInt | None = None
    n_heads: PositiveInt | None = None
    n_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_dim: PositiveInt | None = None
    norm_eps: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = None
    tied_embeddings: bool | None = None
    max_seq_len: PositiveInt | None = None
    rope_scaling: RopeScaling | None = None

    converters: list[Literal["quantize.linear.float8"]] = []
    """Sections that change the model's layers; none: the plain model."""


class Optimizer(Section):
    """AdamW or Muon and their hyperparameters."""

    name: Literal["AdamW", "Muon"] = "AdamW"
    """Muon (ours) is for the matrices within blocks, with momentum 0.95; AdamW for the rest, with the betas below."""

    lr: PositiveFloat = 8e-4
    """Peak learning rate."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the mean of the gradient."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the mean of the squared gradient."""

    eps: PositiveFloat = 1e-8
    """Added to the square root in the denominator."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""

    weight_decay_norms_and_biases: bool = True
    """Apply weight decay to one-dimensional parameters as well, as torchtitan does; false keeps it off them (ours)."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How torch runs the update; fused is the fastest and the only one that can skip an update on the device."""

    early_step_in_backward: bool = False
    """Update each parameter in backward and free its gradient (replicas: after it); no clipping, no accumulation."""

    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """AdamW's; bfloat16: rounded at random, needs `implementation = "fused"`; float32: as `training.dtype` (ours)."""

    @property
    def leaves_out_updates(self) -> bool:
        """Whether an update whose gradient norm is not finite changes nothing, decided on the device."""
        return self.implementation == "fused" and self.name != "Muon" and not self.early_step_in_backward


class LRScheduler(Section):
    """Warmup, stable, decay (arXiv:2404.06395)."""

    warmup_steps: NonNegativeInt = 200
    """Steps of linear warmup from zero."""

    total_steps: PositiveInt | None = None
    """Length of the schedule; None: `training.steps`. If longer, the run ends part of the way along the curve."""

    decay_ratio: Fraction | None = None
    """Share of the steps spent on the decay at the end; None: decay starts where warmup ends."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Fraction = 0.0
    """The rate decays to this share of its peak."""


class DataSource(Section):
    """One of several sources of a mix: a `[[training.sources]]` table (ours)."""

    dataset: str
    """As `training.dataset`."""

    dataset_path: Annotated[str, Field(min_length=1)] | None = None
    """As `training.dataset_path`."""

    text_key: str = "text"
    """As `training.text_key`."""

    weight: PositiveFloat = 1.0
    """Share of the tokens that come from here, relative to the other weights."""

    epochs: AllOrCount | None = None
    """As `training.epochs`, for this source; None: that value."""


class Training(Section):
    """Data, batch, length and precision of the training."""

    dataset: str = "c4_test"
    """A name known here (pydocs, c4, ...), a Hugging Face dataset `owner/name`, or a label for `dataset_path`."""

    dataset_path: Annotated[str, Field(min_length=1)] | None = None
    """Local data: JSONL, Parquet or text (a file, folder or glob), prepared tokens, a saved Hugging Face dataset."""

    text_key: str = "text"
    """Field or column that holds the text (ours)."""

    sources: list[DataSource] = []
    """Several sources mixed by weight, instead of `dataset` and `dataset_path`; in the TOML file only (ours)."""

    epochs: AllOrCount = 1
    """Times the data may be read, reshuffled each time; -1: as often as needed, as torchtitan does (ours)."""

    shuffle: bool = True
    """Read the documents in an order drawn from `debug.seed`, a new one each epoch; false: in file order (ours)."""

    num_streams: AllOrCount = -1
    """Independent streams that fill the batch; the data-parallel degree must divide it. -1: one per sequence (ours)."""

    local_batch_size: PositiveInt = 8
    """Sequences a device takes through the model at once."""

    global_batch_size: AllOrCount = -1
    """Sequences in one optimizer step, accumulated where needed; -1: `local_batch_size` x data-parallel degree."""

    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm; inf: they are not."""

    steps: PositiveInt = 10000
    """Optimizer steps to train."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of parameters, gradients and optimizer states. bfloat16 keeps no float32 copy of the weights."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type the parameters are cast to for forward and backward, by FSDP, on one device too."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type gradients are reduced in."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory; the update runs on the CPU."""

    gc_freq: PositiveInt = 50
    """Steps between Python garbage collections, which are held off otherwise."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If loss or norm is not finite: stop the run; skip: leave out an update whose norm is not, else stop (ours)."""

    max_consecutive_skips: PositiveInt = 10
    """With `on_nonfinite = "skip"`: more left-out updates in a row than this stop the run all the same (ours)."""


class Parallelism(Section):
    """How the run is laid out over devices."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the model; more than 1 with a shard degree is HSDP, with shard degree 1 plain data parallelism."""

    data_parallel_shard_degree: AllOrCount = -1
    """Devices each copy is sharded over (FSDP2); -1: all that the other degrees leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after forward; default: all but the last; one rank: the embedding; pipelines: none."""

    tensor_parallel_degree: PositiveInt = 1
    """Devices each matrix is split over, with activations between blocks split along the sequence; 1: none."""

    disable_loss_parallel: bool = False
    """With tensor parallelism, gather the logits of all the vocabulary before the loss."""

    enable_async_tensor_parallel: bool = False
    """Let the compiler overlap tensor parallelism's communication with matrix products (GPUs only)."""

    context_parallel_degree: PositiveInt = 1
    """Devices each sequence is split over; 1: none."""

    pipeline_parallel_degree: PositiveInt = 1
    """Groups of devices the layers are divided among; 1: none."""

    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order in which a device works on its stages and microbatches; the first two have one stage a device."""

    pipeline_parallel_schedule_csv: str = ""
    """File with a schedule of one's own instead: a row for each rank, actions as 0F1 (stage, what, microbatch)."""

    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences that go through the pipeline together; `local_batch_size` is divided into such microbatches."""

    pipeline_parallel_layer_counts: list[NonNegativeInt] | None = None
    """Layers of each stage, from first to last, as [3, 1, 2, 2]; None: see below (ours)."""

    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers of a stage, which fixes how many stages; None: one stage a device, two where the schedule loops."""

    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """Layers that the embedding counts for. None here and below: stages balanced by FLOPs (torchtitan: 1)."""

    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Layers that norm and output count for."""

    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage: tok_embeddings, layers.0, ..., norm, output; in the TOML file only."""


class Checkpoint(Section):
    """Saving the run, going on with it, and beginning from another's weights."""

    enable: bool = False
    """Save checkpoints into the run folder, and go on from the newest complete one when the same command is given."""

    folder: Annotated[str, Field(min_length=1)] = "checkpoint"
    """Where: a name inside the run folder, or a URL that fsspec knows, as s3://bucket/run."""

    interval: PositiveInt = 500
    """Steps from one save to the next."""

    interval_minutes: PositiveFloat | None = None
    """Also save when the last save began so many minutes ago (ours)."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Copy to host memory and write behind the training, pinned memory copying faster; disabled: training waits."""

    keep_latest_k: NonNegativeInt = 10
    """Complete checkpoints that are kept; 0: all."""

    load_step: Annotated[int, Field(ge=-1)] = -1
    """Step to go on from; -1: the newest complete. What was saved and recorded after it is kept aside."""

    initial_load_path: str | None = None
    """Checkpoint (a folder step-N, or one of which the newest is taken) to begin from while the run has none itself."""

    initial_load_model_only: bool = True
    """Take only the weights from `initial_load_path`, and begin at step 0."""

    initial_load_in_hf: bool = False
    """`initial_load_path` is a folder of Hugging Face safetensors; without a path, `model.hf_assets_path` is."""

    exclude_from_loading: list[Literal["optimizer", "dataloader", "train_state"]] = []
    """What is not taken from a checkpoint but begins anew; train_state only with `initial_load_path`."""

    load_only: bool = False
    """Save nothing; a run that goes on so has its records in load_only/N of the run folder."""

    enable_first_step_checkpoint: bool = False
    """Save after the first step too, to see early whether it can be done."""

    create_seed_checkpoint: bool = False
    """Save the initial weights as step 0 and end."""

    last_save_model_only: bool = False
    """Save only the weights after the last step: small, but the run cannot go on (torchtitan: true)."""

    last_save_in_hf: bool = False
    """With `last_save_model_only`: write those weights as safetensors, too, in the folder hf; not with `load_only`."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights that are saved alone."""

    on_failure: Literal["continue", "stop"] = "continue"
    """When a save fails: train on and save at the next interval, or end the run (ours)."""


class ActivationCheckpoint(Section):
    """Recompute activations in backward instead of keeping them."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """What is recomputed; full: every block; selective: as the next key says; memory_budget: the compiler's choice."""

    selective_ac_option: str = "2"
    """A number n: every n-th block; "op": in each, all but attention, reduce-scatters and every second product."""

    early_stop: bool = False
    """End a block's recomputation as soon as all that backward needs is there."""

    memory_budget: Fraction = 0.5
    """Activation memory the compiler may use: 0 as with full recompute, 1 as without any. Needs `compile.enable`."""

    preserve_rng_state: bool = True
    """Recompute with the random state of the first pass."""

    determinism_check: Literal["default", "none"] = "default"
    """Check shapes and types of recomputed tensors against the first pass."""

    @property
    def by_operation(self) -> bool:
        """Whether it is the cheap operations of each block that are recomputed, not whole blocks."""
        return self.mode == "selective" and self.selective_ac_option == "op"


class Compile(Section):
    """torch.compile."""

    enable: bool = False
    """Compile the components below."""

    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """What to compile: each transformer block, the loss."""

    backend: str = "inductor"
    """torch.compile backend."""

    @property
    def model(self) -> bool:
        """Whether the transformer blocks are compiled."""
        return self.enable and "model" in self.components


class Float8(Section):
    """Linear layers computed in float8 by torchao, if `model.converters` names this section."""

    enable_fsdp_float8_all_gather: bool = False
    """Cast weights to float8 before FSDP gathers them; scaled by tensor only."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """With that, compute the scales of all weights at once after the update, instead of each before its gather."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """One scale a tensor (None: this), one a row, or one a row with the weights' gradients in high precision."""

    filter_fqns: list[str] = []
    """Layers left as they are: whose name contains one of these; "auto_filter_small_kn": those too small to gain."""

    emulate: bool = False
    """Compute as if in float8, on any device and slowly: for tests. Not together with a compiled model."""


class QuantizeLinear(Section):
    """Ways to compute linear layers in low precision."""

    float8: Float8 = Float8()


class Quantize(Section):
    """Low precision."""

    linear: QuantizeLinear = QuantizeLinear()


class Comm(Section):
    """Process groups."""

    mode: Literal["default", "fake_backend"] = "default"
    """fake_backend: no training but a dry run of WORLD_SIZE ranks in one process: memory and traffic of each stage."""

    init_timeout_seconds: Seconds = 300
    """Longest wait for a collective during start and the first step."""

    train_timeout_seconds: Seconds = 100
    """Longest wait for a collective after the first step."""

    trace_buf_size: Annotated[int, Field(ge=0)] = 20000
    """Last collectives of each rank that NCCL writes down when one times out; 0: none. Nothing on a CPU."""

    save_traces_folder: str = "comm_traces"
    """Where, inside the run folder."""

    save_traces_file_prefix: Annotated[str, Field(pattern="^[^/]*$")] = "rank_"
    """Begin of the files' names; the rank follows."""


class Validation(Section):
    """Loss on held-out data, at an interval."""

    enable: bool = False
    """Validate every `freq` steps and at the end."""

    dataset: str = "c4_validation"
    """As `training.dataset`."""

    dataset_path: Annotated[str, Field(min_length=1)] | None = None
    """As `training.dataset_path`."""

    text_key: str = "text"
    """As `training.text_key` (ours)."""

    local_batch_size: PositiveInt = 8
    """Sequences a device takes at once; the validation batch is as large as the training's global batch."""

    seq_len: PositiveInt = 2048
    """Tokens in a validation sequence."""

    freq: PositiveInt = 10
    """Steps from one validation to the next."""

    steps: AllOrCount = -1
    """Batches of one validation; -1: all the data, the last batch filled up with ignored tokens."""


class Debug(Section):
    """Seeds and determinism."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of initial weights and data order; None draws one, logs it and writes it to the run folder's config.toml."""

    deterministic: bool = False
    """Only deterministic kernels: twice the same run is then the same to the bit; slower on GPUs."""

    deterministic_warn_only: bool = False
    """Warn about an operation without a deterministic kernel instead of stopping."""


class Config(Section):
    """A run, complete: what `train.py` is a pure function of, together with the data."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()

    @property
    def float8(self) -> Float8 | None:
        """How to compute in float8, where `model.converters` asks for it."""
        return self.quantize.linear.float8 if "quantize.linear.float8" in self.model.converters else None
