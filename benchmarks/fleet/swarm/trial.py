"""A swarm, one run with all its tokens, or one site alone, in one process of plain torch: for grids of many settings.

    python -m benchmarks.fleet.swarm.trial --way swarm one alone --optimizer Muon --lr 0.016
    python -m benchmarks.fleet.swarm.trial --way swarm --optimizer Muon --lr 0.016 --every 30 --momentum 0.3
    python -m benchmarks.fleet.swarm.trial --way swarm --lr 0.024 --rate 1 --momentum 0 --steps 500 --keep 0.05
    python -m benchmarks.fleet.swarm.trial --way swarm one alone --rate 1 --momentum 0 --steps 500 --warm 500

The model and the text of train_configs/swarm_debug.toml, but sequences are drawn from the whole text in one random
order. Sites meet with all weights at once, without delay, in float32. A line of JSON each, with the settings, the loss
of held-out text, and that of the weights' (one run) or the anchors' moving average.
"""

import argparse
import copy
import itertools
import json
import math

import torch
from torch import Tensor, nn

from titan_fleet.swarm.outer import Outer
from torchtitan.config.schema import Optimizer
from torchtitan.models.decoder.model import Transformer, initialize
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.root import ROOT
from torchtitan.training.optimizer.build import build_optimizer

SEQ_LEN, VOCABULARY, WARMUP, LEAST = 64, 2048, 20, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", nargs="+", choices=["swarm", "one", "alone"], default=["swarm"])
    parser.add_argument("--lr", nargs="+", type=float, default=[0.016])
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--optimizer", choices=["AdamW", "Muon"], default="Muon")
    for name, value in (("sites", 3), ("steps", 900), ("batch", 16), ("every", 10), ("dim", 64), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warm", type=int, default=0, help="steps of one run before, with the debug model's rate")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--own", action="store_true", help="each site draws from its own part of the text")
    parser.add_argument("--rate", type=float, default=0.7, help="of the outer step; 1 with momentum 0 is the mean")
    parser.add_argument("--momentum", type=float, default=0.6, help="of the outer step")
    parser.add_argument(
        "--keep", type=float, default=1.0, help="share of a difference that is sent: its largest values"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    training, held_out = sequences("train"), sequences("validation")[:512]
    for seed, way, lr in itertools.product(args.seed, args.way, args.lr):
        first = build(seed, args.dim, args.layers)
        if args.warm:
            first, _ = train(args, "one", 0.024, seed + 100, args.warm, first, training)
        model, average = train(args, way, lr, seed, args.steps, first, training)
        losses = {"loss": evaluate(model, held_out)}
        take([list(model.parameters())], average)
        losses["loss_of_average"] = evaluate(model, held_out)
        print(json.dumps(vars(args) | {"way": way, "lr": lr, "seed": seed} | losses), flush=True)


def sequences(split: str) -> Tensor:
    """Rows of SEQ_LEN + 1 tokens; the last token of a row is the first of the next."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / "tests/assets/tokenizer/tokenizer.json"))
    lines = (ROOT / f"tests/assets/pydocs/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ids = torch.tensor([i for line in lines for i in [*tokenizer.encode(json.loads(line)["text"]).ids, 0]])
    rows = ids.as_strided(((len(ids) - 1) // SEQ_LEN, SEQ_LEN + 1), (SEQ_LEN, 1))
    return rows if split == "train" else rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def train(
    args: argparse.Namespace, way: str, lr: float, seed: int, steps: int, first: Transformer, training: Tensor
) -> tuple[Transformer, list[Tensor]]:
    """The model at the end, and the moving average of its weights or of the anchors."""
    count = args.sites if way == "swarm" else 1
    batch = args.batch * (args.sites if way == "one" else 1)
    models = [copy.deepcopy(first) for _ in range(count)]
    config = Optimizer(name=args.optimizer, lr=lr, beta2=args.beta2, implementation="foreach")
    optimizers = [build_optimizer(model.named_parameters(), config) for model in models]
    weights = [list(model.parameters()) for model in models]
    anchor = [weight.detach().clone() for weight in weights[0]]
    average, velocity = [each.clone() for each in anchor], [torch.zeros_like(each) for each in anchor]
    left = [[torch.zeros_like(each) for each in anchor] for _ in models]
    outer, batches = Outer(args.rate, args.momentum), [shuffled(training, batch, seed)] * count
    if args.own and way == "swarm":
        batches = [shuffled(training[number::count], batch, seed) for number in range(count)]
    for step in range(1, steps + 1):
        progress = (step - 1 - WARMUP) / (steps - WARMUP)
        factor = min(step / WARMUP, LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * max(0.0, progress))))
        for model, optimizer, own in zip(models, optimizers, batches, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            loss_of(model, next(own)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if way != "swarm":
            torch._foreach_lerp_(average, [weight.detach() for weight in weights[0]], 0.01)
        elif step % args.every == 0 or step == steps:
            meet(anchor, velocity, weights, left, args.keep, outer)
            torch._foreach_lerp_(average, anchor, 0.2)
    return models[0], average


@torch.no_grad()
def meet(
    anchor: list[Tensor],
    velocity: list[Tensor],
    weights: list[list[nn.Parameter]],
    left: list[list[Tensor]],
    keep: float,
    outer: Outer,
) -> None:
    for number, each in enumerate(anchor):
        mean = torch.zeros_like(each)
        for own, rest in zip(weights, left, strict=True):
            difference = rest[number] + each - own[number]
            least = difference.abs().flatten().topk(math.ceil(keep * each.numel())).values[-1]
            sent = difference * (difference.abs() >= least)
            rest[number].copy_(difference - sent)  # comes along at the next meeting
            mean += sent / len(weights)
        each -= outer.step(mean, velocity[number])
    take(weights, anchor)


@torch.no_grad()
def take(weights: list[list[nn.Parameter]], values: list[Tensor]) -> None:
    for own in weights:
        for weight, value in zip(own, values, strict=True):
            weight.copy_(value)


def build(seed: int, dim: int, num_layers: int) -> Transformer:
    args = LlamaArgs(dim, num_layers, dim // 16, dim // 16, dim * 3, vocab_size=VOCABULARY, tied_embeddings=True)
    model, generator = Transformer(args), torch.Generator().manual_seed(seed * 7919 + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initialize(name, parameter, args, generator)
    return model


def shuffled(rows: Tensor, batch: int, seed: int):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for begin in range(0, len(rows) - batch + 1, batch):
            yield rows[order[begin : begin + batch]]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, rows: Tensor) -> float:
    losses = [float(loss_of(model, each)) for each in rows.split(64)]
    return round(sum(losses) / len(losses), 4)


if __name__ == "__main__":
    main()
