"""Runs tasks of lm-evaluation-harness on a model in its layout: rank 0 runs the harness, and all ranks compute.

A prompt has the tokens that transformers would give it with the exported folder, so `lm_eval --model hf` on that folder
finds the same figures.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.config.schema import Model
from torchtitan.data.chat.prompts import ChatPrompts
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.refusal import Refusal
from torchtitan.training.scores.generation import Sampling, stop_ids
from torchtitan.training.scores.led import Led
from torchtitan.training.scores.lines import Row
from torchtitan.training.scores.scorer import Continuation, Score, Scorer
from torchtitan.training.scores.tasks import MOST_NEW_TOKENS


class Asked:
    """What the harness asks of a model, in texts."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, model: Model, as_trained: bool, is_chat: bool) -> None:
        self.scorer, self.tokenizer, self.as_trained, self.longest = scorer, tokenizer, as_trained, scorer.longest
        self.led, self.stop = Led(self), stop_ids(Path(model.hf_assets_path), tokenizer)
        self.prompts = ChatPrompts(model, tokenizer) if is_chat else None
        if self.prompts is not None:
            self.stop.add(self.prompts.stop)
        self.prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

    @functools.lru_cache(1 << 14)  # noqa: B019  (as long as the evaluation)
    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = bos is None or not text.startswith(bos)
        if add_special_tokens:
            return self.tokenizer.encode_prompt(text, self.as_trained)
        return self.tokenizer.encode_prompt(text, as_trained=True)[self.tokenizer.bos_id is not None :]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Continuations [1] after contexts [0], of which the model sees the end if they are too long."""
        rows = []
        for context, continuation in pairs:
            if len(continuation) > self.longest:
                raise Refusal(
                    f"an answer of the task has {len(continuation)} tokens, and the model sees {self.longest}; take "
                    "another task, or a longer model.max_seq_len if the model was trained for it"
                )
            ids = [*context, *continuation][-(self.longest + 1) :]
            rows.append(Row(ids, len(ids) - len(continuation)))
        found: list[Score] = self.led.call("score_rows", rows)
        return found

    def score_rows(self, rows: Sequence[Row]) -> list[Score]:
        """On all ranks."""
        return self.scorer.score(rows)

    def roll(self, texts: Sequence[str]) -> list[float]:
        """Log-probabilities of whole texts."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            windows = get_rolling_token_windows(self.encode(text), self.prefix, self.longest, 1)
            pairs += [make_disjoint_window(window) for window in windows]
            owners += [number] * (len(pairs) - len(owners))
        totals = [0.0] * len(texts)
        for number, score in zip(owners, self.score(pairs), strict=True):
            totals[number] += score.log_probability
        return totals

    def write(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        """What the model writes after each context, until one of the texts that end it."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

        given = dict(normalize_gen_kwargs(dict(options), MOST_NEW_TOKENS))
        until = handle_stop_sequences(given.get("until"), eos=None)
        most, room = given["max_gen_toks"], self.longest - given["max_gen_toks"]
        prompts = [self.encode(context)[-room:] for context in contexts]
        temperature = float(given.get("temperature") or 0) if given.get("do_sample") else 0.0
        sampling = Sampling(temperature, int(given.get("top_k", 50) or 0), float(given.get("top_p") or 1))
        lengths = {text: len(self.encode(text, add_special_tokens=False)) + 2 for text in until if text}
        texts = self.led.call("write_all", prompts, most, sampling, lengths)
        written = [self.tokenizer.decode(each.ids) for each in texts]
        return [postprocess_generated_text(text, until, None) for text in written]

    def write_all(
        self, prompts: Sequence[Sequence[int]], most: int, sampling: Sampling, until: Mapping[str, int]
    ) -> list[Continuation]:
        """On all ranks. `until` has texts that end an answer, and in how many of its last tokens each is looked for."""

        def has_ended(ids: list[int]) -> bool:
            return any(text in self.tokenizer.decode(ids[-length:]) for text, length in until.items())

        return self.scorer.write(prompts, self.stop, most, sampling, has_ended)


def as_lm(asked: Asked) -> Any:
    """The model as lm_eval takes one: its requests are answered on all ranks, and only rank 0 has it."""
    from lm_eval.api.model import TemplateLM

    class LanguageModel(TemplateLM):
        eot_token_id = asked.tokenizer.eos_id
        prefix_token_id = asked.prefix
        tokenizer_name = asked.tokenizer.file_sha256

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return asked.encode(string, add_special_tokens)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [tuple(score) for score in asked.score([request[1:] for request in requests])]  # type: ignore[misc]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            return asked.roll([request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            answers: dict[int, str] = {}
            for options in {repr(request.args[1]): request.args[1] for request in requests}.values():
                own = [number for number, request in enumerate(requests) if request.args[1] == options]
                written = asked.write([requests[number].args[0] for number in own], options)
                answers |= dict(zip(own, written, strict=True))
            return [answers[number] for number in range(len(requests))]

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            assert asked.prompts is not None
            return asked.prompts.text(chat_history, opens_answer=add_generation_prompt)

    return LanguageModel()


def run_tasks(asked: Asked, tasks: Any, limit: float | None, bootstrap_iters: int) -> dict[str, Any] | None:
    """lm_eval's results on rank 0; None elsewhere. What others draw at random afterwards stays as it was."""

    def lead() -> dict[str, Any]:
        from lm_eval.evaluator import evaluate

        before = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]), redirect_stderr(StringIO()):  # a bar for each task
            try:
                found: dict[str, Any] = evaluate(
                    as_lm(asked),
                    tasks,
                    limit=limit,
                    bootstrap_iters=bootstrap_iters,
                    log_samples=False,
                    apply_chat_template=asked.prompts is not None,
                    fewshot_as_multiturn=True,
                )
            finally:
                random.setstate(before[0])
                np.random.set_state(before[1])
        return found

    results: dict[str, Any] | None = asked.led.run(lead)
    return results


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    """Each metric of each task and group, as `arc_easy/acc_norm`; a filter other than the first is named, too."""
    found: dict[str, float] = {}
    for part in ("results", "groups"):
        for task, values in (results.get(part) or {}).items():
            for key, value in values.items():
                metric, _, by = key.partition(",")
                if isinstance(value, int | float) and by and not metric.endswith("_stderr"):
                    name = f"{task}/{metric}"
                    found[name if by == "none" or name not in found else f"{name}/{by}"] = float(value)
    return found
