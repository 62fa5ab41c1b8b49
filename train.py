"""Train a model: one file, read from top to bottom.

    python train.py --job.config_file train_configs/debug_model.toml --training.steps 20

Every option: `python train.py --help`. On several devices: `./run_llama_train.sh`. The run is a function of the
configuration, the data and the seed, never of how many processes share the work.
"""

import gc
import os
import sys

from torchtitan.config.load import to_toml, with_seed
from torchtitan.config.schema import Config
from torchtitan.hardware import Place, end_with_launcher, read_place
from torchtitan.models.families import load_run_or_exit
from torchtitan.models.spec import Blueprint

if __name__ == "__main__":  # before torch is loaded, so that --help and a mistake in the file answer at once
    place = read_place()
    config, blueprint = load_run_or_exit(sys.argv[1:], place.world_size, place.rank)
    for asked, verb in (
        (config.comm.mode == "fake_backend", "dry_run"),
        (config.checkpoint.create_seed_checkpoint, "seed_checkpoint"),
    ):
        if asked:  # torchtitan has a key where this recipe has a verb
            os.execv(sys.executable, [sys.executable, "-m", "torchtitan", verb, "--", *sys.argv[1:]])
    gc.disable()  # imports leave no garbage, and looking for it takes a quarter of their time

from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan.observe.failure import leave
from torchtitan.observe.interrupt import EXIT_CODE, Interrupt
from torchtitan.observe.log import logger, start_logging, wants_color
from torchtitan.observe.metrics import MetricsWriter
from torchtitan.observe.profiling import profile
from torchtitan.observe.run_folder import start_record
from torchtitan.observe.watch import PeerError, Watch
from torchtitan.parallel import collectives
from torchtitan.refusal import Refusal
from torchtitan.training.checkpoints import Checkpoints
from torchtitan.training.optimizer import build_optimizer
from torchtitan.training.report import Reporter
from torchtitan.training.start import start_run
from torchtitan.training.update import Update
from torchtitan.training.validate import Validator


@record  # under torchrun, the error shown is that of the rank that failed first
def main(config: Config, blueprint: Blueprint, place: Place) -> None:
    training, comm = config.training, config.comm

    # The ranks meet. Everything that can be refused is refused before that.
    run = start_run(config, blueprint, place, records=True)
    watch = Watch(run.folder, comm.init_timeout_seconds, run.mesh.groups)
    peak = run.find_peak()
    attention = run.pick_attention()

    # The run starts at step 0 or after a checkpoint.
    checkpoints = Checkpoints(config, run.folder, str(run.dims), run.tokens_per_step)
    seed = run.agree_on_seed(checkpoints.seed)
    recorded = with_seed(config, seed)  # the configuration that repeats this run
    loader, held_out = run.build_training_loader(seed), run.build_validation_loader()
    model = run.build_model(seed)
    logger.info(f"{run.describe_model()}, seed {seed}")
    if (total := config.lr_scheduler.total_steps or 0) > training.steps:
        logger.info(f"the learning rate follows a schedule of {total} steps (lr_scheduler.total_steps)")
    optimizer = build_optimizer(
        model.named_parameters(), config.optimizer, config.compile, run.blueprint.spec.takes_muon
    )
    forward_backward = run.build_forward_backward(model)
    update = Update(config, model, optimizer, run.mesh.stage_group)
    begun = step = checkpoints.restore(recorded, run.blueprint, model, optimizer, loader)
    update.after_update()

    # Rank 0 writes the records.
    writer = None
    if place.rank == 0:
        records = start_record(run.folder, recorded, goes_on=checkpoints.resumes)
        if config.job.print_config:
            print(to_toml(recorded))
        writer = MetricsWriter(recorded, records, step, training.steps, checkpoints.tokens_at, run.unit)
    collectives.make_trace_folder(comm, run.folder, run.device)
    reporter = Reporter(run, writer, peak, checkpoints.tokens_at, checkpoints.skips_in_a_row)
    validator = Validator(run, forward_backward, held_out, writer)
    sampler = None
    if config.metrics.sample_freq is not None:
        from torchtitan.training.sample import build_sampler

        sampler = build_sampler(run, forward_backward, writer)
    interrupt = Interrupt(saves=config.checkpoint.enable and not config.checkpoint.load_only)
    profiler = profile(config.profiling, run.folder, place.rank, step, run.device, reporter.paused)

    gc.disable()  # a collection at a random moment on one rank makes all the others wait
    stopping = False
    with attention, profiler as step_ended, watch, interrupt, checkpoints:
        while step < training.steps and not stopping:
            batch = reporter.wait_for(loader.next)
            has_ended, is_asked_to_stop, is_time_up = collectives.agree(
                batch is None, interrupt.is_asked(), checkpoints.is_time_up()
            )
            if batch is None or has_ended:
                loader.end()
                reporter.data_ended(step)
                break

            watch.step = step = step + 1
            update.begin(step)
            run.seed_draws(seed, step)
            loss = forward_backward(batch.to(run.device))
            reporter.phases.mark()
            gradient_norm = update.apply()
            reporter.add(batch.origin, loss, gradient_norm)

            saves = checkpoints.due(step, is_time_up)
            stopping = is_asked_to_stop and step < training.steps
            if saves or reporter.due(step):  # losses are judged before they are saved
                reporter.flush(step, update.learning_rate)
            if validator.due(step) and not stopping:
                with reporter.paused():
                    validator(step)
            if sampler is not None and sampler.due(step):
                with reporter.paused():
                    sampler(step)
            if saves and not stopping:  # after validation, so that a run resumed from here does not repeat it
                with reporter.paused():
                    checkpoints.save(step, reporter.skips_in_a_row)
            if step == begun + 1:  # the slow first step is over
                collectives.set_timeout(comm.train_timeout_seconds, run.mesh.groups)
                watch.set_timeout(comm.train_timeout_seconds)
            if step % training.gc_freq == 0:
                gc.collect(1)
            step_ended()

        reporter.flush(step, update.learning_rate)
        checkpoints.finish(step, reporter.skips_in_a_row, is_last=not stopping)
        validator.finish(step, goes_on=stopping)  # after a kill here, the next start makes it up

    loader.close()
    reporter.close(step, run.folder)
    run.stop()
    if stopping:
        logger.info(interrupt.how_to_go_on)
        raise SystemExit(EXIT_CODE)


if __name__ == "__main__":
    end_with_launcher()
    gc.freeze()  # so that no later collection looks through the imports
    start_logging(place.rank, wants_color(config.metrics.disable_color_printing))
    try:
        main(config, blueprint, place)
    except KeyboardInterrupt:  # before the loop, where `Interrupt` would have ended the step first
        raise SystemExit(130) from None
    except Refusal as error:
        leave(error, shown=isinstance(error, PeerError))
