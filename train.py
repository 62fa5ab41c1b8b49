"""Train a Llama: one file, read from top to bottom.

    python train.py --job.config_file train_configs/debug_model.toml --training.steps 20

Every option: `python train.py --help`. On several devices: `./run_llama_train.sh`. The run is a function of the
configuration, the data and the seed, never of how many processes share the work.
"""

import gc
import sys

from torchtitan.config.load import load_config_or_exit, to_toml
from torchtitan.config.schema import Config
from torchtitan.hardware import Place, read_place

if __name__ == "__main__":  # before torch is loaded, so that --help and a mistake in the file answer at once
    place = read_place()
    config = load_config_or_exit(sys.argv[1:], place.world_size, place.rank)
    gc.disable()  # imports leave no garbage; looking for it takes a quarter of their time

import os
import secrets
import time
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan import hardware
from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.models.llama.args import count_parameters, flops_per_token
from torchtitan.observe.failure import leave
from torchtitan.observe.interrupt import EXIT_CODE, Interrupt
from torchtitan.observe.log import logger, start_logging, wants_color
from torchtitan.observe.metrics import MetricsWriter
from torchtitan.observe.profiling import profile
from torchtitan.observe.run_folder import claim, open_run_folder, start_record
from torchtitan.observe.watch import PeerError, Watch
from torchtitan.parallel import collectives
from torchtitan.parallel.float8 import update_float8_scales
from torchtitan.parallel.mesh import build_mesh
from torchtitan.planner.dry_run import dry_run
from torchtitan.refusal import Refusal
from torchtitan.training import build
from torchtitan.training.checkpoints import Checkpoints
from torchtitan.training.loss import build_loss
from torchtitan.training.lr_schedule import learning_rate_factor
from torchtitan.training.optimizer import apply_update, build_optimizer, update_in_backward
from torchtitan.training.report import Reporter
from torchtitan.training.step import ForwardBackward
from torchtitan.training.validate import Validator


