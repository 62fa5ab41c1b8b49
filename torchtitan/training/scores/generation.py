"""Continues prompts: one pass over them, then a token at a time with the keys and values kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.data.tokenizers.files import load_json
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.models.layers import CausalAttention
from torchtitan.parallel.collectives import any_says_so
from torchtitan.parallel.cpu_attention import AttentionByProducts
from torchtitan.parallel.documents.attention import DocumentAttention
from torchtitan.refusal import Refusal

_ATTENTION = CausalAttention | AttentionByProducts | DocumentAttention
_PREFILL = 512  # tokens of the prompt at once: logits of them all would be large


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0


class CachedAttention(nn.Module):
    """Attention of new queries over all keys and values so far."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.length, self.used = core, 0, 0

    def clear(self, length: int) -> None:
        """Make room for a text of so many tokens."""
        self.length, self.used = length, 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.used == 0:
            self.k, self.v = (x.new_empty(x.shape[0], self.length, *x.shape[2:]) for x in (k, v))  # [B, L, H, D]
        begin, self.used = self.used, self.used + k.shape[1]
        self.k[:, begin : self.used], self.v[:, begin : self.used] = k, v
        return self.core(q, self.k[:, : self.used], self.v[:, : self.used], mask)


def keeping_keys(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the attention of a model that trains keeps the keys and values it saw."""
    return attending(model, lambda: CachedAttention(CausalAttention()))


def attentions(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The outermost, with the modules that have them, and by which names."""
    return [
        (parent, name, core)
        for parent in model.modules()
        for name, core in parent.named_children()
        if isinstance(core, _ATTENTION) and not isinstance(parent, _ATTENTION)
    ]


@contextmanager
def attending(model: nn.Module, make: Callable[[], nn.Module]) -> Iterator[None]:
    """Inside, the attention of a model that trains is another, under any mask."""
    found = attentions(model)
    for parent, name, _ in found:
        setattr(parent, name, make())
    try:
        yield
    finally:
        for parent, name, core in found:
            setattr(parent, name, core)


@dataclass(frozen=True)
class Peers:
    """Ranks that each continue their own prompts with shards of one model, so that all must go on as long as one."""

    same: dist.ProcessGroup  # those with the same prompts
    longest: int  # prompt of any rank
    width: int  # tokens that all passes must have a multiple of, where ranks share a sequence


@torch.no_grad()
def generate(
    model: nn.Module,
    max_seq_len: int,
    prompts: Sequence[Sequence[int]],
    stop: set[int],
    max_new_tokens: int,
    sampling: Sampling,
    has_ended: Callable[[int, int], bool] = lambda row, token: False,
    numbers: Sequence[int] | None = None,
    peers: Peers | None = None,
) -> Iterator[list[int | None]]:
    """A token for each prompt in turn, None for those that have ended; prompts may be of unlike length.

    `has_ended` may end a prompt's text after a token. What is drawn depends on `numbers`, by default 0, 1, ...
    """
    device = next(model.parameters()).device
    longest, width = (max(map(len, prompts)), 1) if peers is None else (peers.longest, peers.width)
    if not all(prompts) or longest + max_new_tokens > max_seq_len:
        raise Refusal(
            f"prompts have {min(map(len, prompts))} to {longest} tokens, and {max_new_tokens} more are asked for; each "
            f"needs 1 or more, the longest and the new ones {max_seq_len} or less together, all that the model can see"
        )
    longest = -(-longest // width) * width  # with padding, which has no positions of its own
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # at the left
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    everywhere = torch.arange(longest + max_new_tokens, device=device)
    attentions = [module for module in model.modules() if isinstance(module, CachedAttention)]
    for attention in attentions:
        attention.clear(len(everywhere))

    def advance(begin: int, new: Tensor) -> Tensor:
        for attention in attentions:
            attention.used = begin
        at = everywhere[begin : begin + new.shape[1], None]
        keys = everywhere[: begin + new.shape[1]]
        # Padding sees itself: attention to nothing is not a number, and would spread.
        seen = (keys <= at) & ((keys >= padding[:, None, None]) | (keys == at))  # [B, S, keys]
        positions = (at[:, 0] - padding[:, None]).clamp(min=0)
        logits = model(new, positions=positions, mask=seen[:, None])
        return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, -1].float()  # [B, V]

    numbers = numbers or range(len(prompts))
    generators = [torch.Generator(device).manual_seed(sampling.seed + number) for number in numbers]
    alive = [True] * len(prompts)
    piece = max(1, _PREFILL // width) * width
    for begin in range(0, longest, piece):
        logits = advance(begin, tokens[:, begin : begin + piece])
    for end in range(longest, longest + max_new_tokens):
        chosen = pick(logits, sampling, generators)
        if dist.is_initialized() and dist.get_world_size() > 1:  # ranks must not come apart by a last bit
            group = dist.group.WORLD if peers is None else peers.same
            dist.broadcast(chosen, group=group, group_src=0)
        ids = chosen.tolist()
        yield [token if going else None for token, going in zip(ids, alive, strict=True)]
        for row, token in enumerate(ids):
            alive[row] = alive[row] and token not in stop and not has_ended(row, token)
        goes_on = any(alive) if peers is None else any_says_so(any(alive))
        if not goes_on or end + 1 == longest + max_new_tokens:
            return
        tokens = torch.cat([tokens[:, tokens.shape[1] - width + 1 :], chosen[:, None]], dim=1)
        logits = advance(end + 1 - width, tokens)


def pick(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """A token for each row of logits [B, V], each by its own generator, so that no row depends on another."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    ordered, ids = (logits / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    shares = ordered.softmax(-1)
    shares[shares.cumsum(-1) - shares >= sampling.top_p] = 0  # the likeliest always stays
    drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(shares, generators, strict=True)]
    return ids.gather(1, torch.stack(drawn))[:, 0]


def stop_ids(assets: Path, tokenizer: Tokenizer) -> set[int]:
    """The ids that end a text: the tokenizer's EOS, and those of generation_config.json (as a chat's end of turn)."""
    path = assets / "generation_config.json"
    named = load_json(path).get("eos_token_id") if path.is_file() else None
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(i) is int for i in ids):
        raise Refusal(f"{path}: eos_token_id = {str(named)[:80]} is no id and no list of ids; correct it")
    return {tokenizer.eos_id, *ids}
