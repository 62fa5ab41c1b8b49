"""Keys of the layout: how a run is divided over devices."""

from typing import Literal

from torchtitan.config.section import AllOrCount, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Parallelism(Section):
    """How the run is divided over devices. The degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Number of copies of the model. With a shard degree above 1 several copies are HSDP, with a shard degree of 1
    plain data parallelism."""

    data_parallel_shard_degree: AllOrCount = -1
    """Number of devices that each copy is sharded over (FSDP2). -1: all devices that the other degrees leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Which gathered parameters are freed after forward: `always` all, `never` none. `default` frees all but the
    last unit's on several ranks, only the embedding on one rank, and none with a pipeline."""

    tensor_parallel_degree: PositiveInt = 1
    """Number of devices that each matrix is split over; activations between blocks are split along the sequence.
    1 splits nothing."""

    disable_loss_parallel: bool = False
    """With tensor parallelism, gathers the logits of the whole vocabulary before the loss, instead of computing the
    loss on split logits."""

    enable_async_tensor_parallel: bool = False
    """Lets the compiler overlap the communication of tensor parallelism with matrix products. It needs GPUs and
    `compile.enable`."""

    context_parallel_degree: PositiveInt = 1
    """Number of devices that each sequence is split over. 1 splits nothing."""

    expert_parallel_degree: PositiveInt = 1
    """Number of devices that the experts of a layer are divided over, among those that hold different tokens: shards,
    context and tensor parallelism. 1: all devices have all experts, sharded like other weights."""

    pipeline_parallel_degree: PositiveInt = 1
    """Number of groups of devices that the layers are divided among. 1 divides nothing."""

    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order in which a device works on its stages and microbatches. `1F1B` and `GPipe` have one stage a device, the
    other schedules two or more."""

    pipeline_parallel_schedule_csv: str = ""
    """File with a schedule of your own, which replaces the one above. It has a row for each rank, with actions such as
    0F1: stage 0, forward, microbatch 1."""

    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Number of sequences that go through the pipeline together. `local_batch_size` is divided into such
    microbatches."""

    pipeline_parallel_layer_counts: list[NonNegativeInt] | None = None
    """Number of layers of each stage, from first to last, for example [3, 1, 2, 2]. None: the keys below decide. Not
    in torchtitan."""

    pipeline_parallel_memory_gib: list[PositiveFloat] | None = None
    """Memory of each pipeline rank, for example [8.0, 4.0, 16.0]. The cut then is the fastest whose every rank fits, by
    the dry run's estimate; run_llama_train.sh and the dry run find it. Not in torchtitan."""

    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Number of layers of a stage, from which the number of stages follows. None: one stage a device for `1F1B` and
    `GPipe`, two for the other schedules."""

    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """Number of layers that the embedding counts for when the stages are cut. None here and in the next key: the
    stages are balanced by FLOPs (torchtitan's default is 1)."""

    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Number of layers that the final norm and the output layer count for when the stages are cut."""

    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage, in the order tok_embeddings, layers.0, ..., norm, output; in the TOML file
    only."""
