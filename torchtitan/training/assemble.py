"""The one place where a run is put together: its refusals, then its ranks and their mesh.

Training, evaluation and generation begin with `start_run`, the dry run and the probe with `lay_out_ranks`.
"""

import os
import pkgutil
from pathlib import Path
from typing import IO

import torch

from torchtitan import hardware
from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config
from torchtitan.data.texts.sources import named_texts, require_text
from torchtitan.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from torchtitan.hardware import Place
from torchtitan.models.spec import Blueprint
from torchtitan.observe.run_folder import claim, open_run_folder
from torchtitan.parallel import collectives
from torchtitan.parallel.mesh import build_mesh
from torchtitan.training.data import needs_data
from torchtitan.training.machine import check_machine
from torchtitan.training.run import Run


def start_run(config: Config, blueprint: Blueprint, place: Place, *, records: bool = False) -> Run:
    """Refuse what this machine or the data cannot do, then meet the other ranks and lay them out.

    What this machine and the data decide is refused before a process waits for another. A run that keeps records
    (training) has the run folder to itself.
    """
    hardware.check_restarts(place.world_size)
    device = hardware.pick_device(place.local_rank)
    hardware.keep_to_own_cores(place, device)
    check_machine(config, device, blueprint.reads_text)
    tokenizer = None
    if blueprint.reads_text:
        if records and needs_data(config, place):
            for name, section in named_texts(config):
                require_text(name, section)
        tokenizer = build_tokenizer(config.model.hf_assets_path)
        blueprint = blueprint.with_vocabulary(tokenizer.vocab_size)
    if config.debug.deterministic:
        hardware.use_deterministic_kernels(config.debug.deterministic_warn_only)
    if records and config.validation.tasks:
        from torchtitan.training.scores.during import check_tasks

        check_tasks(config, blueprint, place)
    folder, lock = Path(config.job.dump_folder), None
    if records and place.rank == 0:
        lock = claim(open_run_folder(config))

    if device.type == "cuda":
        from torchtitan.training.flight_recorder import flight_recorder

        os.environ |= flight_recorder(config.comm, folder)
    timeout = config.comm.init_timeout_seconds
    collectives.start_process_group(device, place.rank, place.world_size, timeout)
    run = lay_out_ranks(config, blueprint, place, device, tokenizer, folder, lock)
    collectives.set_timeout(timeout, run.mesh.groups)
    return run


def lay_out_ranks(
    config: Config,
    blueprint: Blueprint,
    place: Place,
    device: torch.device,
    tokenizer: Tokenizer | None = None,
    folder: Path | None = None,
    lock: IO[str] | None = None,
) -> Run:
    """Lay the ranks out on the mesh; the process group must exist."""
    dims = plan_layout(config.parallelism, place.world_size)
    batch = plan_batch(config.training, dims.dp)
    experts = None
    if blueprint.num_experts and dims.ep * dims.tp > 1:
        from torchtitan.experts.mesh import build_expert_mesh

        experts = build_expert_mesh(dims, device.type)
    mesh = build_mesh(dims, device.type, experts)
    folder = folder or Path(config.job.dump_folder)
    name = blueprint.run
    if blueprint.reads_text and config.training.preference_beta is not None:
        name = "torchtitan.preference.run:PreferenceRun"
    elif blueprint.reads_text and config.trains_a_part:
        name = "torchtitan.lora.run:PartRun"
    kind: type[Run] = pkgutil.resolve_name(name)
    return kind(config, blueprint, place, device, tokenizer, batch, mesh, folder, lock).prepared()
