"""Saves the initial weights as step 0 and trains nothing."""

from torchtitan.config.load import with_seed
from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger
from torchtitan.observe.run_folder import start_record
from torchtitan.training.assemble import start_run
from torchtitan.training.checkpoints.contents import list_contents
from torchtitan.training.checkpoints.restore import Checkpoints
from torchtitan.training.checkpoints.saves import Saves
from torchtitan.training.others import NoOthers


def save_seed_checkpoint(config: Config, blueprint: Blueprint, place: Place) -> None:
    run = start_run(config, blueprint, place, records=True)
    watch = run.start_watch(config.comm.init_timeout_seconds)
    checkpoints = Checkpoints(config, run.folder, str(run.dims), run.tokens_per_step, watch)
    seed = run.agree_on_seed(checkpoints.seed)
    config = with_seed(config, seed)
    loader, model = run.build_training_loader(seed), run.build_model(seed)
    optimizer = run.build_optimizer(model)
    contents = list_contents(model, optimizer, loader, checkpoints.best, None, NoOthers())
    checkpoints.restore(contents, lambda: run.load_weights(model))
    saves = Saves(config, checkpoints, contents)
    if place.rank == 0:
        start_record(run.folder, config, goes_on=checkpoints.resumes)
    with watch, saves:
        saves.finish(0, checkpoints.skips_in_a_row, is_last=False)
    logger.info(f"saved the initial weights of {run.describe_model()}, seed {seed}, as step 0 in {run.folder}")
    loader.close()
    run.stop()
