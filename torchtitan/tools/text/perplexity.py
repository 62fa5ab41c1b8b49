"""Mean loss of stored weights on the data of [validation], with the configuration that they were trained with."""

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.load import to_toml
from torchtitan.config.schema import Config, Optimizer, Parallelism
from torchtitan.data.texts.sources import locate_text
from torchtitan.hardware import Place
from torchtitan.models.families import load_run_or_exit
from torchtitan.models.spec import Blueprint
from torchtitan.training.assemble import start_run
from torchtitan.training.data import holds_out
from torchtitan.training.model import give_memory
from torchtitan.training.run import Run
from torchtitan.training.step import ForwardBackward
from torchtitan.training.validate import Validator
from torchtitan.weights.stored import StoredModel, check_shape, load_weights

_WITH_LENGTH = ("training", "validation")


def resolve(
    source: StoredModel, options: Sequence[str], place: Place, for_tasks: bool = False
) -> tuple[Config, Blueprint]:
    """The run's configuration, less its layout and optimizer, under the options; validation is on.

    With `for_tasks`, a download is computed in its own type.
    """
    config = source.config or source.plain_config(str(source.assets), source.assets)
    without_tasks = {
        "validation": config.validation.model_copy(update={"tasks": [], "tasks_limit": None}),
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": None}),
    }
    # A run on pairs would need its reference: what is measured is the model alone.
    alone = {"training": config.training.model_copy(update={"preference_beta": None})}
    config = config.model_copy(update={"parallelism": Parallelism(), "optimizer": Optimizer()} | without_tasks | alone)
    if source.config is None:  # a download may take fewer tokens than a sequence has by default
        longest = min(config.validation.seq_len, source.blueprint.shape.max_seq_len)
        shorter = {name: getattr(config, name).model_copy(update={"seq_len": longest}) for name in _WITH_LENGTH}
        config = config.model_copy(update=shorter)
        if for_tasks:
            own = {"mixed_precision_param": str(source.dtype).removeprefix("torch.")}
            config = config.model_copy(update={"training": config.training.model_copy(update=own)})
    if source.place is not None:  # its batches and streams, which -1 would take from the ranks here
        layout = source.place[1].layout
        plan = plan_batch(config.training, math.prod(int(n) for n in re.findall(r"\bdp_\w+ (\d+)", layout)))
        under, _ = _under(config, options, None, place.rank)
        dp = plan_layout(under.parallelism, place.world_size).dp
        local = math.gcd(config.training.local_batch_size, max(1, plan.global_batch_size // dp))  # what a rank can take
        batches = {"global_batch_size": plan.global_batch_size, "num_streams": plan.num_streams}
        training = config.training.model_copy(update=batches | {"local_batch_size": local})
        config = config.model_copy(update={"training": training})
    result, blueprint = _under(config, options, place.world_size, place.rank)
    did_hold_out = source.config is not None and holds_out(source.config)
    if holds_out(result) and (not did_hold_out or any(word.startswith("--validation.dataset") for word in options)):
        named = locate_text(result.validation.dataset, None).name  # the training's own text was all trained on
        validation = result.validation.model_copy(update={"dataset_path": named})
        result = result.model_copy(update={"validation": validation})
    return result, blueprint


def _under(config: Config, options: Sequence[str], world_size: int | None, rank: int) -> tuple[Config, Blueprint]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        argv = ["--job.config_file", str(file), *options, "--validation.enable"]
        return load_run_or_exit(argv, world_size, rank, prog="eval")


def evaluate(source: StoredModel, config: Config, blueprint: Blueprint, place: Place) -> tuple[float, int]:
    """Mean loss and number of tokens, on any layout."""
    with opened(source, config, blueprint, place) as (run, forward_backward):
        loader = run.build_validation_loader()
        assert loader is not None
        loss, tokens, _ = Validator(run, forward_backward, loader).measure()
        loader.close()
        return loss, tokens


@contextmanager
def opened(
    source: StoredModel, config: Config, blueprint: Blueprint, place: Place
) -> Iterator[tuple[Run, ForwardBackward]]:
    """The ranks and their part of the model, with its weights."""
    with start_run(config, blueprint, place) as run:
        check_shape(source, run.blueprint)
        model = run.lay_out_model()
        give_memory(model, config, run.device)
        with source.reading():
            load_weights(source, model)
        yield run, run.build_forward_backward(model)
