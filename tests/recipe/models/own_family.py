"""A family that is no part of the package: a test copies this file elsewhere and names it as model.name."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from torchtitan.models.layers import CausalAttention, fill_normal, rope_table, rotate
from torchtitan.models.spec import Family, HuggingFace, Part


@dataclass(frozen=True)
class Args:
    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int | None = None
    max_seq_len: int = 256

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_size(self) -> int:
        return self.dim // self.n_heads


class Mixer(nn.Module):
    """Attention whose output is gated; one product for queries, keys, values would be split across heads."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.head_size = args.head_size
        self.q, self.k, self.v, self.gate = (nn.Linear(args.dim, args.dim, bias=False) for _ in range(4))
        self.out = nn.Linear(args.dim, args.dim, bias=False)
        self.core: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_size)) for project in (self.q, self.k, self.v))
        mixed = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2)
        return self.out(mixed * torch.sigmoid(self.gate(x)))


class Layer(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(args.dim)
        self.mixer = Mixer(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.mixer(self.norm(x), cos, sin, mask)


class Mine(nn.Module):
    """Its layers are in a module of another name than Llama's."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.words = nn.Embedding(args.vocab_size or 1, args.dim)
        self.stack = nn.ModuleDict({str(i): Layer(args) for i in range(args.n_layers)})
        self.head = nn.Linear(args.dim, args.vocab_size or 1, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        x = x if self.words is None else self.words(x)
        cos, sin = rope_table(positions, self.args.head_size, 10000.0)
        for layer in self.stack.values():
            x = layer(x, cos, sin, mask)
        return x if self.head is None else self.head(x)


def parts(args: Args, seq_len: int) -> list[Part]:
    ends, layer = (args.vocab_size or 1) * args.dim, 5 * args.dim**2 + 2 * args.dim
    return [
        Part("words", ends, 0, "lookup"),
        *(Part(f"stack.{i}", layer, 6 * layer + 12 * args.dim * seq_len, "layer") for i in range(args.n_layers)),
        Part("head", ends, 6 * ends),
    ]


def initialize(name: str, weight: Tensor, args: Args, generator: torch.Generator) -> None:
    if weight.ndim > 1:
        fill_normal(weight, 0.05, generator)
    else:
        weight.detach().fill_(float(name.endswith("weight")))


def tensor_plan(args: Args, split_sequence: bool, loss_parallel: bool) -> dict:
    sequence = Shard(1) if split_sequence else Replicate()
    taken = (sequence, None, None, None), (Replicate(), None, None, None)
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        **({"stack.*.norm": SequenceParallel()} if split_sequence else {}),
        "stack.*.mixer": PrepareModuleInput(input_layouts=taken[0], desired_input_layouts=taken[1]),
        **{f"stack.*.mixer.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate")},
        "stack.*.mixer.out": RowwiseParallel(output_layouts=sequence),
        "head": ColwiseParallel(
            input_layouts=sequence,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


SPEC = Family(
    shape=Args,
    flavors={"small": Args(dim=64, n_layers=4, n_heads=4)},
    parts=parts,
    build=Mine,
    initialize=initialize,
    tensor_plan=tensor_plan,
    takes_muon=lambda name: name.startswith("stack."),
    hugging_face=lambda: HuggingFace(
        model_type="mine",
        to_name=lambda name: f"model.{name}",
        to_config=lambda args, dtype, bos, eos: {
            "model_type": "mine",
            "sizes": [args.dim, args.n_layers, args.n_heads, args.vocab_size],
            "torch_dtype": dtype,
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
        from_config=lambda config: Args(*config["sizes"]),
    ),
)
