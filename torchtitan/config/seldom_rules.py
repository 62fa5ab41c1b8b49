"""Finds what cannot be combined with keys that few runs set; a plain run does not load this file."""

import json
import math
import re
from collections.abc import Iterator

from torchtitan.config.layout import BatchPlan
from torchtitan.config.schema import Checkpoint, Config, Lora, other_sections
from torchtitan.config.section import Finding


def find_seldom_conflicts(config: Config) -> list[Finding]:
    return [
        *_checkpoint(config),
        *_compile(config),
        *_early_step(config),
        *_optimizer(config),
        *_async_tensor_parallel(config),
        *_lora(config),
        *_train_only(config),
        *_chat(config),
        *_preference(config),
        *_tasks(config),
    ]


def _checkpoint(config: Config) -> Iterator[Finding]:
    checkpoint = config.checkpoint
    for key, missed in (
        ("create_seed_checkpoint", "nothing would be trained or saved"),
        ("initial_load_path", "the run would begin with drawn weights"),
        ("initial_load_missing", "the run would begin with drawn weights"),
        ("initial_load_in_hf", "the run would begin with drawn weights"),
        ("last_save_in_hf", "nothing would be saved"),
        ("load_step", "the run would begin anew"),
        ("keep_best", "nothing would be kept"),
    ):
        value = getattr(checkpoint, key)
        if not checkpoint.enable and value != Checkpoint.model_fields[key].default:
            yield (
                (f"checkpoint.{key}", "checkpoint.enable"),
                f"checkpoint.{key} = {json.dumps(value)} without checkpoint.enable: {missed}; set "
                "checkpoint.enable = true, or remove it",
            )
    for key, value in (
        ("checkpoint.keep_best", checkpoint.keep_best),
        ("validation.patience", config.validation.patience),
    ):
        if value is not None and not config.validation.enable:
            yield (
                (key, "validation.enable"),
                f"{key} = {json.dumps(value)} without validation.enable: there is nothing to judge by; set "
                "validation.enable = true, or remove it",
            )
    if checkpoint.initial_load_missing and not (checkpoint.initial_load_path and checkpoint.initial_load_model_only):
        yield (
            ("checkpoint.initial_load_missing",),
            f"checkpoint.initial_load_missing = {json.dumps(checkpoint.initial_load_missing)} is for weights alone; "
            "set checkpoint.initial_load_path, with initial_load_model_only = true, or remove it",
        )
    for key, lost in (("create_seed_checkpoint", "trained or saved"), ("last_save_in_hf", "saved")):
        if getattr(checkpoint, key) and checkpoint.load_only:
            yield (
                (f"checkpoint.{key}", "checkpoint.load_only"),
                f"checkpoint.{key} = true with load_only = true: nothing would be {lost}; set one of them to false",
            )
    for key in ("last_save_in_hf", "export_dtype"):
        value = getattr(checkpoint, key)
        if value != Checkpoint.model_fields[key].default and not checkpoint.last_save_model_only:
            yield (
                (f"checkpoint.{key}", "checkpoint.last_save_model_only"),
                f"checkpoint.{key} = {json.dumps(value)} applies to a last save of weights alone, from which a "
                "run cannot be resumed; set checkpoint.last_save_model_only = true, or convert the checkpoint later "
                "(python -m torchtitan convert)",
            )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield (
            ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_model_only"),
            "checkpoint.initial_load_in_hf = true with initial_load_model_only = false: safetensors are weights alone, "
            "without optimizer, data and step; change one of the two",
        )


def _compile(config: Config) -> Iterator[Finding]:
    recompute = config.activation_checkpoint
    option = recompute.selective_ac_option
    if recompute.mode == "selective" and option != "op" and not re.fullmatch("[1-9][0-9]*", option):
        yield (
            ("activation_checkpoint.selective_ac_option",),
            f'activation_checkpoint.selective_ac_option = "{option}" is not allowed; use "op", '
            f'or a number of blocks, as "2"',
        )
    if recompute.mode == "memory_budget" and not config.compile.model:
        yield (
            ("activation_checkpoint.mode", "compile.enable", "compile.components"),
            'activation_checkpoint.mode = "memory_budget" needs the compiler; set compile.enable = true '
            'with "model" among compile.components, or use "selective"',
        )
    if config.compile.enable and not config.compile.components:
        yield (
            ("compile.enable", "compile.components"),
            'compile.components = [] compiles nothing; name "model", "loss" or both, or set compile.enable = false',
        )


