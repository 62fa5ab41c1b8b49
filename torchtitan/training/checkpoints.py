"""A run and its checkpoints: where it begins, when it is saved, how it ends; switched off, it begins at 0."""

from pathlib import Path
from typing import Any

import torch

from torchtitan.checkpoint.manager import Checkpointer, SaveError
from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.config.load import flat
from torchtitan.config.schema import Config
from torchtitan.data.loader import Loader
from torchtitan.models.spec import Blueprint
from torchtitan.observe.health import NotFiniteError
from torchtitan.observe.log import logger
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.training import state
from torchtitan.weights.stored import check_shape, find_checkpoints, load_weights, open_model, open_run, write_hf


class Checkpoints:
    """Looks for a checkpoint at once; `restore` when the parts of the run are built, `finish` at its end.

    Put the training loop inside: a run that a bad loss ends completes what it is writing behind the training.
    """

    def __init__(self, config: Config, run_folder: Path, layout: str, tokens_per_step: int) -> None:
        self.section, self.run_folder, self.last_step = config.checkpoint, run_folder, config.training.steps
        self.tokens_per_step, self.tokens_offset = tokens_per_step, 0  # to add to steps times tokens
        self.skips_in_a_row = 0  # updates left out just before the step it begins after
        self.manager: Checkpointer | None = None
        self.found: tuple[Storage, Manifest] | None = None
        self.resumes = False  # what was found is this run's own
        if not self.section.enable:
            return
        storage = Storage(
            self.section.folder if "://" in self.section.folder else str(run_folder / self.section.folder)
        )
        about = {"layout": layout, "versions": {"torch": torch.__version__}}
        self.manager = Checkpointer(self.section, storage, about, config.comm.init_timeout_seconds)
        manifest = self.manager.find(storage, self.section.load_step)
        self.resumes = manifest is not None
        excluded, begun_from = self.section.exclude_from_loading, self.section.initial_load_path
        if manifest is not None and "train_state" in excluded and begun_from is None:
            raise Refusal(
                f'checkpoint.exclude_from_loading = ["train_state"] would begin this run again at step 0, over its own '
                f"records; remove it to go on from step {manifest.step}, or begin another run, in another "
                f'job.dump_folder, with checkpoint.initial_load_path = "{storage.url}"'
            )
        if manifest is not None and manifest.step > 0 and self.section.create_seed_checkpoint:
            raise Refusal(
                f"checkpoint.create_seed_checkpoint = true saves where a run begins, but {storage.url} has one that "
                f"is at step {manifest.step}; choose another job.dump_folder, or remove it to go on"
            )
        if manifest is None and self.section.initial_load_path is not None and not self.section.initial_load_in_hf:
            storage, step = find_checkpoints(self.section.initial_load_path)
            manifest = self.manager.find(storage, step)
            if manifest is None:
                raise Refusal(
                    f'checkpoint.initial_load_path = "{self.section.initial_load_path}" has no complete checkpoint; '
                    f"give a folder that has one, or remove it"
                )
        if manifest is not None:
            self.found = storage, manifest
            logger.info(f"{'go on' if self.resumes else 'begin'} from step {manifest.step} in {storage.url}")
            for change in _changes(manifest.config, config.model_dump(mode="json")) if self.resumes else []:
                logger.info(f"changed since then: {change}")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """All ranks leave alike with a bad loss; after another error there may be none to write together with."""
        if self.manager is not None and isinstance(error, NotFiniteError):
            try:
                self.manager.wait()
            except SaveError as failure:
                logger.error(failure)

    @property
    def seed(self) -> int | None:
        """The seed this run began with, if it goes on."""
        return self.found[1].config["debug"]["seed"] if self.found and self.resumes else None

    def restore(
        self, config: Config, blueprint: Blueprint, model: ModelParts, optimizer: torch.optim.Optimizer, loader: Loader
    ) -> int:
        """Fill the parts of the run with what was found; the step it was saved after."""
        self.model, self.optimizer, self.loader = model, optimizer, loader
        if self.manager is None:
            return 0
        self.manager.about["config"] = config.model_dump(mode="json")
        if self.found is None:
            if self.section.initial_load_in_hf:
                source = open_model(self.section.initial_load_path or config.model.hf_assets_path, config.model.name)
                check_shape(source, blueprint)
                load_weights(source, model)
                logger.info(f"begin with the weights of {source.weights.where}")
            return 0
        storage, manifest = self.found
        anew = set(self.section.exclude_from_loading)
        saved = manifest.config["optimizer"]["name"]
        if self.resumes and self.section.initial_load_path is not None:
            # The exclusions were for the checkpoint this run began from; only a changed optimizer still begins anew.
            anew &= {"optimizer"} if saved != config.optimizer.name else set()
        if not self.resumes and self.section.initial_load_model_only:
            anew = {"optimizer", "dataloader", "train_state"}
        shapes = self.manager.shapes(storage, manifest.step)
        only_weights = not any(name.startswith("optimizer.") for name in shapes)
        if only_weights and self.resumes and manifest.step == self.last_step:
            anew = {"optimizer", "dataloader"}  # the run has ended, as it was told to: nothing is left but `finish`
        if "optimizer" not in anew and only_weights:
            fix = "begin another with checkpoint.initial_load_path, in another job.dump_folder"
            fix = fix if self.resumes else "set checkpoint.initial_load_model_only = true"
            raise Refusal(
                f"step {manifest.step} in {storage.url} has only weights (checkpoint.last_save_model_only), a run "
                f"cannot go on from it; {fix}"
            )
        if "optimizer" not in anew and saved != config.optimizer.name:
            raise Refusal(
                f'optimizer.name = "{config.optimizer.name}", but step {manifest.step} in {storage.url} was saved with '
                f'"{saved}", which remembers other things; set it back, or let it begin anew with '
                f'checkpoint.exclude_from_loading = ["optimizer"]'
            )
        tensors, streams = state.model_tensors(model), {}
        if "optimizer" not in anew:
            tensors |= state.optimizer_tensors(model, optimizer)
        if "dataloader" not in anew:
            own = [name for name in state.data_tensors(loader) if name in shapes]
            streams = {name: torch.empty(shapes[name], dtype=torch.uint8) for name in own}
        self.manager.load(storage, manifest.step, tensors | streams)
        if model.tied is not None:
            model.tied.copy_first(optimizer.state)
        if "dataloader" not in anew:
            state.load_data(loader, manifest.run["data"], streams)
        if "train_state" in anew:
            return 0
        if self.resumes and self.section.load_step >= 0:
            self.manager.leave_behind(manifest.step)
        self.manager.last_step = manifest.step if self.resumes else -1
        self.tokens_offset = manifest.run["tokens"] - manifest.step * self.tokens_per_step
        self.skips_in_a_row = manifest.run.get("skips_in_a_row", 0)
        return manifest.step

    def is_time_up(self) -> bool:
        return self.manager is not None and self.manager.is_time_up()

    def due(self, step: int, time_is_up: bool) -> bool:
        """Whether to save after a step; the last one is `finish`'s."""
        return self.manager is not None and step < self.last_step and self.manager.due(step, time_is_up)

    def finish(self, step: int, skips_in_a_row: int, is_last: bool) -> None:
        """Save where the run ends, if that is not done yet, and wait until it is written."""
        if self.manager is None or self.section.load_only:
            return
        is_last = is_last and not self.section.create_seed_checkpoint  # from which runs begin: all of it, and no end
        self.manager.wait()
        if self.manager.last_step != step:
            # Not where the data has ended: with more of it, or more epochs, the run goes on.
            only_weights = is_last and step == self.last_step and self.section.last_save_model_only
            self.save(step, skips_in_a_row, only_weights)
            self.manager.wait()
            if self.manager.last_step != step:
                raise SaveError(f"the checkpoint of the last step, {step}, could not be saved; see above")
        if is_last and self.section.last_save_in_hf:
            try:
                self.manager.on_rank_0(lambda: self._write_hf(step))  # the others wait, for validation may follow
            except OSError as error:
                raise SaveError(
                    f"step {step} is saved, but {self.run_folder / 'hf'} is not written: {error}"
                ) from error

    def _write_hf(self, step: int) -> None:
        assert self.manager is not None
        manifest = self.manager.storage.examine(step)
        assert isinstance(manifest, Manifest), manifest
        source = open_run(self.manager.storage, manifest)
        write_hf(source, str(self.run_folder / "hf"), source.assets, getattr(torch, self.section.export_dtype))
        logger.info(f"wrote {self.run_folder / 'hf'} for Hugging Face")

    def save(self, step: int, skips_in_a_row: int, only_weights: bool = False) -> None:
        assert self.manager is not None
        tensors = state.model_tensors(self.model)
        if only_weights:
            tensors = {name: tensor.to(getattr(torch, self.section.export_dtype)) for name, tensor in tensors.items()}
        else:
            tensors |= state.optimizer_tensors(self.model, self.optimizer) | state.data_tensors(self.loader)
        tokens = self.tokens_offset + step * self.tokens_per_step
        run = {"tokens": tokens, "skips_in_a_row": skips_in_a_row, "data": state.data_header(self.loader)}
        self.manager.save(step, tensors, run)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two configurations, apart from what a run is called and where it lies."""
    old, new = flat(before), flat(now)
    names = [name for name in new if name.partition(".")[0] != "job" and name != "debug.seed"]
    return [
        f"{name} = {new[name]}, was {old.get(name, 'not there')}" for name in names if new[name] != old.get(name, None)
    ]
