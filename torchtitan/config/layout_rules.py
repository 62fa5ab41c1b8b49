"""What a model, a schedule or a number of ranks makes impossible for a layout."""

import math
from collections.abc import Iterator
from dataclasses import replace

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config, Parallelism
from torchtitan.models.llama.args import FLAVORS
from torchtitan.models.llama.stages import plan_microbatches, plan_stages
from torchtitan.refusal import Refusal

Finding = tuple[tuple[str, ...], str]  # keys the finding rests on, and the message


def find_layout_conflicts(config: Config, world_size: int | None) -> Iterator[Finding]:
    """Those that depend on the number of ranks only where it is known."""
    yield from _splits(config)
    yield from _pipeline(config)
    yield from _async_tensor_parallel(config)
    if world_size is not None:
        yield from _ranks(config, world_size)


def _splits(config: Config) -> Iterator[Finding]:
    """What a model of this shape and sequences of this length can be split into."""
    tp, cp = config.parallelism.tensor_parallel_degree, config.parallelism.context_parallel_degree
    args = FLAVORS.get(config.model.name, {}).get(config.model.flavor)
    if args is None:
        return
    name = "parallelism.tensor_parallel_degree"
    for what, count in [("heads", args.n_heads), ("KV heads", args.n_kv_heads), ("hidden units", args.hidden_dim)]:
        if count % tp:
            fitting = ", ".join(str(d) for d in range(1, args.n_kv_heads + 1) if args.n_kv_heads % d == 0)
            yield (
                (name, "model.name", "model.flavor"),
                f"{name} = {tp} does not divide the model's {count} {what}; use one of {fitting}",
            )
            return
    pieces = 2 * cp if cp > 1 else 1  # a head and a tail piece each, see parallel/context.py
    unit = math.lcm(pieces, cp * tp)
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, seq_len in lengths.items():
        if seq_len % unit:
            yield (
                (key, name, "parallelism.context_parallel_degree"),
                f"{key} = {seq_len} does not divide into the pieces of context_parallel_degree {cp} and "
                f"tensor_parallel_degree {tp}; use a multiple of {unit}, as {-(-seq_len // unit) * unit}",
            )


def _pipeline(config: Config) -> Iterator[Finding]:
    """Whether the layers can be cut into stages, and whether the schedule can run on them."""
    parallelism, training = config.parallelism, config.training
    args = FLAVORS.get(config.model.name, {}).get(config.model.flavor)
    if args is None or parallelism.pipeline_parallel_degree == 1:
        return
    keys = tuple(f"parallelism.{key}" for key in type(parallelism).model_fields if key.startswith("pipeline_"))
    vocab_size = config.model.vocab_size or args.vocab_size or 1  # the cut may depend on it, not whether there is one
    try:
        plan = plan_stages(replace(args, vocab_size=vocab_size), parallelism, training.seq_len)
        if plan.backward_in_two_parts:
            yield from _two_parts(config)
        plan_microbatches(parallelism, plan, training.local_batch_size)
    except Refusal as error:
        yield (*keys, "model.name", "model.flavor", "training.local_batch_size"), str(error)
    if config.validation.enable and config.validation.local_batch_size != training.local_batch_size:
        yield (
            ("validation.local_batch_size", "training.local_batch_size", "parallelism.pipeline_parallel_degree"),
            f"validation.local_batch_size = {config.validation.local_batch_size} goes through the training's pipeline "
            f"schedule, made for training.local_batch_size; use {training.local_batch_size}",
        )


def _two_parts(config: Config) -> Iterator[Finding]:
    """What a backward that gives the gradient of inputs first, of weights later, goes together with."""
    recompute, parallelism = config.activation_checkpoint, config.parallelism
    csv = parallelism.pipeline_parallel_schedule_csv
    name = "parallelism.pipeline_parallel_schedule" + ("_csv" if csv else "")
    for cannot, keys, fix in (
        (
            config.compile.model,
            ("compile.enable", "compile.components"),
            "a compiled block cannot do; leave model out of compile.components",
        ),
        (
            recompute.by_operation,
            ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
            'recomputing by operation cannot do; use a number as activation_checkpoint.selective_ac_option, or "full"',
        ),
        (
            parallelism.fsdp_reshard_after_forward == "always",
            ("parallelism.fsdp_reshard_after_forward",),
            'needs the parameters that forward used; set fsdp_reshard_after_forward = "default"',
        ),
    ):
        if cannot:
            yield (
                (*keys, name),
                f'{name} = "{csv or parallelism.pipeline_parallel_schedule}" runs backward in two parts, which '
                f"{fix}, or use {'whole backwards (B)' if csv else 'Interleaved1F1B'}",
            )


def _async_tensor_parallel(config: Config) -> Iterator[Finding]:
    name, degree = "parallelism.enable_async_tensor_parallel", config.parallelism.tensor_parallel_degree
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if degree == 1:
        yield (
            (name, "parallelism.tensor_parallel_degree"),
            f"{name} = true with tensor_parallel_degree = 1 has nothing to overlap; set it to false, or split tensors",
        )
    elif not (config.compile.model and config.compile.backend == "inductor"):
        yield (
            (name, "compile.enable", "compile.components", "compile.backend"),
            f"{name} = true is carried out by the compiler; set compile.enable = true with "
            f'"model" among compile.components and compile.backend = "inductor", or set it to false',
        )


def _ranks(config: Config, world_size: int) -> Iterator[Finding]:
    degrees = tuple(f"parallelism.{key}" for key in Parallelism.model_fields if key.endswith("_degree"))
    try:
        dims = plan_layout(config.parallelism, world_size)
    except Refusal as error:
        yield degrees, str(error)
        return
    batch = ("training.global_batch_size", "training.local_batch_size", "training.num_streams")
    try:
        plan = plan_batch(config.training, dims.dp)
    except Refusal as error:
        yield (*degrees, *batch), str(error)
        return
    early = "optimizer.early_step_in_backward"
    if config.optimizer.early_step_in_backward and plan.num_local_batches > 1:
        yield (
            (early, *degrees, *batch),
            f"{early} = true with {plan.num_local_batches} local batches a step: their gradients are added up; set "
            f"training.global_batch_size = {plan.global_batch_size // plan.num_local_batches}, or {early} = false",
        )