@record  # under torchrun, the error shown is that of the rank that failed first
def main(config: Config, place: Place) -> None:
    if config.comm.mode == "fake_backend":
        dry_run(config, place)
        return

    # What can be refused is refused here, before any process waits for another.
    training = config.training
    hardware.check_restarts(place.world_size)
    device = hardware.pick_device(place.local_rank)
    hardware.keep_to_own_cores(place, device)
    build.check_environment(config, device)
    build.check_data(config)
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    args = build.build_model_args(config, tokenizer)
    if config.debug.deterministic:
        hardware.use_deterministic_kernels(config.debug.deterministic_warn_only)
    run_folder = open_run_folder(config) if place.rank == 0 else Path(config.job.dump_folder)
    claimed = claim(run_folder) if place.rank == 0 else None

    # The mesh
    dims = plan_layout(config.parallelism, place.world_size)
    plan = plan_batch(training, dims.dp)
    os.environ |= collectives.flight_recorder(config.comm, run_folder)
    collectives.start_process_group(device, place.rank, place.world_size, config.comm.init_timeout_seconds)
    mesh = build_mesh(dims, device.type)
    collectives.set_timeout(config.comm.init_timeout_seconds, mesh.groups)
    watch = Watch(run_folder, config.comm.init_timeout_seconds, mesh.groups)

    # Where the run begins: anew, or after its last checkpoint
    tokens_per_step = plan.global_batch_size * training.seq_len
    checkpoints = Checkpoints(config, run_folder, str(dims), tokens_per_step)
    seed = config.debug.seed if config.debug.seed is not None else checkpoints.seed
    seed = collectives.from_rank_0(secrets.randbits(31) if seed is None else seed)
    config = config.model_copy(update={"debug": config.debug.model_copy(update={"seed": seed})})
    peak = hardware.find_peak(device, getattr(torch, training.mixed_precision_param))
    logger.info(f"{config.job.description}: {place.world_size} x {hardware.describe_device(device)}, mesh {dims}")
    logger.info(f"peak {peak.flops / 1e12:.2f} TFLOP/s a device ({peak.origin}), seed {seed}")
    if advice := hardware.advise_type(device, training.mixed_precision_param):
        logger.info(advice)
    kernel, attention = hardware.pick_attention(
        device,
        getattr(torch, training.mixed_precision_param),
        args.n_heads // dims.tp,
        args.n_kv_heads // dims.tp,
        args.head_dim,
        training.seq_len // (2 * dims.cp if dims.cp > 1 else 1),
        is_masked=config.model.attn_mask_type == "block_causal",
    )
    if kernel and dims.cp == 1:  # context parallelism has torch pick one for each piece
        logger.info(f"attention by {kernel}")

    # The data
    interrupt = Interrupt(saves=config.checkpoint.enable and not config.checkpoint.load_only)
    vote = collectives.Vote(interrupt.is_asked, checkpoints.is_time_up)
    loader = build.build_training_loader(config, plan, tokenizer, mesh, seed, device, vote)
    held_out = build.build_validation_loader(config, plan, tokenizer, mesh, device)

    # The model, its loss and its optimizer
    model = build.build_model(config, args, mesh, device, seed)
    forward_backward = ForwardBackward(model, build_loss(config.compile), mesh, training, config.parallelism, device)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, config.compile)
    norm = collectives.GlobalNorm(mesh.stage_group)
    if config.optimizer.early_step_in_backward:
        update_in_backward(optimizer, norm.add, lambda: learning_rate)
    begun = step = checkpoints.restore(config, args, model, optimizer, loader)
    update_float8_scales(model.stages.values(), config.float8)
    logger.info(
        f"{config.model.name} {config.model.flavor}: {count_parameters(args):,} parameters, "
        f"global batch {plan.global_batch_size} x {training.seq_len} tokens, "
        f"local batches a rank: {plan.num_local_batches}"
    )

    # What is seen of it
    writer = None
    if place.rank == 0:
        records = start_record(run_folder, config, goes_on=checkpoints.resumes)
        if config.job.print_config:
            print(to_toml(config))
        writer = MetricsWriter(config, records, step, training.steps, f"{peak.origin} peak")
    collectives.make_trace_folder(config.comm, run_folder, device)
    reporter = Reporter(
        training,
        config.optimizer.leaves_out_updates,
        writer,
        mesh.losses.get_group(),
        place.world_size,
        device,
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(args, training.seq_len),
        peak=peak,
        tokens_offset=checkpoints.tokens_offset,
        skips_in_a_row=checkpoints.skips_in_a_row,
    )

    validate = None
    if held_out is not None:
        validate = Validator(config.validation, forward_backward, held_out, device, mesh.losses.get_group(), writer)

    gc.disable()  # a collection at a random moment on one rank makes all the others wait
    learning_rate, stopping = 0.0, False
    last_step = 0 if config.checkpoint.create_seed_checkpoint else training.steps
    profiler = profile(config.profiling, run_folder, place.rank, step, device, reporter.paused)
    with attention, profiler as step_ended, watch, interrupt, checkpoints:
        while step < last_step:
            asked = time.perf_counter()
            batch = loader.next()
            if batch is None:
                reporter.data_ended(step)
                break
            data_seconds = time.perf_counter() - asked
            asked_to_stop, time_is_up = vote.answers  # of the vote that loader.next() took

            watch.step = step = step + 1
            learning_rate = config.optimizer.lr * learning_rate_factor(step, config.lr_scheduler, training.steps)
            loss = forward_backward(batch.to(device))
            norm.add(*model.own_gradients())
            gradient_norm = norm.total()
            apply_update(optimizer, learning_rate, gradient_norm, training.max_norm)
            update_float8_scales(model.stages.values(), config.float8)

            reporter.add(batch.origin, loss, gradient_norm, data_seconds)
            saving = checkpoints.due(step, time_is_up)  # what is saved has been judged
            if saving or step == 1 or step % config.metrics.log_freq == 0 or step == training.steps:
                reporter.flush(step, learning_rate)
            if stopping := asked_to_stop and step < training.steps:
                break
            if validate is not None and step % config.validation.freq == 0:
                with reporter.paused():
                    validate(step)
            if saving:  # after it: a run that goes on from here has validated
                with reporter.paused():
                    checkpoints.save(step, reporter.skips_in_a_row)
            if watch.timeout_seconds != config.comm.train_timeout_seconds:  # the slow first step is over
                collectives.set_timeout(config.comm.train_timeout_seconds, mesh.groups)
                watch.timeout_seconds = config.comm.train_timeout_seconds
            if step % training.gc_freq == 0:
                gc.collect(1)
            step_ended()
        reporter.flush(step, learning_rate)
        checkpoints.finish(step, reporter.skips_in_a_row, is_last=not stopping)
        is_validated = stopping == bool(step % config.validation.freq)  # or not due, as the run goes on
        if validate is not None and step > begun and not is_validated:
            validate(step)

    loader.close()
    if writer is not None:
        writer.close()
        logger.info(reporter.summary(step))
        logger.info(f"run folder: {run_folder} ({', '.join(sorted(path.name for path in run_folder.glob('[!.]*')))})")
        if config.metrics.enable_tensorboard:
            python = min(os.path.relpath(sys.executable), sys.executable, key=len)
            tensorboard = f"{python} -m tensorboard.main --logdir {run_folder}"
            logger.info(f"look at it: {tensorboard}, then open http://localhost:6006")
    collectives.stop_process_group()
    if claimed is not None:
        claimed.close()
    if stopping:
        raise SystemExit(EXIT_CODE)


if __name__ == "__main__":
    gc.freeze()  # nor is anything of them looked through later, or one by one at the end
    start_logging(place.rank, wants_color(config.metrics.disable_color_printing))
    try:
        main(config, place)
    except Refusal as error:
        leave(error, shown=isinstance(error, PeerError))
