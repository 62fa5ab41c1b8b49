"""From a configuration to a run's data and model, for training, evaluation and the dry run alike."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan.checkpoint.hf import copy_part
from torchtitan.checkpoint.storage import Storage
from torchtitan.config.layout import BatchPlan
from torchtitan.config.schema import Config, DataSource, Training, Validation
from torchtitan.data.loader import Loader, build_loader
from torchtitan.data.sources import locate_text
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.llama.args import FLAVORS, LlamaArgs, resolve_vocab_size
from torchtitan.models.llama.model import Transformer, fill_initial
from torchtitan.models.llama.parallelize import apply_parallelism, keep_modules
from torchtitan.models.llama.stages import V_SHAPED, plan_stages
from torchtitan.observe.log import logger
from torchtitan.observe.metrics import import_wandb
from torchtitan.parallel.collectives import any_says_so
from torchtitan.parallel.float8 import apply_float8, check_float8
from torchtitan.parallel.fsdp import copy_first_replica
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.refusal import Refusal


def check_environment(config: Config, device: torch.device) -> None:
    """Refuse, before anything is started, what this machine or installation cannot do."""
    if config.metrics.enable_wandb:
        import_wandb()
    if config.compile.enable:
        backends = torch._dynamo.list_backends(None)
        if config.compile.backend not in backends:
            raise Refusal(
                f'compile.backend = "{config.compile.backend}" is no backend of torch.compile here; '
                f"use one of {', '.join(backends)}"
            )
        degree, recompute = config.parallelism.tensor_parallel_degree, config.activation_checkpoint
        whole = recompute.mode in ("selective", "full") and not recompute.by_operation
        if degree > 1 and whole and "model" in config.compile.components and device.type == "cpu":
            # The random state that a CPU's attention is recomputed with trades places with the mesh (docs/log.md).
            raise Refusal(
                f"compile.enable = true with tensor_parallel_degree = {degree} cannot recompute whole blocks on a CPU: "
                f'torch confuses what it saved of them; set activation_checkpoint.selective_ac_option = "op" with mode '
                f'"selective", or mode = "none"'
            )
    for key in ("folder", "initial_load_path") if config.checkpoint.enable else ():
        place = getattr(config.checkpoint, key) or ""
        if "://" in place:
            Storage(place)
        elif key == "initial_load_path" and place and not Path(place).exists():
            raise Refusal(f'checkpoint.initial_load_path = "{place}" is not there (looked from {Path.cwd()})')
    schedule = config.parallelism.pipeline_parallel_schedule
    folded = config.parallelism.pipeline_parallel_degree > 1 and schedule in V_SHAPED
    if folded and device.type == "cpu" and torch.__version__ < "2.13":
        raise Refusal(
            f'parallelism.pipeline_parallel_schedule = "{schedule}" needs torch 2.13 on a CPU: {torch.__version__} '
            f"begins with a message from a rank to itself, which gloo cannot carry; use Interleaved1F1B, or torch 2.13"
        )
    early = config.optimizer.early_step_in_backward and config.training.enable_cpu_offload
    if early and device.type == "cuda" and torch.__version__ < "2.13":
        raise Refusal(
            f"optimizer.early_step_in_backward = true with training.enable_cpu_offload = true needs torch 2.13 on a "
            f"GPU: {torch.__version__} updates a parameter before its gradient is on the host; set one to false"
        )
    if config.float8 is not None:
        check_float8(config.float8, device)
    if config.parallelism.enable_async_tensor_parallel and device.type != "cuda":
        raise Refusal(
            "parallelism.enable_async_tensor_parallel = true needs GPUs that reach each other's memory; set it to false"
        )
    if config.profiling.enable_memory_snapshot and device.type != "cuda":
        raise Refusal("profiling.enable_memory_snapshot = true needs a GPU: only CUDA records memory; set it to false")


def check_data(config: Config) -> None:
    """Refuse data that is not there; what is in it shows when the loaders are built."""
    named: list[tuple[str, Training | Validation | DataSource]] = [
        (f"training.sources[{i}]", source) for i, source in enumerate(config.training.sources)
    ]
    named = named or [("training", config.training)]
    for section, source in [*named, *([("validation", config.validation)] if config.validation.enable else [])]:
        try:
            locate_text(source.dataset, source.dataset_path)
        except Refusal as error:
            raise Refusal(f"{section}: {error}") from None


def build_model_args(config: Config, tokenizer: Tokenizer | None) -> LlamaArgs:
    """The flavor's shape, with the vocabulary fixed; without a tokenizer by the configuration alone."""
    args = FLAVORS[config.model.name][config.model.flavor]
    return resolve_vocab_size(args, config.model.vocab_size, tokenizer.vocab_size if tokenizer else 0)


