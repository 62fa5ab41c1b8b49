"""Saves a run while it trains, and completes its last save."""

from typing import Any

import torch

from torchtitan.checkpoint.manager import Checkpointer, SaveError
from torchtitan.checkpoint.storage import Manifest
from torchtitan.config.schema import Config
from torchtitan.observe.health import NotFiniteError
from torchtitan.observe.log import logger
from torchtitan.training.checkpoints.contents import Content, weights_alone
from torchtitan.training.checkpoints.restore import Checkpoints


class Saves:
    """Put the training loop inside: if a loss that is not finite ends the run, an asynchronous save is still completed.

    With `checkpoint.enable = false` there is no manager, and nothing is saved.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, contents: list[Content]) -> None:
        self.config, self.checkpoints, self.contents = config, checkpoints, contents
        self.manager, self.watch = checkpoints.manager, checkpoints.watch
        self.hf_folder = checkpoints.run_folder / "hf"
        if self.manager is not None:  # it was made before the run had a seed
            self.manager.about["config"] = config.model_dump(mode="json")

    def __enter__(self) -> "Saves":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Complete a save only after a bad loss, which ends all ranks alike: other errors may have ended some ranks."""
        if self.manager is not None and isinstance(error, NotFiniteError):
            try:
                with self.watch.saving():
                    self.manager.wait()
            except SaveError as failure:
                logger.error(failure)

    def is_time_up(self) -> bool:
        return self.manager is not None and self.manager.is_time_up()

    def due(self, step: int, time_is_up: bool, validates: bool) -> bool:
        """Whether to save after this step, also since it may be the best; `finish` saves the last one."""
        time_is_up = time_is_up or (validates and self.config.checkpoint.keep_best is not None)
        return self.manager is not None and step < self.config.training.steps and self.manager.due(step, time_is_up)

    def finish(self, step: int, skips_in_a_row: int, is_last: bool) -> None:
        """Save the step the run ends at, unless that is done, and wait until it is written."""
        if self.manager is None or self.config.checkpoint.load_only:
            return
        with self.watch.saving():
            self._finish(self.manager, step, skips_in_a_row, is_last)

    def _finish(self, manager: Checkpointer, step: int, skips_in_a_row: int, is_last: bool) -> None:
        is_last = is_last and not self.config.checkpoint.create_seed_checkpoint  # a seed checkpoint holds everything
        manager.wait()
        if manager.last_step != step:
            # If the data ended before the last step, everything is saved: with more data the run can resume.
            only_weights = (
                is_last and step == self.config.training.steps and self.config.checkpoint.last_save_model_only
            )
            self.save(step, skips_in_a_row, only_weights)
            manager.wait()
            if manager.last_step != step:
                raise SaveError(
                    f"the checkpoint of the last step, {step}, could not be saved; the error above says why"
                )
        if is_last and self.config.checkpoint.last_save_in_hf:
            try:
                manager.on_rank_0(lambda: self._write_hf(manager, step))
            except OSError as error:
                raise SaveError(f"step {step} is saved, but {self.hf_folder} could not be written: {error}") from error

    def _write_hf(self, manager: Checkpointer, step: int) -> None:
        manifest = manager.storage.examine(step)
        assert isinstance(manifest, Manifest), manifest
        from torchtitan.weights.stored import open_run, write_hf

        source = open_run(manager.storage, manifest)
        write_hf(source, str(self.hf_folder), source.assets, getattr(torch, self.config.checkpoint.export_dtype))
        logger.info(f"wrote the Hugging Face folder {self.hf_folder}")

    def save(self, step: int, skips_in_a_row: int, only_weights: bool = False) -> None:
        assert self.manager is not None
        run: dict[str, Any] = {"tokens": self.checkpoints.tokens_at(step), "skips_in_a_row": skips_in_a_row}
        for content in self.contents:
            left_out = only_weights and content.name == "swarm"  # whose tensors are left out, too
            if not left_out and (state := content.state()) is not None:
                run[content.name] = state
        if only_weights:
            tensors = weights_alone(self.contents, getattr(torch, self.config.checkpoint.export_dtype))
        else:
            tensors = {name: tensor for content in self.contents for name, tensor in content.tensors().items()}
        with self.watch.saving():
            self.manager.save(step, tensors, run)
