"""Save the initial weights as step 0 and train nothing: one beginning for runs that are to be compared.

python -m torchtitan seed_checkpoint train_configs/debug_model.toml
"""

import argparse
from collections.abc import Sequence

from torchtitan.config.load import with_seed
from torchtitan.config.schema import Config
from torchtitan.hardware import Place, read_place
from torchtitan.models.families import load_run_or_exit
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger, start_logging
from torchtitan.observe.run_folder import start_record
from torchtitan.observe.watch import Watch
from torchtitan.training.checkpoints import Checkpoints
from torchtitan.training.optimizer import build_optimizer
from torchtitan.training.start import start_run

_KEYS = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    place = read_place()
    file = ["--job.config_file", args.file] if args.file else []
    argv = [*file, *options, *_KEYS]
    config, blueprint = load_run_or_exit(argv, place.world_size, place.rank, prog="seed_checkpoint")
    start_logging(place.rank)
    save_seed_checkpoint(config, blueprint, place)


def save_seed_checkpoint(config: Config, blueprint: Blueprint, place: Place) -> None:
    run = start_run(config, blueprint, place, records=True)
    watch = Watch(run.folder, config.comm.init_timeout_seconds, run.mesh.groups)
    checkpoints = Checkpoints(config, run.folder, str(run.dims), run.tokens_per_step)
    seed = run.agree_on_seed(checkpoints.seed)
    recorded = with_seed(config, seed)
    loader, model = run.build_training_loader(seed), run.build_model(seed)
    optimizer = build_optimizer(
        model.named_parameters(), config.optimizer, config.compile, run.blueprint.spec.takes_muon
    )
    checkpoints.restore(recorded, run.blueprint, model, optimizer, loader)
    if place.rank == 0:
        start_record(run.folder, recorded, goes_on=checkpoints.resumes)
    with watch, checkpoints:
        checkpoints.finish(0, checkpoints.skips_in_a_row, is_last=False)
    logger.info(f"saved the initial weights of {run.describe_model()}, seed {seed}, as step 0 in {run.folder}")
    loader.close()
    run.stop()