def _early_step(config: Config) -> Iterator[Finding]:
    name, training = "optimizer.early_step_in_backward", config.training
    if not config.optimizer.early_step_in_backward:
        return
    degree = config.parallelism.pipeline_parallel_degree
    clips, skips = "gradients are scaled by the norm of all of them", "an update is skipped only once all gradients"
    for key, value, possible, reason in (
        ("training.max_norm", training.max_norm, math.inf, clips),
        ("training.on_nonfinite", training.on_nonfinite, "stop", f"{skips} are known"),
        ("parallelism.pipeline_parallel_degree", degree, 1, "gradients of several microbatches are added up"),
    ):
        if value != possible:
            was, use = (f'"{each}"' if isinstance(each, str) else each for each in (value, possible))
            yield (name, key), f"{name} = true with {key} = {was}: {reason}; use {use}, or set {name} = false"


def of_early_step(plan: BatchPlan, keys: tuple[str, ...]) -> Finding:
    early = "optimizer.early_step_in_backward"
    return (
        (early, *keys),
        f"{early} = true with {plan.num_local_batches} local batches a step: their gradients are added up; set "
        f"training.global_batch_size = {plan.global_batch_size // plan.num_local_batches}, or {early} = false",
    )


def _optimizer(config: Config) -> Iterator[Finding]:
    implementation = config.optimizer.implementation
    if config.optimizer.name == "Muon" and config.training.on_nonfinite == "skip":
        yield (
            ("optimizer.name", "training.on_nonfinite"),
            'training.on_nonfinite = "skip" skips updates on the device, but optimizer.name = "Muon" cannot do that; '
            'use "AdamW", or on_nonfinite = "stop"',
        )
    if config.training.mixed_precision_param == "float16" and not config.optimizer.leaves_out_updates:
        yield (
            ("training.mixed_precision_param", "optimizer.implementation", "optimizer.name"),
            'training.mixed_precision_param = "float16" leaves out updates whose gradients overflow, which needs '
            'optimizer.implementation = "fused", a name other than "Muon", and early_step_in_backward = false; '
            'set these, or use "bfloat16" or "float32"',
        )
    if implementation == "fused":
        return
    if config.training.on_nonfinite == "skip":
        yield (
            ("training.on_nonfinite", "optimizer.implementation"),
            f'training.on_nonfinite = "skip" skips updates on the device, but '
            f'optimizer.implementation = "{implementation}" cannot do that; use "fused"',
        )
    if config.optimizer.moments_dtype != "float32":
        yield (
            ("optimizer.moments_dtype", "optimizer.implementation"),
            f'optimizer.moments_dtype = "{config.optimizer.moments_dtype}" requires optimizer.implementation = '
            f'"fused", not "{implementation}"; set it to "fused", or moments_dtype to "float32"',
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
            f"{name} = true needs the compiler; set compile.enable = true with "
            f'"model" among compile.components and compile.backend = "inductor", or set it to false',
        )


