"""A run whose ranks have met, and the builders of its data, model and step."""

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from torchtitan import hardware
from torchtitan.config.layout import BatchPlan, ParallelDims
from torchtitan.config.schema import Config
from torchtitan.data.draws import seed_draws
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.hardware import Peak, Place
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.parallel import collectives
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.data import build_training_loader, build_validation_loader, needs_data
from torchtitan.training.loss import build_loss
from torchtitan.training.model import build_model, lay_out_model
from torchtitan.training.optimizer import build_optimizer
from torchtitan.training.optimizer.lr_schedule import learning_rate_factor
from torchtitan.training.step import ForwardBackward


@dataclass(frozen=True)
class Run:
    """A run whose ranks have met: each knows its place, its device and its share of the batch. It has no model yet."""

    config: Config
    blueprint: Blueprint  # with the vocabulary fixed
    place: Place
    device: torch.device
    tokenizer: Tokenizer | None  # None in a dry run and for a model that reads no text
    batch: BatchPlan
    mesh: Mesh
    folder: Path
    lock: IO[str] | None = None  # keeps other runs out of the folder while it is open

    @property
    def dims(self) -> ParallelDims:
        return self.mesh.dims

    @property
    def unit(self) -> str:
        """What a model reads."""
        return "tokens"

    @property
    def talks(self) -> bool:
        """Whether `generate` can continue a text with what this run saves."""
        return self.config.checkpoint.enable and not self.config.checkpoint.load_only

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.config.training.seq_len

    @property
    def flops_per_token(self) -> int:
        return self.blueprint.flops_per_token(self.config.training.seq_len)

    def prepared(self) -> "Run":
        """The run once all ranks know the model; a family's is known from its shape."""
        return self

    def start_watch(self, timeout_seconds: float) -> NoWatch:
        """Put the training loop inside. Set `step` at each step, and call `set_timeout` when the timeout changes."""
        if self.place.world_size == 1:
            return NoWatch()
        from torchtitan.observe.peers.watch import Watch

        return Watch(self.folder, timeout_seconds, self.mesh.groups)

    def describe_model(self) -> str:
        name, parameters = self.blueprint.name, self.blueprint.num_parameters
        batch = f"global batch {self.batch.global_batch_size} x {self.config.training.seq_len} tokens"
        return f"{name}: {parameters:,} parameters, {batch}, local batches a rank: {self.batch.num_local_batches}"

    def agree_on_seed(self, saved: int | None) -> int:
        """The configuration's seed, or else the resumed run's, or else one that rank 0 draws."""
        seed = saved if self.config.debug.seed is None else self.config.debug.seed
        return collectives.from_rank_0(secrets.randbits(31) if seed is None else seed)

    def seed_draws(self, seed: int, step: int) -> None:
        """Seed what the model draws in this step (dropout), so that no checkpoint has to hold generators' states.

        Ranks that see the same data in the same stage draw the same; all others draw their own.
        """
        place = self.mesh.tokens.get_local_rank(), self.mesh.stage_group.rank()
        seed_draws(f"{seed} step {step} place {place}")

    def find_peak(self) -> Peak:
        """The FLOP/s that MFU is counted against; rank 0 logs it with the machine."""
        used = self.config.training.mixed_precision_param
        peak = hardware.find_peak(self.device, getattr(torch, used))
        machine = f"{self.place.world_size} x {hardware.describe_device(self.device)}"
        logger.info(f"{self.config.job.description}: {machine}, mesh {self.dims}")
        logger.info(f"peak {peak.flops / 1e12:.2f} TFLOP/s a device ({peak.origin})")
        if peak.spread > 0.1:
            logger.info(
                f"this machine is busy: its best measurements differ by {peak.spread:.0%}, and MFU is as uncertain"
            )
        if advice := hardware.advise_type(self.device, used):
            logger.info(advice)
        return peak

    def pick_attention(self) -> AbstractContextManager:
        """A context in which a GPU computes attention by the fastest kernel that supports this model."""
        if self.device.type != "cuda":
            return nullcontext()
        from torchtitan.parallel.gpu_attention import Case, pick_attention

        shape, dims, training = self.blueprint.shape, self.dims, self.config.training
        dtype, heads = getattr(torch, training.mixed_precision_param), shape.n_heads // dims.tp
        kv_heads, seq_len = shape.n_kv_heads // dims.tp, training.seq_len // (2 * dims.cp if dims.cp > 1 else 1)
        keeps_apart = self.config.model.attn_mask_type == "block_causal"
        case = Case(self.device, dtype, heads, kv_heads, shape.head_size, seq_len, keeps_apart)
        kernel, attention = pick_attention(case, in_pieces=dims.cp > 1)
        if dims.cp == 1:  # context parallelism has torch pick one for each piece
            logger.info(f"attention by {kernel}")
        return attention

    def make_trace_folder(self) -> None:
        """For what NCCL writes when a collective times out."""
        if self.device.type == "cuda":
            from torchtitan.training.flight_recorder import make_trace_folder

            make_trace_folder(self.config.comm, self.folder)

    def profile(self, step: int, paused: Callable[[], AbstractContextManager]) -> AbstractContextManager:
        """What profiles the training inside; it gives a function to call after every step."""
        profiling = self.config.profiling
        if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
            return nullcontext(lambda: None)
        from torchtitan.observe.profiling import profile

        return profile(profiling, self.folder, self.place.rank, step, self.device, paused)

    def build_model(self, seed: int) -> ModelParts:
        """This rank's part of the model, with its first weights."""
        return build_model(self.config, self.blueprint, self.mesh, self.device, seed)

    def build_optimizer(self, model: ModelParts) -> torch.optim.Optimizer:
        config = self.config
        return build_optimizer(model.named_parameters(), config.optimizer, config.compile, self.blueprint.takes_muon)

    def learning_rate_factor(self, step: int) -> float:
        """The factor on `optimizer.lr` at this step."""
        return learning_rate_factor(step, self.config.lr_scheduler, self.config.training.steps)

    def load_weights(self, model: ModelParts) -> None:
        """Fill this rank's part with weights that no run of this recipe has saved."""
        from torchtitan.weights.stored import check_shape, load_weights, open_model

        path = self.config.checkpoint.initial_load_path or self.config.model.hf_assets_path
        source = open_model(path, self.config.model.name)
        check_shape(source, self.blueprint)
        load_weights(source, model)
        logger.info(f"loaded the weights of {source.weights.where}")

    def lay_out_model(self) -> ModelParts:
        """This rank's part of the model, on the meta device."""
        return lay_out_model(self.config, self.blueprint, self.mesh)

    def build_forward_backward(self, parts: ModelParts) -> ForwardBackward:
        loss = build_loss(self.config.compile)
        return ForwardBackward(parts, loss, self.mesh, self.config.training, self.config.parallelism, self.device)

    def build_training_loader(self, seed: int, part: tuple[int, int] = (0, 1)) -> Loader:
        assert self.tokenizer is not None
        if self.is_between_stages:
            return self._no_data(self.config.training.seq_len)
        return build_training_loader(self.config, self.batch, self.tokenizer, self.mesh, seed, self.device, part)

    def build_validation_loader(self) -> Loader | None:
        """The held-out data, if validation is on."""
        if not self.config.validation.enable:
            return None
        assert self.tokenizer is not None
        if self.is_between_stages:
            return self._no_data(self.config.validation.seq_len, collectives.any_says_so)
        return build_validation_loader(self.config, self.batch, self.tokenizer, self.mesh, self.device)

    @property
    def is_between_stages(self) -> bool:
        """Whether this rank needs no data."""
        return not needs_data(self.config, self.place)

    def _no_data(self, seq_len: int, any_says_so: Callable[[bool], bool] | None = None) -> Any:
        from torchtitan.data.no_data import NoData, no_text

        rows = self.batch.global_batch_size // self.dims.dp
        return NoData(lambda: no_text(rows, seq_len), any_says_so)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the process group and release the run folder."""
        collectives.stop_process_group()
        if self.lock is not None:
            self.lock.close()
