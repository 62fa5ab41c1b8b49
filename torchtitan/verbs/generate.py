"""Text from stored weights: one pass over the prompt, then a token at a time with the keys and values kept.

python -m torchtitan generate --checkpoint outputs --prompt "The module"
torchrun --nproc_per_node 2 -m torchtitan generate ...        the same with tensor parallelism
"""

import argparse
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchtitan import hardware
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.llama.model import Transformer, attentions
from torchtitan.models.llama.parallelize import split_tensors
from torchtitan.parallel import collectives
from torchtitan.refusal import Refusal
from torchtitan.training.weights import StoredModel, build_tokenizer_for, open_model

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

    def __init__(self, core: nn.Module, length: int) -> None:
        super().__init__()
        self.core, self.length, self.used = core, length, 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.used == 0:
            self.k, self.v = (x.new_empty(x.shape[0], self.length, *x.shape[2:]) for x in (k, v))  # [B, L, H, D]
        begin, self.used = self.used, self.used + k.shape[1]
        self.k[:, begin : self.used], self.v[:, begin : self.used] = k, v
        return self.core(q, self.k[:, : self.used], self.v[:, : self.used], mask)


def build_model(source: StoredModel, dtype: torch.dtype, place: hardware.Place) -> Transformer:
    """The whole model, or with several ranks this one's part of every tensor."""
    degree, args = place.world_size, source.args
    if args.n_kv_heads % degree or args.hidden_dim % degree:
        raise Refusal(
            f"{degree} ranks do not divide the model's {args.n_kv_heads} KV heads and {args.hidden_dim} hidden units"
        )
    device = hardware.pick_device(place.local_rank)
    with torch.device("meta"):
        model = Transformer(args).to(dtype)
    if degree > 1:
        collectives.start_process_group(device, place.rank, degree, 600)
        axis = init_device_mesh(device.type, (degree,), mesh_dim_names=("tp",))
        split_tensors(model, axis, disable_loss_parallel=True, split_sequence=False)
    model.to_empty(device=device)
    if args.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight  # to_empty gives both their own
    with source.reading():
        for name, parameter in model.named_parameters():
            source.weights.fill(name, parameter)
    return model.eval()


@torch.inference_mode()
def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], stop: set[int], max_new_tokens: int, sampling: Sampling
) -> Iterator[list[int | None]]:
    """A token for each prompt in turn, None for those that have ended; prompts may be of unlike length."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    if not all(prompts) or longest + max_new_tokens > model.args.max_seq_len:
        raise Refusal(
            f"prompts have {min(map(len, prompts))} to {longest} tokens, and {max_new_tokens} more are asked for; "
            f"each prompt needs 1 or more, the longest and the new ones {model.args.max_seq_len} or less together, "
            "which is all the model can see"
        )
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # at the left
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    everywhere = torch.arange(longest + max_new_tokens, device=device)
    for attention in attentions(model):
        core = attention.core.core if isinstance(attention.core, CachedAttention) else attention.core
        attention.core = CachedAttention(core, len(everywhere))

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
        if dist.is_initialized():  # ranks must not come apart by a last bit
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
    """What ends a text: the tokenizer's end, and what generation_config.json says, as a chat model's end of turn."""
    path = assets / "generation_config.json"
    named = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    return {tokenizer.eos_id, *([named] if isinstance(named, int) else named or [])}


def run(args: argparse.Namespace) -> None:
    place = hardware.read_place()
    if args.temperature < 0 or args.top_k < 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1:
        raise Refusal("--temperature and --top_k are 0 or more, --top_p above 0 to 1, --max_new_tokens 1 or more")
    source = open_model(args.checkpoint)
    tokenizer = build_tokenizer_for(source, args.tokenizer or source.assets)
    model = build_model(source, getattr(torch, args.dtype) if args.dtype else source.dtype, place)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    sampling = Sampling(args.temperature, args.top_k, args.top_p, seed)
    prompts = [tokenizer.encode_prompt(text, as_trained=source.trained_here) for text in args.prompt]
    texts, shown = [list(prompt) for prompt in prompts], ""
    for tokens in generate(model, prompts, stop_ids(source.assets, tokenizer), args.max_new_tokens, sampling):
        for ids, token in zip(texts, tokens, strict=True):
            ids += [] if token is None else [token]
        if place.rank == 0 and len(prompts) == 1:
            text = tokenizer.decode(texts[0])
            if not text.endswith("\ufffd"):  # a character may take several tokens
                print(text[len(shown) :], end="", flush=True)
                shown = text
    if place.rank == 0:
        print("\n\n".join(map(tokenizer.decode, texts))[len(shown) :])
    collectives.stop_process_group()
