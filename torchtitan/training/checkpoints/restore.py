"""Finds the checkpoint that a run starts from, and restores it.

`resume.plan_start` decides where the run starts. With `checkpoint.enable = false` that is step 0, and nothing is saved.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.checkpoint.storage import Manifest, Storage, find_checkpoints
from torchtitan.config.schema import Config
from torchtitan.observe.log import logger
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.training.checkpoints.contents import Content, Tensors
from torchtitan.training.checkpoints.resume import Start, describe_changes, plan_start


class Checkpoints:
    """Finds the checkpoint when constructed. Call `restore` once the model exists."""

    def __init__(self, config: Config, run_folder: Path, layout: str, tokens_per_step: int, watch: NoWatch) -> None:
        self.section, self.run_folder, self.watch = config.checkpoint, run_folder, watch
        self.tokens_per_step = tokens_per_step
        self.tokens_offset = 0  # tokens of steps whose batches had another size
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
        about = {"config": config.model_dump(mode="json"), "layout": layout, "versions": {"torch": torch.__version__}}
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

            holds_files = self.manager.on_rank_0(lambda: config.lora.rank is not None or bool(find_files(path)))
            if not holds_files:
                storage, step = find_checkpoints(path)
                manifest = self.manager.find(storage, step)
                if manifest is not None and manifest.config.get("lora", {}).get("rank"):  # read as merged
                    manifest, holds_files = None, True
        self.start = plan_start(
            self.section,
            manifest,
            storage.url,
            holds_files=holds_files,
            resumes=self.resumes,
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
        for change in describe_changes(manifest.config, config.model_dump(mode="json")) if self.resumes else []:
            logger.info(f"changed since that checkpoint: {change}")

    def tokens_at(self, step: int) -> int:
        """How many tokens (samples, of a model of one's own) the run has seen after this step."""
        return self.tokens_offset + step * self.tokens_per_step

    @property
    def seed(self) -> int | None:
        """The seed of the run that is resumed."""
        return self.found[1].config["debug"]["seed"] if self.found and self.resumes else None

    def restore(self, contents: list[Content], load_weights: Callable[[], None]) -> None:
        """Load what `start` says. `load_weights` reads weights that need not be a whole checkpoint of this recipe."""
        if self.found is not None and (self.resumes or not self.section.initial_load_missing):
            with self.watch.saving():
                self._load(*self.found, contents)
        elif self.start.weights:
            load_weights()
            for content in contents:
                content.begin()

    def _load(self, storage: Storage, manifest: Manifest, contents: list[Content]) -> None:
        assert self.manager is not None
        shapes = self.manager.shapes(storage, manifest.step)
        held = {"model", *manifest.run, *(name.partition(".")[0] for name in shapes)}
        taken = {c.name: c.room(shapes) for c in contents if c.name in held and self._takes(c)}
        tensors: Tensors = {name: tensor for room in taken.values() for name, tensor in room.items()}
        self.manager.load(storage, manifest.step, tensors)
        for content in contents:
            if content.name in taken:
                content.load(manifest.run.get(content.name), taken[content.name])
            else:
                content.begin()
        if self.resumes:
            self.manager.last_step = manifest.step
            if self.section.load_step >= 0:
                self.manager.leave_behind(manifest.step)

    def _takes(self, content: Content) -> bool:
        return self.resumes if content.taken_with == "resume" else getattr(self.start, content.taken_with)
