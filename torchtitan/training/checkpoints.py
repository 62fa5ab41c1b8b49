"""A run's checkpoints: finds the one to start from, restores it, saves the run and completes its last save.

`resume.plan_start` decides where the run starts. With `checkpoint.enable = false` that is step 0, and nothing is saved.
"""

from pathlib import Path

import torch

from torchtitan.checkpoint.manager import Checkpointer, SaveError
from torchtitan.checkpoint.storage import Manifest, Storage, find_checkpoints
from torchtitan.config.schema import Config
from torchtitan.data.loader import Loader
from torchtitan.models.spec import Blueprint
from torchtitan.observe.health import NotFiniteError
from torchtitan.observe.log import logger
from torchtitan.parallel.parts import ModelParts
from torchtitan.training import state
from torchtitan.training.resume import Start, describe_changes, plan_start


class Checkpoints:
    """Finds the checkpoint when constructed. Call `restore` once the model exists, and `finish` after the last step.

    Put the training loop inside: if a loss that is not finite ends the run, an asynchronous save is still completed.
    """

    def __init__(self, config: Config, run_folder: Path, layout: str, tokens_per_step: int) -> None:
        self.section, self.run_folder, self.last_step = config.checkpoint, run_folder, config.training.steps
        self.tokens_per_step, self.tokens_offset = tokens_per_step, 0  # the offset: batches were of another size before
        self.skips_in_a_row = 0  # updates skipped just before the step the run starts after
        self.manager: Checkpointer | None = None
        self.found: tuple[Storage, Manifest] | None = None
        self.resumes = False  # the checkpoint that was found is this run's own
        self.start = Start(0, "checkpoint.enable = false")
        if not self.section.enable:
            return
        own = Storage(self.section.folder if "://" in self.section.folder else str(run_folder / self.section.folder))
        about = {"layout": layout, "versions": {"torch": torch.__version__}}
        self.manager = Checkpointer(self.section, own, about, config.comm.init_timeout_seconds)
        self._find(own, config)

    def _find(self, own: Storage, config: Config) -> None:
        """Look for a checkpoint of this run, then in `initial_load_path`, and decide where to start."""
        assert self.manager is not None
        storage, manifest = own, self.manager.find(own, self.section.load_step)
        self.resumes = manifest is not None
        if manifest is None and self.section.initial_load_path is not None and not self.section.initial_load_in_hf:
            storage, step = find_checkpoints(self.section.initial_load_path)
            manifest = self.manager.find(storage, step)
        self.start = plan_start(
            self.section,
            manifest,
            storage.url,
            is_own=self.resumes,
            only_weights=manifest is not None and self.manager.holds_only_weights(storage, manifest.step),
            optimizer=config.optimizer.name,
            last_step=self.last_step,
        )
        logger.info(self.start.why)
        if manifest is None:
            return
        self.found = storage, manifest
        if self.start.train_state:
            self.tokens_offset = manifest.run["tokens"] - manifest.step * self.tokens_per_step
            self.skips_in_a_row = manifest.run.get("skips_in_a_row", 0)
        for change in describe_changes(manifest.config, config.model_dump(mode="json")) if self.resumes else []:
            logger.info(f"changed since that checkpoint: {change}")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Complete a save only after a bad loss, which ends all ranks alike: other errors may have ended some ranks."""
        if self.manager is not None and isinstance(error, NotFiniteError):
            try:
                self.manager.wait()
            except SaveError as failure:
                logger.error(failure)

    def tokens_at(self, step: int) -> int:
        """How many tokens the run has seen after this step."""
        return self.tokens_offset + step * self.tokens_per_step

    @property
    def seed(self) -> int | None:
        """The seed of the run that is resumed."""
        return self.found[1].config["debug"]["seed"] if self.found and self.resumes else None

    def restore(
        self, config: Config, blueprint: Blueprint, model: ModelParts, optimizer: torch.optim.Optimizer, loader: Loader
    ) -> int:
        """Fill model, optimizer and loader as `start` says; returns the step the run starts after."""
        self.model, self.optimizer, self.loader = model, optimizer, loader
        if self.manager is not None:
            self.manager.about["config"] = config.model_dump(mode="json")
        if self.found is not None:
            self._load(*self.found)
        elif self.start.weights:
            from torchtitan.weights.stored import check_shape, load_weights, open_model

            source = open_model(self.section.initial_load_path or config.model.hf_assets_path, config.model.name)
            check_shape(source, blueprint)
            load_weights(source, model)
            logger.info(f"loaded the weights of {source.weights.where}")
        return self.start.step

    def _load(self, storage: Storage, manifest: Manifest) -> None:
        assert self.manager is not None
        tensors, streams = state.model_tensors(self.model), {}
        if self.start.optimizer:
            tensors |= state.optimizer_tensors(self.model, self.optimizer)
        if self.start.data:
            shapes = self.manager.shapes(storage, manifest.step)
            own = [name for name in state.data_tensors(self.loader) if name in shapes]
            streams = {name: torch.empty(shapes[name], dtype=torch.uint8) for name in own}
        self.manager.load(storage, manifest.step, tensors | streams)
        if self.model.tied is not None:
            self.model.tied.copy_first(self.optimizer.state)
        if self.start.data:
            state.load_data(self.loader, manifest.run["data"], streams)
        if self.start.optimizer and self.model.loss_scale is not None and "loss_scale" in manifest.run:
            self.model.loss_scale.load(manifest.run["loss_scale"])
        if self.resumes:
            self.manager.last_step = manifest.step
            if self.section.load_step >= 0:
                self.manager.leave_behind(manifest.step)

    def is_time_up(self) -> bool:
        return self.manager is not None and self.manager.is_time_up()

    def due(self, step: int, time_is_up: bool) -> bool:
        """Whether to save after this step; `finish` saves the last one."""
        return self.manager is not None and step < self.last_step and self.manager.due(step, time_is_up)

    def finish(self, step: int, skips_in_a_row: int, is_last: bool) -> None:
        """Save the step the run ends at, unless that is done, and wait until it is written."""
        if self.manager is None or self.section.load_only:
            return
        is_last = is_last and not self.section.create_seed_checkpoint  # a seed checkpoint holds everything
        self.manager.wait()
        if self.manager.last_step != step:
            # If the data ended before the last step, everything is saved: with more data the run can resume.
            only_weights = is_last and step == self.last_step and self.section.last_save_model_only
            self.save(step, skips_in_a_row, only_weights)
            self.manager.wait()
            if self.manager.last_step != step:
                raise SaveError(
                    f"the checkpoint of the last step, {step}, could not be saved; the error above says why"
                )
        if is_last and self.section.last_save_in_hf:
            try:
                self.manager.on_rank_0(lambda: self._write_hf(step))
            except OSError as error:
                raise SaveError(
                    f"step {step} is saved, but {self.run_folder / 'hf'} could not be written: {error}"
                ) from error

    def _write_hf(self, step: int) -> None:
        assert self.manager is not None
        manifest = self.manager.storage.examine(step)
        assert isinstance(manifest, Manifest), manifest
        from torchtitan.weights.stored import open_run, write_hf

        source = open_run(self.manager.storage, manifest)
        write_hf(source, str(self.run_folder / "hf"), source.assets, getattr(torch, self.section.export_dtype))
        logger.info(f"wrote the Hugging Face folder {self.run_folder / 'hf'}")

    def save(self, step: int, skips_in_a_row: int, only_weights: bool = False) -> None:
        assert self.manager is not None
        tensors = state.model_tensors(self.model)
        if only_weights:
            dtype = getattr(torch, self.section.export_dtype)
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        else:
            tensors |= state.optimizer_tensors(self.model, self.optimizer) | state.data_tensors(self.loader)
        run = {"tokens": self.tokens_at(step), "skips_in_a_row": skips_in_a_row, "data": state.data_header(self.loader)}
        if self.model.loss_scale is not None:
            run["loss_scale"] = self.model.loss_scale.state()
        self.manager.save(step, tensors, run)
