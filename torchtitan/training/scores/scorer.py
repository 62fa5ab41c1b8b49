"""Log-probabilities and continuations by the weights as they are, on every rank of a run's layout.

All ranks call the same methods with the same arguments. Those with other data take other rows, and all get all results.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.data.batch import Batch
from torchtitan.data.documents import document_starts
from torchtitan.models.layers import CausalAttention
from torchtitan.models.spec import IGNORED
from torchtitan.parallel.collectives import sum_over
from torchtitan.training.run import Run
from torchtitan.training.scores.generation import Peers, Sampling, attending, attentions, generate, keeping_keys
from torchtitan.training.scores.lines import Line, Row, places_and_mask, plan_lines
from torchtitan.training.step import ForwardBackward

_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CPU_TOKENS = 4096
_LOGITS = 1 << 26  # in float32 at once

Item = TypeVar("Item")


class Score(NamedTuple):
    log_probability: float
    is_greedy: bool  # whether each token is the likeliest


class Continuation(NamedTuple):
    ids: list[int]  # with the end mark
    has_ended: bool


class Scorer:
    """Scores rows as the run's model sees them; a batch has at most as many tokens as one of validation."""

    def __init__(self, run: Run, forward_backward: ForwardBackward) -> None:
        self.run, self.model, self.device = run, forward_backward.model, run.device
        config = run.config.validation
        self.local_batch_size = config.local_batch_size or run.config.training.local_batch_size
        self.batch_tokens = self.local_batch_size * config.seq_len
        if run.device.type == "cpu":  # whose caches hold no more
            self.batch_tokens = min(self.batch_tokens, _CPU_TOKENS)
        self.longest = run.blueprint.shape.max_seq_len
        self._losses, self._tp = run.mesh.losses.get_group(), run.mesh.devices["tp"].get_group()
        self._multiple = math.lcm(2 * run.dims.cp if run.dims.cp > 1 else 1, run.dims.tp)
        self._rank = run.mesh.batch.get_local_rank()
        # A layer that mixes tokens in another way would let the answers of a question see each other.
        layers = len(run.blueprint.layers)
        self._shares = self.can_write and len(attentions(self.model.stages[0])) >= layers
        self._look: Callable[[Tensor, Tensor], Tensor]
        self._step = ForwardBackward(
            self.model,
            lambda logits, places: self._look(logits, places),
            run.mesh,
            run.config.training,
            run.config.parallelism,
            run.device,
        )

    @property
    def can_write(self) -> bool:
        return self.run.dims.pp == self.run.dims.cp == 1

    def score(self, rows: Sequence[Row]) -> list[Score]:
        results = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.device)  # log-probability, misses
        lines = plan_lines(rows, self._shares, self.longest)
        under_masks = attending(self.model.stages[0], CausalAttention) if self._shares else nullcontext()
        with self._inside(), under_masks:
            for batches in self._rounds(lines, lambda line: line.length):
                self._score(rows, batches[self._rank], results)
        sum_over(results, self._losses)
        return [Score(log_probability, misses == 0) for log_probability, misses in results.tolist()]

    def _rounds(self, items: Sequence[Item], size: Callable[[Item], int]) -> list[list[list[Item]]]:
        """Rounds of a batch for each data-parallel rank, the longest first; the last ones may be empty."""
        batches: list[list[Item]] = []
        room = 0
        for item in sorted(items, key=size, reverse=True):
            if room == 0:
                batches.append([])
                room = self.local_batch_size if self.run.dims.pp > 1 else max(1, self.batch_tokens // size(item))
            batches[-1].append(item)
            room -= 1
        dp = self.run.dims.dp
        batches += [[] for _ in range(-len(batches) % dp)]
        return [batches[begin : begin + dp] for begin in range(0, len(batches), dp)]

    @torch.no_grad()
    def _score(self, rows: Sequence[Row], part: Sequence[Line], results: Tensor) -> None:
        """Add the log-probabilities of a batch's tokens, each to its row."""
        longest = max((line.length for line in part), default=1)
        if self.run.dims.pp > 1:  # a schedule is kept for each length
            longest = 1 << (longest - 1).bit_length()
        length = -(-longest // self._multiple) * self._multiple
        height = self.local_batch_size if self.run.dims.pp > 1 else max(1, len(part))
        inputs = torch.zeros(height, length, dtype=torch.long)
        places = torch.full_like(inputs, IGNORED)  # in the place of labels: the number of each position that is scored
        by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}  # tokens, and whose they are
        for row, line in enumerate(part):
            inputs[row, : line.length] = torch.tensor([*line.begin, *chain.from_iterable(line.ends)])
            for place, token, owner in line.scored(rows):
                by_place.setdefault((row, place), []).append((token, owner))
        for number, where in enumerate(by_place):
            places[where] = number
        wanted = list(by_place.values())
        most = max(map(len, wanted), default=1)
        table = torch.tensor([[*pairs, *[(-1, 0)] * (most - len(pairs))] for pairs in wanted])
        table = table.to(self.device, torch.long)
        scores = torch.zeros(len(wanted), most, 2, dtype=torch.float64, device=self.device)
        tokens, owners = table.view(-1, most, 2).unbind(-1)

        def look(logits: Tensor, labels: Tensor) -> Tensor:
            """In the place of the loss."""
            is_scored = labels.flatten() != IGNORED
            numbers = labels.flatten()[is_scored]
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            logits = logits.flatten(0, -2)
            logits = logits if len(logits) == len(numbers) else logits[is_scored]
            for piece, some in zip(
                *(x.split(max(1, _LOGITS // logits.shape[-1])) for x in (logits, numbers)), strict=True
            ):
                found = piece.float().log_softmax(-1)
                of_tokens = found.gather(1, tokens[some].clamp(min=0))
                misses = found.argmax(-1, keepdim=True) != tokens[some]
                scores[some] = torch.stack([of_tokens.double(), misses.double()], -1)
            return torch.zeros((), device=logits.device)

        batch = Batch(inputs, places, self._documents(inputs), None).to(self.device)  # type: ignore[arg-type]
        self._look = look
        with self._only(batch.labels != IGNORED):
            if self._shares:
                apart = places_and_mask(part, inputs.shape, self.device)
                positions, mask = apart or (None, None)
                look(self.model.stages[0](batch.inputs, positions=positions, mask=mask), batch.labels)
            else:
                self._step.evaluate(batch, height)
        scores *= (tokens >= 0)[..., None]
        results.index_add_(0, owners.flatten(), scores.view(-1, 2))

    def _documents(self, inputs: Tensor) -> Tensor | None:
        """Each row is one."""
        if self.run.config.model.attn_mask_type != "block_causal":
            return None
        return torch.from_numpy(document_starts(np.zeros(inputs.shape, np.int32)))

    @contextmanager
    def _only(self, is_scored: Tensor) -> Iterator[None]:
        """Inside, only scored positions get logits, where one rank has all of them."""
        output = self._output()
        if output is None:
            yield
            return
        hook = output.register_forward_pre_hook(lambda _, given: (given[0].flatten(0, 1)[is_scored.flatten()],))
        try:
            yield
        finally:
            hook.remove()

    def _output(self) -> nn.Module | None:
        if any(degree > 1 for degree in (self.run.dims.pp, self.run.dims.cp, self.run.dims.tp)):
            return None
        last = dict(self.model.stages[0].named_modules()).get(self.run.blueprint.parts()[-1].name)
        return last if isinstance(last, nn.Linear) and self.run.config.float8 is None else None

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        stop: set[int],
        max_new_tokens: int,
        sampling: Sampling,
        has_ended: Callable[[list[int]], bool] = lambda ids: False,
    ) -> list[Continuation]:
        """Continue prompts until a stop token, or until `has_ended` of what was written."""
        written: dict[int, list[int]] = {}
        model = self.model.stages[0]
        rounds = self._rounds(range(len(prompts)), lambda number: len(prompts[number]) + max_new_tokens)
        with self._inside(), keeping_keys(model):
            for batches in rounds:
                own = batches[self._rank]
                texts: list[list[int]] = [[] for _ in own or [0]]
                longest = max(len(prompts[number]) for batch in batches for number in batch)

                def ended(row: int, _: int, texts: list[list[int]] = texts) -> bool:
                    return has_ended(texts[row])

                for tokens in generate(
                    model,
                    self.longest,
                    [prompts[number] for number in own] or [[0]],
                    stop,
                    max_new_tokens,
                    sampling,
                    ended,
                    own or [0],
                    Peers(self._tp, longest, self.run.dims.tp) if dist.get_world_size() > 1 else None,
                ):
                    for text, token in zip(texts, tokens, strict=True):
                        text += [] if token is None else [token]
                written |= dict(zip(own, texts, strict=False))
        found: list[Any] = [written]
        if dist.get_world_size() > 1:
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, written)
        texts_of = {number: ids for each in found for number, ids in each.items()}
        ids = [texts_of[number] for number in range(len(prompts))]
        return [Continuation(each, bool(each) and (each[-1] in stop or has_ended(each))) for each in ids]

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Nothing is compiled, for training's shapes stay the only ones, and any kernel may attend."""
        any_kernel = sdpa_kernel(_KERNELS) if self.device.type == "cuda" else nullcontext()
        with torch.compiler.set_stance("force_eager"), any_kernel:
            yield
        self.model.free_gathered()