def _lora(config: Config) -> Iterator[Finding]:
    lora, checkpoint = config.lora, config.checkpoint
    if lora.rank is None:
        for key, value in lora:
            if value != Lora.model_fields[key].default:
                yield (
                    (f"lora.{key}", "lora.rank"),
                    f"lora.{key} = {json.dumps(value)} without lora.rank: there are no adapters; set lora.rank, as 16, "
                    "or remove it",
                )
        return
    if not (checkpoint.enable and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf)):
        yield (
            ("lora.rank", "checkpoint.enable", "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"),
            f"lora.rank = {lora.rank} trains adapters of a model that is there; set checkpoint.enable = true, and "
            "checkpoint.initial_load_path to a run, a download or a file of weights",
        )
    if not checkpoint.initial_load_model_only:
        yield (
            ("lora.rank", "checkpoint.initial_load_model_only"),
            f"lora.rank = {lora.rank} takes only the weights of checkpoint.initial_load_path; set "
            "checkpoint.initial_load_model_only = true",
        )
    if checkpoint.initial_load_missing:
        yield (
            ("lora.rank", "checkpoint.initial_load_missing"),
            f"lora.rank = {lora.rank} with checkpoint.initial_load_missing = "
            f"{json.dumps(checkpoint.initial_load_missing)}: what is missing would be frozen as it was drawn; remove "
            "one of them",
        )
    if config.training.train_only:
        yield (
            ("lora.rank", "training.train_only"),
            f"lora.rank = {lora.rank} with training.train_only = {json.dumps(config.training.train_only)}: the "
            "adapters are what is trained; remove one of them",
        )
    if any(section.joins is not None for section in other_sections(config)):
        yield (
            ("lora.rank",),
            f"lora.rank = {lora.rank}: sites that meet exchange whole models, not adapters; remove lora.rank, or the "
            "section that joins them",
        )
    yield from _not_in_float8(config, "lora.rank", f"lora.rank = {lora.rank}")


def _train_only(config: Config) -> Iterator[Finding]:
    if names := config.training.train_only:
        yield from _not_in_float8(config, "training.train_only", f"training.train_only = {json.dumps(names)}")


def _not_in_float8(config: Config, key: str, said: str) -> Iterator[Finding]:
    if config.float8 is not None:
        yield (
            (key, "model.converters"),
            f"{said} with quantize.linear.float8: its layers know no frozen weight, and no adapter; remove one of the "
            "two",
        )


def _chat(config: Config) -> Iterator[Finding]:
    training = config.training
    if not any(part.chat for part in (training, config.validation, *training.sources)):
        return
    if config.model.attn_mask_type != "block_causal":
        yield (
            ("model.attn_mask_type",),
            f'model.attn_mask_type = "{config.model.attn_mask_type}" with conversations (chat): one conversation would '
            'attend to the others in its sequence; set model.attn_mask_type = "block_causal"',
        )
    if training.sources and training.chat:
        yield (
            ("training.chat", "training.sources"),
            "training.chat is set beside [[training.sources]]; set chat in each source whose rows are conversations",
        )


def _preference(config: Config) -> Iterator[Finding]:
    training, checkpoint, validation = config.training, config.checkpoint, config.validation
    if training.preference_beta is None:
        return
    key, said = "training.preference_beta", f"training.preference_beta = {training.preference_beta}"
    if not all(source.chat for source in training.sources) or not (training.sources or training.chat):
        yield (
            (key, "training.chat"),
            f'{said} learns from pairs of conversations; set chat = "all" in each source',
        )
    if validation.enable and not validation.chat:
        yield (key, "validation.chat"), f'{said} is validated on pairs; set validation.chat = "all"'
    if not (checkpoint.enable and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf)):
        yield (
            (key, "checkpoint.enable", "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"),
            f"{said} holds the run to the model that it begins with; set checkpoint.enable = true, and "
            "checkpoint.initial_load_path to a run or a download",
        )
    if config.lora.initial_load_path:
        yield (
            (key, "lora.initial_load_path"),
            f'{said} with lora.initial_load_path = "{config.lora.initial_load_path}": the reference is the base '
            "without an adapter, not what the run begins with; begin with the merged model (convert --merge)",
        )
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        yield (
            (key, "parallelism.pipeline_parallel_degree"),
            f"{said} with pipeline_parallel_degree = {degree}: a loss of pairs needs two whole models; use 1",
        )


def _tasks(config: Config) -> Iterator[Finding]:
    validation = config.validation
    if validation.tasks and not validation.enable:
        yield (
            ("validation.tasks", "validation.enable"),
            f"validation.tasks = {json.dumps(validation.tasks)} without validation.enable: they are answered when the "
            "run validates; set validation.enable = true, or remove it",
        )
    if validation.tasks_limit is not None and not validation.tasks:
        yield (
            ("validation.tasks_limit", "validation.tasks"),
            f"validation.tasks_limit = {validation.tasks_limit} without validation.tasks; name tasks, or remove it",
        )
