"""A rank that is alone casts its weights: the same numbers and files as FSDP on one rank, and all are put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import LLAMA
from tests.tiny_runs import tiny_config, train_here
from torchtitan.models.decoder.args import DecoderArgs
from torchtitan.models.decoder.model import Transformer, initialize
from torchtitan.models.layers import rope_table
from torchtitan.parallel.parts import CastWeights
from torchtitan.training import parallelize

EXPERTS = {"model__name": "tests.tiny_models:EXPERTS"}


class Odd(Transformer):
    """It looks up twice, and has a table of whole numbers."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.table = nn.Parameter(torch.zeros(args.vocab_size, dtype=torch.int64), requires_grad=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = self.tok_embeddings(tokens) + self.tok_embeddings(tokens.roll(1, -1) + self.table[tokens])
        cos, sin = rope_table(torch.arange(tokens.shape[1]), self.args.head_size, self.args.rope_theta, None)
        for layer in self.layers.values():
            h = layer(h, cos, sin, mask)
        return self.output(self.norm(h))


def initialize_odd(name: str, weight: Tensor, args: DecoderArgs, generator: torch.Generator) -> None:
    if name == "table":
        weight.zero_()
    else:
        initialize(name, weight, args, generator)


ODD = replace(LLAMA, build=Odd, initialize=initialize_odd)
CASES: dict[str, dict[str, Any]] = {
    "float32": {"training__mixed_precision_param": "float32"},
    "accumulating": {"training__local_batch_size": 2},
    "tied, recomputing": {"model__flavor": "tiny-tied", "activation_checkpoint__mode": "full"},
    "recomputing by operation": {"activation_checkpoint__mode": "selective"},
    "weights in bfloat16": {"training__dtype": "bfloat16", "training__local_batch_size": 2},
    "computed in float32": {
        "training__dtype": "bfloat16",
        "training__mixed_precision_param": "float32",
        "training__local_batch_size": 2,
    },
    "float16": {"training__mixed_precision_param": "float16", "optimizer__moments_dtype": "bfloat16"},
    "moments in bfloat16": {"optimizer__moments_dtype": "bfloat16"},
    "compiled, moments in bfloat16": {
        "optimizer__moments_dtype": "bfloat16",
        "compile__enable": True,
        "compile__backend": "aot_eager",
    },
    "accumulating, moments in bfloat16": {"optimizer__moments_dtype": "bfloat16", "training__local_batch_size": 2},
    "updates in backward": {"optimizer__early_step_in_backward": True, "training__max_norm": float("inf")},
    "a family of one's own": {"model__name": f"{__name__}:ODD", "training__local_batch_size": 4},
    "experts": {**EXPERTS, "model__balance": "bias", "activation_checkpoint__mode": "full"},
}


def trained(folder: Path, steps: int, options: dict[str, Any]) -> list[tuple[float, float]]:
    options = {"training__mixed_precision_param": "bfloat16", "training__steps": steps} | options
    return [(record["loss"], record["grad_norm"]) for record in train_here(tiny_config(folder, **options))]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_alone_trains_as_it_would_under_fsdp(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained(tmp_path / "alone", 4, CASES[case])
    monkeypatch.setattr(parallelize, "is_alone", lambda *_: False)
    assert alone == trained(tmp_path / "fsdp", 4, CASES[case])


def test_what_one_has_saved_the_other_goes_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"checkpoint__enable": True, "checkpoint__interval": 2} | CASES["tied, recomputing"]
    trained(tmp_path / "alone", 2, options)
    monkeypatch.setattr(parallelize, "is_alone", lambda *_: False)
    trained(tmp_path / "fsdp", 2, options)
    went_on = trained(tmp_path / "alone", 4, options)
    monkeypatch.undo()
    assert went_on == trained(tmp_path / "fsdp", 4, options)


@contextmanager
def forward_of(model: nn.Module, casts: CastWeights) -> Iterator[torch.Tensor]:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    yield model(x).float().sum()
    casts.free()


def test_a_cast_goes_with_its_gradient_and_the_next_forward_sees_new_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = dict(model.named_parameters())
    casts = CastWeights(model, torch.bfloat16, [])
    with forward_of(model, casts) as loss:
        first = ref(model[0].weight.untyped_storage())
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        seen = {}
        own["1.weight"].register_post_accumulate_grad_hook(
            lambda _: seen.update({name: p.dtype for name, p in model.named_parameters()})
        )
        loss.backward()
        # Backward came to the last layer, while the first still waited.
        assert seen["0.weight"] == torch.bfloat16 and seen["1.weight"] == torch.float32
        assert first() is None and dict(model.named_parameters()) == own
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in own.values())
    casts.keeps = True
    with forward_of(model, casts) as loss:
        kept = model[0].weight
        loss.backward()
        model(torch.zeros(1, 4, dtype=torch.bfloat16))
        assert model[0].weight is kept and kept.grad is None
    with torch.no_grad(), forward_of(model, casts):
        own["0.weight"].add_(1)
    with torch.no_grad(), forward_of(model, casts):
        assert torch.equal(model[0].weight, own["0.weight"].bfloat16())
    assert dict(model.named_parameters()) == own


def test_one_gradient_stays_as_it_came_and_a_second_makes_the_sum_wide() -> None:
    model = nn.Linear(4, 4)
    casts = CastWeights(model, torch.bfloat16, [], narrow=True)
    for dtype in (torch.bfloat16, torch.float32, torch.float32):
        with forward_of(model, casts) as loss:
            loss.backward()
        assert model.weight.grad is not None and model.weight.grad.dtype == dtype
