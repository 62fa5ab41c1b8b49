"""Continues texts with stored weights: one as it grows, or several at once."""

import argparse
import secrets
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.schema import Config
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.models.layers import exchange_attention
from torchtitan.models.rules import find_tensor_parallel_refusals
from torchtitan.models.spec import Blueprint
from torchtitan.parallel.parts import allocate
from torchtitan.parallel.tensor import split_tensors
from torchtitan.refusal import Refusal
from torchtitan.training.scores.generation import CachedAttention, Sampling, generate, stop_ids
from torchtitan.weights.stored import StoredModel


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
    allocate(model, device)
    with source.reading():
        for name, parameter in model.named_parameters():
            source.weights.fill(name, parameter)
    exchange_attention(model, CachedAttention)
    return model.eval()


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
