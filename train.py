"""Train a model: one file, read from top to bottom.

    python train.py --job.config_file train_configs/debug_model.toml --training.steps 20

Every option: `python train.py --help`. On several devices: `./run_llama_train.sh`. The run is a function of the
configuration, the data and the seed; how many processes share the work changes only rounding
(docs/recipe/figures.md) and what a model's dropout draws.
"""

import gc
import signal
import sys

if __name__ == "__main__":  # Ctrl-C during the imports ends Python without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torchtitan.config.load import to_toml, with_seed
from torchtitan.config.schema import Config
from torchtitan.hardware import EXIT_UNFINISHED, Place, end_with_launcher, has_launcher, read_place
from torchtitan.models.families import load_run_or_exit, refuse_other_programs
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger, start_logging, wants_color
from torchtitan.refusal import ends_in_a_line


def main(config: Config, blueprint: Blueprint, place: Place) -> None:
    # torch is loaded only now, so that --help and a mistake in the configuration answer at once.
    from torchtitan.observe.interrupt import Interrupt
    from torchtitan.observe.metrics import MetricsWriter
    from torchtitan.observe.run_folder import start_record
    from torchtitan.parallel import collectives
    from torchtitan.training.assemble import start_run
    from torchtitan.training.checkpoints.contents import list_contents
    from torchtitan.training.checkpoints.restore import Checkpoints
    from torchtitan.training.checkpoints.saves import Saves
    from torchtitan.training.others import join_others
    from torchtitan.training.report import Reporter
    from torchtitan.training.sample import build_sampler
    from torchtitan.training.update import Update
    from torchtitan.training.validate import Validator

    training, comm = config.training, config.comm

    # The ranks meet. What can be known before that is refused before that.
    run = start_run(config, blueprint, place, records=True)
    watch = run.start_watch(comm.init_timeout_seconds)
    peak = run.find_peak()
    attention = run.pick_attention()

    # The run starts at step 0 or after a checkpoint.
    checkpoints = Checkpoints(config, run.folder, str(run.dims), run.tokens_per_step, watch)
    others = join_others(config, run)  # whom the run meets after a step: with [swarm], other sites
    seed = run.agree_on_seed(checkpoints.seed if others.seed is None else others.seed)
    config = with_seed(config, seed)  # from here on it is the configuration that repeats this run
    loader, held_out = run.build_training_loader(seed, others.part), run.build_validation_loader()
    model = run.build_model(seed)
    logger.info(f"{run.describe_model()}, seed {seed}")
    if (total := config.lr_scheduler.total_steps or 0) > training.steps:
        logger.info(f"the learning rate follows a schedule of {total} steps (lr_scheduler.total_steps)")
    optimizer = run.build_optimizer(model)
    forward_backward = run.build_forward_backward(model)
    update = Update(config, model, optimizer, run.mesh.stage_group, others.warming(run.learning_rate_factor))
    others.attach(model)
    contents = list_contents(model, optimizer, loader, checkpoints.best, update.average, others)
    checkpoints.restore(contents, lambda: run.load_weights(model))
    saves = Saves(config, checkpoints, contents)
    begun = step = others.begin(checkpoints.start.step)
    update.after_update()  # what depends on the weights, such as float8's scales, depends on those that were loaded

    # Rank 0 writes the records.
    writer = None
    if place.rank == 0:
        records = start_record(run.folder, config, goes_on=checkpoints.resumes)
        if config.job.print_config:
            print(to_toml(config))
        writer = MetricsWriter(config, records, step, training.steps, checkpoints.tokens_at, run.unit)
    run.make_trace_folder()
    reporter = Reporter(run, watch, writer, peak, checkpoints.tokens_at, checkpoints.skips_in_a_row)
    validator = Validator(run, forward_backward, held_out, writer, checkpoints.best, watch)
    sampler = build_sampler(run, forward_backward, writer)
    interrupt = Interrupt(config.checkpoint.enable and not config.checkpoint.load_only, has_launcher())
    profiler = run.profile(step, reporter.paused)

    gc.disable()  # a collection at a random moment on one rank makes all the others wait
    stopping = False
    with attention, profiler as step_ended, watch, interrupt, saves:
        while step < training.steps and not (stopping or validator.is_over):
            batch = reporter.wait_for(loader.next)
            has_ended, is_asked_to_stop, is_time_up = collectives.agree(
                batch is None, interrupt.is_asked(), saves.is_time_up()
            )
            if batch is None or has_ended:
                loader.end()
                reporter.data_ended(step)
                break

            watch.step = step = step + 1
            update.begin(step)
            run.seed_draws(seed, step)
            loss = forward_backward(batch.to(run.device))  # training/step.py
            reporter.phases.mark()
            gradient_norm = update.apply(loss.count)
            others.meet(step, interrupt.is_asked)
            reporter.add(batch.origin, loss, gradient_norm)

            saving = saves.due(step, is_time_up, validator.due(step))
            stopping = is_asked_to_stop and step < training.steps
            if saving or reporter.due(step):  # losses are judged before they are saved
                reporter.flush(step, update.learning_rate)
            if validator.due(step) and not stopping:
                with reporter.paused(), update.averaged():
                    validator(step)
            if sampler is not None and sampler.due(step):
                with reporter.paused(), update.averaged():
                    sampler(step)
            if saving and not stopping:  # after validation, so that a run resumed from here does not repeat it
                with reporter.paused():
                    saves.save(step, reporter.skips_in_a_row)
            if step == begun + 1:  # the slow first step is over
                collectives.set_timeout(comm.train_timeout_seconds, run.mesh.groups)
                watch.set_timeout(comm.train_timeout_seconds)
            if step % training.gc_freq == 0:
                gc.collect(1)
            step_ended()

        reporter.flush(step, update.learning_rate)
        saves.finish(step, reporter.skips_in_a_row, is_last=not stopping)
        with update.averaged():
            validator.finish(step, goes_on=stopping)  # after a kill here, the next start makes it up

    others.close(step)
    loader.close()
    reporter.close(step)
    run.stop()
    if stopping:
        logger.info(interrupt.how_to_go_on)
        raise SystemExit(EXIT_UNFINISHED)


if __name__ == "__main__":
    place = read_place()
    config, blueprint = load_run_or_exit(sys.argv[1:], place.world_size, place.rank)
    end_with_launcher()
    start_logging(place.rank, wants_color(config.metrics.disable_color_printing))
    gc.disable()  # imports leave no garbage, and looking for it takes a quarter of their time
    try:
        refuse_other_programs(config, sys.argv[1:])
        with ends_in_a_line("stopped before the first step"):  # in the loop, `Interrupt` ends the step first
            from torch.distributed.elastic.multiprocessing.errors import record

            record(main)(config, blueprint, place)  # under torchrun, the error of the rank that failed first is shown
    except Exception as error:
        from torchtitan.observe.failure import leave

        leave(error)
