"""Finds the checkpoint that a run starts from, and restores it.

`resume.plan_start` decides where the run starts. With `checkpoint.enable = false` that is step 0, and nothing is saved.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.checkpoint.storage import Manifest, Storage, find_checkpoints
from torchtitan.config.schema import Config
from torchtitan.data.loader import Loader
from torchtitan.observe.log import logger
from torchtitan.observe.peers.alone import Alone
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.checkpoints import state
from torchtitan.training.checkpoints.resume import Start, describe_changes, plan_start
from torchtitan.training.checkpoints.saves import Saves
from torchtitan.training.swarm import NoSwarm

if TYPE_CHECKING:
    from torchtitan.training.optimizer.average import Average


class Checkpoints:
    """Finds the checkpoint when constructed. Call `restore` once the model exists."""

    def __init__(self, config: Config, run_folder: Path, layout: str, tokens_per_step: int, watch: Alone) -> None:
        self.section, self.run_folder, self.watch = config.checkpoint, run_folder, watch
        self.tokens_per_step, self.tokens_offset = (
            tokens_per_step,
            0,
        )  # the offset: tokens of steps whose batches had another size
        self.skips_in_a_row = 0  # updates that the run skipped just before it was saved
        self.manager: Checkpointer | None = None
        self.found: tuple[Storage, Manifest] | None = None
        self.resumes = False  # the checkpoint that was found is this run's own
        self.start = Start(0, "checkpoint.enable = false")
        self.best = None
        if self.section.keep_best is not None or config.validation.patience is not None:
            from torchtitan.training.checkpoints.best import Best

            self.best = Best(self.section.keep_best or "loss", config.validation.patience)
        if not self.section.enable:
            return
        own = Storage(self.section.folder if "://" in self.section.folder else str(run_folder / self.section.folder))
        about = {"layout": layout, "versions": {"torch": torch.__version__}}
        self.manager = Checkpointer(self.section, own, about, config.comm.init_timeout_seconds)
        with watch.saving():
            self._find(own, config)

    def _find(self, own: Storage, config: Config) -> None:
        """Look for a checkpoint of this run, then in `initial_load_path`, and decide where to start."""
        assert self.manager is not None
        storage, manifest = own, self.manager.find(own, self.section.load_step)
        self.resumes = manifest is not None
        path, holds_files = self.section.initial_load_path, False
        if manifest is None and path is not None and not self.section.initial_load_in_hf:
            from torchtitan.weights.files import find_files

            holds_files = self.manager.on_rank_0(lambda: bool(find_files(path)))
            if not holds_files:
                storage, step = find_checkpoints(path)
                manifest = self.manager.find(storage, step)
        self.start = plan_start(
            self.section,
            manifest,
            storage.url,
            holds_files=holds_files,
            is_own=self.resumes,
            only_weights=manifest is not None and self.manager.holds_only_weights(storage, manifest.step),
            optimizer=config.optimizer.name,
            last_step=config.training.steps,
        )
        logger.info(self.start.why)
        if manifest is None:
            return
        self.found = storage, manifest
        if self.start.train_state:
            self.tokens_offset = manifest.run["tokens"] - manifest.step * self.tokens_per_step
            self.skips_in_a_row = manifest.run.get("skips_in_a_row", 0)
        if self.resumes and self.best is not None:
            self.best.load(manifest.run.get("best"))
        for change in describe_changes(manifest.config, config.model_dump(mode="json")) if self.resumes else []:
            logger.info(f"changed since that checkpoint: {change}")

    def tokens_at(self, step: int) -> int:
        """How many tokens (samples, of a model of one's own) the run has seen after this step."""
        return self.tokens_offset + step * self.tokens_per_step

    @property
    def seed(self) -> int | None:
        """The seed of the run that is resumed."""
        return self.found[1].config["debug"]["seed"] if self.found and self.resumes else None

    def restore(
        self,
        config: Config,
        load_weights: Callable[[ModelParts], None],
        model: ModelParts,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        average: "Average | None" = None,
        swarm: NoSwarm | None = None,
    ) -> Saves:
        """Fill model, optimizer and loader as `start` says; returns what will save them.

        `load_weights` reads weights that need not be a whole checkpoint of this recipe.
        """
        if swarm is not None:
            swarm.attach(model)
        if self.manager is not None:
            self.manager.about["config"] = config.model_dump(mode="json")
        if self.found is not None and (self.resumes or not self.section.initial_load_missing):
            with self.watch.saving():
                self._load(*self.found, model, optimizer, loader, average, swarm or NoSwarm())
        elif self.start.weights:
            load_weights(model)
            if average is not None:
                average.begin()
        own = self.manager, self.run_folder, self.tokens_at, self.watch
        return Saves(config, *own, model, optimizer, loader, self.best, average, swarm or NoSwarm())

    def _load(
        self,
        storage: Storage,
        manifest: Manifest,
        model: ModelParts,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        average: "Average | None",
        swarm: NoSwarm,
    ) -> None:
        assert self.manager is not None
        tensors, streams = state.model_tensors(model), {}
        shapes = self.manager.shapes(storage, manifest.step)
        if self.start.optimizer:
            tensors |= state.optimizer_tensors(model, optimizer)
        has_average = self.start.optimizer and any(name.startswith("average.") for name in shapes)
        if average is not None and has_average:
            tensors |= average.tensors()
        in_swarm = self.resumes and "swarm" in manifest.run
        if in_swarm:
            tensors |= swarm.tensors()
        if self.start.data:
            own = [name for name in state.data_tensors(loader) if name in shapes]
            streams = {name: torch.empty(shapes[name], dtype=torch.uint8) for name in own}
        self.manager.load(storage, manifest.step, tensors | streams)
        for tie in model.ties:
            tie.copy_first(optimizer.state)
        if average is not None:
            if not has_average:
                average.begin()
            for tie in model.ties:
                tie.copy_first(average.states)
        if in_swarm:
            swarm.load(manifest.run["swarm"])
        if self.start.data:
            state.load_data(loader, manifest.run["data"], streams)
        if self.start.optimizer and model.loss_scale is not None and "loss_scale" in manifest.run:
            model.loss_scale.load(manifest.run["loss_scale"])
        if self.resumes:
            self.manager.last_step = manifest.step
            if self.section.load_step >= 0:
                self.manager.leave_behind(manifest.step)
