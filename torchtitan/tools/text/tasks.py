"""Scores of stored weights in tasks of lm-evaluation-harness: a table, a file, and TensorBoard's scalars of the run."""

import argparse
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger
from torchtitan.tools.text.perplexity import opened
from torchtitan.training.scores.harness import Asked, figures, run_tasks
from torchtitan.training.scores.scorer import Scorer
from torchtitan.training.scores.tasks import open_tasks, refuse_impossible
from torchtitan.weights.stored import StoredModel
from torchtitan.whole_file import write_whole

_BOOTSTRAP = 100_000  # samples for the error of a metric that is no mean; lm_eval's default


def answer_tasks(
    args: argparse.Namespace, source: StoredModel, config: Config, blueprint: Blueprint, place: Place
) -> None:
    tasks = None
    if place.rank == 0:  # which alone reads their data
        tasks = open_tasks(tuple(args.tasks.split(",")), "--tasks", args.num_fewshot)
        refuse_impossible(tasks, "--tasks", config, blueprint.shape.max_seq_len)
    with opened(source, config, blueprint, place) as (run, forward_backward):
        assert run.tokenizer is not None
        scorer = Scorer(run, forward_backward)
        asked = Asked(scorer, run.tokenizer, config.model, source.trained_here, args.chat)
        results = run_tasks(asked, tasks, args.limit, _BOOTSTRAP)
    if results is not None:
        _show(results)
        results["model"] = {
            "weights": source.weights.where,
            "family": source.blueprint.name,
            "computed_in": config.training.mixed_precision_param,
            "chat_template": args.chat,
            "limit": args.limit,
        }
        _keep(args, source, results)


def _show(results: Mapping[str, Any]) -> None:
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


def _keep(args: argparse.Namespace, source: StoredModel, results: Mapping[str, Any]) -> None:
    from lm_eval.utils import handle_non_serializable

    step = None if source.place is None else source.place[1].step
    run = _run_folder(source)
    file = Path(args.out) if args.out else None
    if file is None and run is not None:
        file = run / "scores" / f"step-{step}_{datetime.now():%Y-%m-%dT%H-%M-%S}.json"
    if file is None:
        logger.info("no file of the results, for this is no run folder; give --out to keep them")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(results, indent=1, default=handle_non_serializable) + "\n")
    logger.info(f"wrote {file}")
    if run is not None and source.config is not None and source.config.metrics.enable_tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run / source.config.metrics.save_tb_folder / "scores")) as curves:
            for name, value in figures(results).items():
                curves.add_scalar(f"scores/{name}", value, step)


def _run_folder(source: StoredModel) -> Path | None:
    """The folder of the run that has trained the model, if it is on this machine."""
    if source.place is None or source.config is None or not source.place[0].is_local:
        return None
    checkpoints = Path(source.place[0].folder(source.place[1].step)).parent
    return checkpoints.parent if checkpoints.name == source.config.checkpoint.folder else None
