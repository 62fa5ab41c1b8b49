"""Loss and perplexity of stored weights on the data of [validation].

python -m torchtitan eval --checkpoint outputs -- --validation.dataset_path held_out.jsonl
"""

import argparse
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchtitan import hardware
from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.load import load_config_or_exit, to_toml
from torchtitan.config.schema import Config, Optimizer, Parallelism
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.observe.log import start_logging
from torchtitan.parallel import collectives
from torchtitan.parallel.mesh import build_mesh
from torchtitan.training import build
from torchtitan.training.loss import build_loss
from torchtitan.training.step import ForwardBackward
from torchtitan.training.validate import Validator
from torchtitan.training.weights import StoredModel, check_shape, config_of, load_weights, open_model


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    place = hardware.read_place()
    start_logging(place.rank)
    source = open_model(args.checkpoint)
    config = resolve(source, args.checkpoint, options, place)
    loss, tokens = evaluate(source, config, place)
    if place.rank == 0:
        data = config.validation.dataset_path or config.validation.dataset
        print(f"{source.weights.where} on {data}: loss {loss:.6f}, perplexity {math.exp(loss):.4f}, {tokens:,} tokens")
    collectives.stop_process_group()


def resolve(source: StoredModel, path: str, options: Sequence[str], place: hardware.Place) -> Config:
    """The run's configuration, less its layout and optimizer, under the options; validation is on."""
    config = source.config or config_of(source.args, path, source.assets)
    config = config.model_copy(update={"parallelism": Parallelism(), "optimizer": Optimizer()})
    if source.place is not None:  # its batches and streams, which -1 would take from the ranks here
        layout = source.place[1].layout
        plan = plan_batch(config.training, math.prod(int(n) for n in re.findall(r"\bdp_\w+ (\d+)", layout)))
        dp = plan_layout(_under(config, options, None, place.rank).parallelism, place.world_size).dp
        local = math.gcd(config.training.local_batch_size, max(1, plan.global_batch_size // dp))  # what a rank can take
        batches = {"global_batch_size": plan.global_batch_size, "num_streams": plan.num_streams}
        training = config.training.model_copy(update=batches | {"local_batch_size": local})
        config = config.model_copy(update={"training": training})
    return _under(config, options, place.world_size, place.rank)


def _under(config: Config, options: Sequence[str], world_size: int | None, rank: int) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        argv = ["--job.config_file", str(file), *options, "--validation.enable"]
        return load_config_or_exit(argv, world_size, rank, prog="eval")


def evaluate(source: StoredModel, config: Config, place: hardware.Place) -> tuple[float, int]:
    """Mean loss and number of tokens, on any layout."""
    device = hardware.pick_device(place.local_rank)
    build.check_environment(config, device)
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    dims = plan_layout(config.parallelism, place.world_size)
    plan = plan_batch(config.training, dims.dp)
    args = build.build_model_args(config, tokenizer)
    check_shape(source, args)
    collectives.start_process_group(device, place.rank, place.world_size, config.comm.init_timeout_seconds)
    mesh = build_mesh(dims, device.type)
    model = build.lay_out_model(config, args, mesh)
    for stage in model.stages.values():
        stage.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
    with source.reading():
        load_weights(source, model)
    loader = build.build_validation_loader(config, plan, tokenizer, mesh, device)
    assert loader is not None
    loss = build_loss(config.compile)
    forward_backward = ForwardBackward(model, loss, mesh, config.training, config.parallelism, device)
    validator = Validator(config.validation, forward_backward, loader, device, mesh.losses.get_group(), None)
    measured = validator.measure()
    loader.close()
    return measured
