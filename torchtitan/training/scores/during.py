"""Scores in tasks at each validation of a run; they are metrics beside the loss, and change nothing of the run."""

import json
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.refusal import Refusal
from torchtitan.training.run import Run
from torchtitan.training.scores.answers import Answers
from torchtitan.training.scores.harness import Asked, figures, run_tasks
from torchtitan.training.scores.scorer import Scorer
from torchtitan.training.scores.tasks import open_tasks, refuse_impossible
from torchtitan.training.step import ForwardBackward
from torchtitan.whole_file import write_whole

_KEY = "validation.tasks"


def check_tasks(config: Config, blueprint: Blueprint, place: Place) -> None:
    """Refuse what cannot be answered, before a process waits for another. Only rank 0 reads the tasks' data."""
    if not blueprint.reads_text:
        raise Refusal(f"{_KEY}: the model has data of its own, and tasks ask in text; remove {_KEY}")
    if place.rank == 0:
        tasks = open_tasks(tuple(config.validation.tasks), _KEY)
        refuse_impossible(tasks, _KEY, config, blueprint.shape.max_seq_len)


def build_scores(
    run: Run, forward_backward: ForwardBackward, watch: NoWatch
) -> tuple["TaskScores | None", Answers | None]:
    """What validates beside the loss: tasks, and on conversations the answers before and after."""
    config = run.config
    scores = TaskScores(run, forward_backward, watch) if config.validation.tasks else None
    has_pairs = config.training.preference_beta is not None  # of answers, and not one to compare with
    if not (config.validation.chat and run.blueprint.reads_text) or has_pairs or config.checkpoint.load_only:
        return scores, None
    if run.dims.pp > 1 or run.dims.cp > 1:
        logger.info("no answers before and after: a pipeline or context parallelism has no whole sequence on a rank")
        return scores, None
    return scores, Answers(run, forward_backward, watch)


class TaskScores:
    """Call `measure` on all ranks."""

    def __init__(self, run: Run, forward_backward: ForwardBackward, watch: NoWatch) -> None:
        assert run.tokenizer is not None
        config = run.config
        self.run, self.watch, self.limit = run, watch, config.validation.tasks_limit
        scorer, is_chat = Scorer(run, forward_backward), config.validation.chat is not None
        self.asked = Asked(scorer, run.tokenizer, config.model, as_trained=True, is_chat=is_chat)
        self.tasks = open_tasks(tuple(config.validation.tasks), _KEY) if run.place.rank == 0 else None

    def measure(self, step: int) -> dict[str, Any]:
        """The figures on rank 0. Meanwhile ranks may wait for each other for long, as in a save."""
        with self.watch.saving():
            results = run_tasks(self.asked, self.tasks, self.limit, bootstrap_iters=0)
        if results is None:
            return {}
        from lm_eval.utils import handle_non_serializable

        folder = Path(self.run.folder) / "scores"
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"step-{step}.json", json.dumps(results, indent=1, default=handle_non_serializable) + "\n")
        return figures(results)
