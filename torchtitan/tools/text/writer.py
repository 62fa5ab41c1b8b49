"""Continues texts: one pass over the prompt, then a token at a time with the keys and values kept."""

import argparse
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.schema import Config
from torchtitan.data.tokenizers.files import load_json
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.models.layers import exchange_attention
from torchtitan.models.rules import find_tensor_parallel_refusals
from torchtitan.models.spec import Blueprint
from torchtitan.parallel.parts import tie
from torchtitan.parallel.tensor import split_tensors
from torchtitan.refusal import Refusal
from torchtitan.weights.stored import StoredModel

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


def build_model(
    source: StoredModel, dtype: torch.dtype, device: torch.device, axis: DeviceMesh | None = None
) -> nn.Module:
    """The whole model, or this rank's part of every tensor, with attention that keeps the keys and values it saw."""
    blueprint = source.blueprint
    with torch.device("meta"):
        model = blueprint.spec.build(blueprint.shape).to(dtype)
    if axis is not None:
        names = [name for name, _ in model.named_modules()]
        split_tensors(model, blueprint, axis, False, names, split_sequence=False)
        if blueprint.num_experts:
            from torchtitan.experts.divide import divide_for_generation

            divide_for_generation(model, axis)
    model.to_empty(device=device)
    tie(model, blueprint.tied)  # to_empty gives both their own
    with source.reading():
        for name, parameter in model.named_parameters():
            source.weights.fill(name, parameter)
    exchange_attention(model, CachedAttention)
    return model.eval()


@torch.inference_mode()
def generate(
    model: nn.Module,
    max_seq_len: int,
    prompts: Sequence[Sequence[int]],
    stop: set[int],
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[list[int | None]]:
    """A token for each prompt in turn, None for those that have ended; prompts may be of unlike length."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    if not all(prompts) or longest + max_new_tokens > max_seq_len:
        raise Refusal(
            f"prompts have {min(map(len, prompts))} to {longest} tokens, and {max_new_tokens} more are asked for; "
            f"each prompt needs 1 or more, the longest and the new ones {max_seq_len} or less together, "
            "which is all the model can see"
        )
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # at the left
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    everywhere = torch.arange(longest + max_new_tokens, device=device)
    for module in model.modules():
        if isinstance(module, CachedAttention):
            module.clear(len(everywhere))

    def advance(begin: int, new: Tensor) -> Tensor:
        at = everywhere[begin : begin + new.shape[1], None]
        keys = everywhere[: begin + new.shape[1]]
        # Padding sees itself: attention to nothing is not a number, and would spread.
        seen = (keys <= at) & ((keys >= padding[:, None, None]) | (keys == at))  # [B, S, keys]
        positions = (at[:, 0] - padding[:, None]).clamp(min=0)
        return model(new, positions=positions, mask=seen[:, None])[:, -1].float()  # [B, V]

    generators = [torch.Generator(device).manual_seed(sampling.seed + row) for row in range(len(prompts))]
    alive = [True] * len(prompts)
    for begin in range(0, longest, _PREFILL):
        logits = advance(begin, tokens[:, begin : begin + _PREFILL])
    for end in range(longest, longest + max_new_tokens):
        chosen = pick(logits, sampling, generators)
        if dist.is_initialized() and dist.get_world_size() > 1:  # ranks must not come apart by a last bit
            dist.broadcast(chosen, src=0)
        ids = chosen.tolist()
        yield [token if going else None for token, going in zip(ids, alive, strict=True)]
        alive = [going and token not in stop for token, going in zip(ids, alive, strict=True)]
        if not any(alive) or end + 1 == longest + max_new_tokens:
            return
        logits = advance(end, chosen[:, None])


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


def check_tensor_parallel(blueprint: Blueprint, config: Config) -> None:
    """Refuse a degree of tensor parallelism that the model cannot take, for a program that does not train."""
    if refusals := list(find_tensor_parallel_refusals(blueprint, config)):
        raise Refusal("; ".join(refusals))


class Writer:
    """Continues texts as the options say."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, source: StoredModel, args: argparse.Namespace, shows: bool
    ) -> None:
        self.model, self.tokenizer, self.as_trained, self.shows = model, tokenizer, source.trained_here, shows
        self.stop, self.longest = stop_ids(source.assets, tokenizer), source.blueprint.shape.max_seq_len
        seed = secrets.randbits(31) if args.seed is None else args.seed
        self.max_new_tokens = args.max_new_tokens
        self.sampling = Sampling(args.temperature, args.top_k, args.top_p, seed)

    def write(self, texts: Sequence[str]) -> None:
        """Show the texts with their continuations: a single one as it grows, several when all have ended."""
        prompts = [self.tokenizer.encode_prompt(text, as_trained=self.as_trained) for text in texts]
        if len(prompts) == 1:
            self.continue_one(prompts[0], "")
            return
        rows = [list(prompt) for prompt in prompts]
        for tokens in generate(self.model, self.longest, prompts, self.stop, self.max_new_tokens, self.sampling):
            for ids, token in zip(rows, tokens, strict=True):
                ids += [] if token is None else [token]
        if self.shows:
            print("\n\n".join(map(self.tokenizer.decode, rows)))

    def continue_one(self, prompt: Sequence[int], shown: str) -> str:
        """Show a text as it grows, from behind what is `shown` already; returns the text."""
        ids, text = list(prompt), shown
        for tokens in generate(self.model, self.longest, [prompt], self.stop, self.max_new_tokens, self.sampling):
            ids += [token for token in tokens if token is not None]
            text = self.tokenizer.decode(ids)
            if self.shows and not text.endswith("\ufffd"):  # a character may take several tokens
                print(text[len(shown) :], end="", flush=True)
                shown = text
        if self.shows:
            print(text[len(shown) :])
        return text


def converse(writer: Writer, lines: Iterable[str]) -> None:
    """The text grows by each line that the user types and by what the model adds; its beginning is forgotten."""
    print("Type the beginning of a text. The model goes on, and so can you. An empty line begins anew; Ctrl-D ends.")
    text = ""
    for line in lines:
        text = f"{text}\n{line.rstrip()}" if text and line.strip() else line.strip()
        if text:
            ids = writer.tokenizer.encode_prompt(text, as_trained=writer.as_trained)
            room = writer.longest - writer.max_new_tokens
            text = writer.continue_one(ids[-room:], writer.tokenizer.decode(ids[-room:]))
