"""Opens tasks of lm-evaluation-harness, by name or as a YAML file, and refuses what a model here cannot answer."""

import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.refusal import Refusal

_KINDS = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # all the same
MOST_NEW_TOKENS = 256  # lm_eval's default
_SEED = 1234  # of the examples in a prompt, as lm_eval's own command has it


@functools.cache
def open_tasks(names: tuple[str, ...], key: str, num_fewshot: int | None = None) -> dict[str, Any]:
    """Tasks and groups by name, with their data; lm_eval's TaskDict. The process loads them once."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise Refusal(f"{key} needs lm-evaluation-harness, which is not installed here; pip install lm-eval") from None
    are_files = all(Path(name).is_file() for name in names)
    manager = TaskManager(include_defaults=not are_files)  # looking for its own takes a second to a minute
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {nearest[0]!r}? Otherwise give" if nearest else "give"
            raise Refusal(f"{key} = {name!r} is no task of lm_eval and no file; {hint} a name or a YAML file of a task")
    try:
        found: dict[str, Any] = dict(manager.load(list(names)))
    except Exception as error:  # of the hub, of datasets, or of a task's own code
        said = " ".join(str(error).split())[:300]
        load = f'python -c "from lm_eval.tasks import TaskManager; TaskManager().load({list(names)})"'
        raise Refusal(
            f"{key} = {','.join(names)!r}: the tasks cannot be loaded ({type(error).__name__}: {said}). If their data "
            f"has to come from the hub, fetch it with a network, and with the same HF_HOME: {load}"
        ) from None
    for task in found["tasks"].values():
        known = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=(known or 0) if num_fewshot is None or known == 0 else num_fewshot)
        task.set_fewshot_seed(seed=_SEED)
    return found


def refuse_impossible(tasks: Mapping[str, Any], key: str, config: Config, longest: int) -> None:
    """`longest` is how many tokens the model can see."""
    parallelism = config.parallelism
    can_write = parallelism.pipeline_parallel_degree == parallelism.context_parallel_degree == 1
    for name, task in tasks["tasks"].items():
        for reason in _reasons(task, can_write, longest):
            raise Refusal(f"{key}: the task {name} {reason}")


def _reasons(task: Any, can_write: bool, longest: int) -> Iterator[str]:
    kind = task.OUTPUT_TYPE
    if kind not in _KINDS or getattr(task, "MULTIMODAL", False):
        yield f"asks for {kind!r}, or for more than text; leave it out"
    if getattr(task, "UNSAFE_CODE", False):
        yield "runs programs that the model writes; convert the model, and run lm_eval where that does no harm"
    if kind != "generate_until":
        return
    if not can_write:
        yield (
            "lets the model write, and with a pipeline or context parallelism no rank has a whole sequence; leave it "
            "out, or use `python -m torchtitan eval` with another layout"
        )
    known = {"until", "do_sample", "temperature", "top_k", "top_p", "num_beams", *_LENGTHS}
    options = task.get_config("generation_kwargs") or {}
    if unknown := [name for name in options if name not in known]:
        yield f"sets {unknown[0]} = {options[unknown[0]]!r} in generation_kwargs, which is not known here; leave it out"
    if (most := max([int(options[name]) for name in _LENGTHS if name in options] or [MOST_NEW_TOKENS])) >= longest:
        yield f"lets the model write {most} tokens, and it can see {longest}; leave it out, or raise model.max_seq_len"
    if options.get("num_beams", 1) != 1:
        yield f"searches with num_beams = {options['num_beams']}; only one is possible here; leave it out"
