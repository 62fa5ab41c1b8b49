"""Shows what the model writes while it trains: a continuation of one prompt, by the weights as they are.

Every rank computes the same tokens, in forward passes of one length and without a cache, so that a compiled model
compiles only once more and FSDP's ranks stay together. The training's random state is not used.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.observe.log import logger
from torchtitan.observe.metrics import MetricsWriter
from torchtitan.training.run import Run
from torchtitan.training.step import ForwardBackward

_WINDOW, _NEW_TOKENS, _TEMPERATURE = 128, 48, 0.8


def build_sampler(run: Run, forward_backward: ForwardBackward, writer: MetricsWriter | None) -> "Sampler | None":
    if run.config.metrics.sample_freq is None or not run.blueprint.reads_text:
        return None
    if run.dims.pp > 1 or run.dims.cp > 1:
        logger.info(
            "no samples (metrics.sample_freq): a pipeline or context parallelism has no whole sequence on a rank"
        )
        return None
    return Sampler(run, forward_backward, writer)


class Sampler:
    """Call it after each step for which `due` returns True, on all ranks."""

    def __init__(self, run: Run, forward_backward: ForwardBackward, writer: MetricsWriter | None) -> None:
        assert run.tokenizer is not None
        self.tokenizer, self.writer, self.device = run.tokenizer, writer, run.device
        self.freq, self.last_step = run.config.metrics.sample_freq, run.config.training.steps
        self.model = forward_backward.model
        self.window = min(_WINDOW, run.config.training.seq_len)
        prompt = self.tokenizer.encode_prompt(run.config.metrics.sample_prompt, as_trained=True)
        self.prompt = prompt[: self.window - 1] or [self.tokenizer.eos_id]

    def due(self, step: int) -> bool:
        return self.freq is not None and (step % self.freq == 0 or step == self.last_step)

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        ids, generator = list(self.prompt), torch.Generator().manual_seed(step)
        while len(ids) < min(self.window, len(self.prompt) + _NEW_TOKENS) and ids[-1] != self.tokenizer.eos_id:
            padded = ids + [0] * (self.window - len(ids))  # attention is causal: what follows changes nothing
            logits = self.model.stages[0](torch.tensor([padded], device=self.device))  # [1, S, V]
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            shares = (logits[0, len(ids) - 1].float().cpu() / _TEMPERATURE).softmax(-1)
            chosen = torch.multinomial(shares, 1, generator=generator)
            if dist.get_world_size() > 1:  # ranks must not come apart by a last bit
                dist.broadcast(chosen, src=0)
            ids.append(int(chosen))
        self.model.free_gathered()
        if self.writer is not None:
            self.writer.write_sample(step, self.tokenizer.decode(ids))