def build_model(config: Config, args: LlamaArgs, mesh: Mesh, device: torch.device, seed: int) -> ModelParts:
    """This rank's part of the model, with initial weights that depend on seed and name, not on the layout.

    Each rank draws every whole parameter it has a part of, one at a time, and keeps its part. Kinds of devices have
    generators of their own, so another kind gives other values; values are drawn on the device also where the
    parameters are kept on the host.
    """
    model = lay_out_model(config, args, mesh)
    for stage in model.stages.values():
        stage.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
    for name, parameter in model.named_parameters():
        if args.tied_embeddings and name == "output.weight":  # on a stage of its own
            name = "tok_embeddings.weight"
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        fill_initial(name, whole, args, generator)
        copy_part(parameter, whole.__getitem__)
    copy_first_replica(model.parameters(), mesh.devices["dp_replicate"])
    return model


def lay_out_model(config: Config, args: LlamaArgs, mesh: Mesh) -> ModelParts:
    """This rank's part of the model under its layout, still on the meta device."""
    plan = plan_stages(args, config.parallelism, config.training.seq_len)
    if mesh.dims.pp > 1 and mesh.devices.get_rank() == 0:
        logger.info(f"pipeline: {plan}")
    stages = {}
    for number in plan.of_rank(mesh.devices["pp"].get_local_rank()):
        with torch.device("meta"):
            stage = Transformer(args).to(getattr(torch, config.training.dtype))
        if config.float8 is not None:
            apply_float8(stage, config.float8, compiled=config.compile.model)
        keep_modules(stage, plan.modules[number])
        apply_parallelism(
            stage, mesh, config.parallelism, config.training, config.activation_checkpoint, config.compile
        )
        stages[number] = stage.train()
    tied = ("tok_embeddings.weight", "output.weight") if args.tied_embeddings and mesh.dims.pp > 1 else None
    assert args.vocab_size is not None
    return ModelParts(stages, plan.ranks, mesh.devices["pp"], args.dim, args.vocab_size, tied)


def build_training_loader(
    config: Config,
    plan: BatchPlan,
    tokenizer: Tokenizer,
    mesh: Mesh,
    seed: int,
    device: torch.device,
    agree: Callable[[bool], bool],
) -> Loader:
    """The training data; it ends on all ranks at once, at the last batch that every rank can fill."""
    training = config.training
    single = DataSource(dataset=training.dataset, dataset_path=training.dataset_path, text_key=training.text_key)
    return build_loader(
        training.sources or [single],
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=plan.global_batch_size,
        num_streams=plan.num_streams,
        dp_rank=mesh.batch.get_local_rank(),
        dp_size=mesh.dims.dp,
        seed=seed,
        epochs=training.epochs,
        shuffle=training.shuffle,
        block_causal=config.model.attn_mask_type == "block_causal",
        agree=agree,
        pin_memory=device.type == "cuda",
    )


def build_validation_loader(
    config: Config, plan: BatchPlan, tokenizer: Tokenizer, mesh: Mesh, device: torch.device
) -> Loader | None:
    """The held-out data in file order, if validation is on.

    It ends when no rank has any left; the last batches are filled up with ignored tokens.
    Its batches are as large as the training's, so that what `validation.steps` of them hold does not depend on ranks.
    """
    validation = config.validation
    if not validation.enable:
        return None
    source = DataSource(dataset=validation.dataset, dataset_path=validation.dataset_path, text_key=validation.text_key)
    return build_loader(
        [source],
        tokenizer,
        seq_len=validation.seq_len,
        global_batch_size=plan.global_batch_size,
        num_streams=plan.num_streams,
        dp_rank=mesh.batch.get_local_rank(),
        dp_size=mesh.dims.dp,
        seed=0,
        epochs=1,
        shuffle=False,
        block_causal=config.model.attn_mask_type == "block_causal",
        agree=any_says_so,
        pin_memory=device.type == "cuda",
        pad_last=True,
    )
