"""Loss, learning-rate schedule, optimizer and recompute, each against arithmetic done by hand."""

import importlib.util
import logging
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.config.schema import ActivationCheckpoint, Compile, LRScheduler, Optimizer
from torchtitan.models.decoder.model import Transformer
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.spec import IGNORED
from torchtitan.parallel.collectives import GlobalNorm, squares_at_once, squares_by_row
from torchtitan.parallel.parts import ModelParts
from torchtitan.parallel.recompute import apply_recompute
from torchtitan.refusal import Refusal
from torchtitan.training.loss import _Kernels, build_loss, cross_entropy_sum
from torchtitan.training.optimizer import apply_update, build_optimizer, make_states
from torchtitan.training.optimizer.average import Average
from torchtitan.training.optimizer.bfloat16 import _update
from torchtitan.training.optimizer.in_backward import update_in_backward
from torchtitan.training.optimizer.lr_schedule import learning_rate_factor

ROOT = Path(__file__).parents[3]


def test_the_loss_is_a_float32_sum_over_the_labels_that_count() -> None:
    logits = torch.randn(2, 5, 11, dtype=torch.bfloat16)
    labels = torch.randint(11, (2, 5))
    labels[0, 3:] = IGNORED
    expected = sum(
        -logits[b, s].float().log_softmax(-1)[labels[b, s]]
        for b in range(2)
        for s in range(5)
        if labels[b, s] != IGNORED
    )
    summed = cross_entropy_sum(logits, labels)
    assert summed.dtype == torch.float32
    assert summed.item() == pytest.approx(float(expected), rel=1e-6)


def plain_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_has_the_value_and_the_gradient_of_torchs(dtype: torch.dtype, is_compiled: bool) -> None:
    loss = partial(cross_entropy_sum, kernels=_Kernels(least_elements=1000))  # 3 rows of 301, the last chunk has 1
    if is_compiled:
        loss = build_loss(Compile(enable=True))
    hidden, weight = torch.randn(2, 14, 16, dtype=dtype), torch.randn(301, 16, dtype=dtype)
    labels = torch.randint(301, (2, 14))
    labels[1, ::3] = IGNORED
    values, gradients = [], []
    for compute in (plain_cross_entropy, loss):
        leaf = weight.clone().requires_grad_()
        summed = compute(hidden @ leaf.T, labels)
        (summed / 7).backward()
        assert leaf.grad is not None
        values.append(summed.detach())
        gradients.append(leaf.grad)
    assert torch.allclose(*values, rtol=1e-6)
    assert torch.allclose(*gradients, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)


def test_the_loss_is_compiled_only_where_asked() -> None:
    assert build_loss(Compile(enable=True, components=["model"])) is cross_entropy_sum
    compiled = build_loss(Compile(enable=True, components=["loss"], backend="aot_eager"))
    logits, labels = torch.randn(1, 4, 7), torch.tensor([[1, 2, IGNORED, 3]])
    assert compiled is not cross_entropy_sum
    assert torch.allclose(compiled(logits, labels), cross_entropy_sum(logits, labels))


def factors(config: LRScheduler, steps: int) -> list[float]:
    return [learning_rate_factor(step, config, steps) for step in range(1, steps + 1)]


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    assert factors(LRScheduler(warmup_steps=4), 10)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_without_a_decay_ratio_decay_follows_warmup_and_never_trains_at_zero() -> None:
    assert factors(LRScheduler(warmup_steps=2), 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_with_a_decay_ratio_the_rate_is_stable_before_the_decay() -> None:
    values = factors(LRScheduler(warmup_steps=2, decay_ratio=0.4), 10)
    assert values[1:7] == [1.0] * 6
    assert values[7:] == pytest.approx([0.75, 0.5, 0.25])


@pytest.mark.parametrize(("kind", "halfway"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_the_decay_has_its_shape_and_ends_above_the_smallest_factor(kind: str, halfway: float) -> None:
    config = LRScheduler(warmup_steps=0, decay_ratio=1.0, decay_type=kind, min_lr_factor=0.1)  # type: ignore[arg-type]
    values = factors(config, 100)
    assert values[0] == 1.0
    assert values[50] == pytest.approx(0.1 + 0.9 * halfway)
    assert 0.1 < values[-1] < 0.11
    assert values == sorted(values, reverse=True)


def test_a_longer_schedule_than_the_run_keeps_its_curve() -> None:
    config = LRScheduler(warmup_steps=5, total_steps=100)
    assert factors(config, 20) == factors(config, 100)[:20]


TINY = LlamaArgs(dim=32, n_layers=4, n_heads=2, n_kv_heads=1, hidden_dim=64, vocab_size=64)
SHORT = Optimizer(moments_dtype="bfloat16")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def test_weight_decay_can_be_kept_off_norms_and_biases() -> None:
    everything = build_optimizer(small_model().named_parameters(), Optimizer())
    assert [group["weight_decay"] for group in everything.param_groups] == [0.1]
    matrices, vectors = build_optimizer(
        small_model().named_parameters(), Optimizer(weight_decay_norms_and_biases=False)
    ).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert [p.ndim for p in matrices["params"]] == [2]
    assert [p.ndim for p in vectors["params"]] == [1, 1, 1]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_all_implementations_take_the_same_step(implementation: str) -> None:
    model = small_model()
    config = Optimizer(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, implementation=implementation)  # type: ignore[arg-type]
    optimizer = build_optimizer(model.named_parameters(), config)
    weight, gradient = model[0].weight.detach().clone(), torch.randn(4, 4)
    model[0].weight.grad = gradient.clone()
    apply_update(optimizer, 0.5e-2, torch.tensor(1.0))
    # The first AdamW step: both moments are corrected to the gradient itself.
    expected = weight * (1 - 0.5e-2 * 0.1) - 0.5e-2 * gradient / (gradient.abs() + 1e-6)
    assert torch.allclose(model[0].weight, expected, atol=1e-6)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("config", [Optimizer(), Optimizer(implementation="foreach"), SHORT])
def test_gradients_are_scaled_down_to_the_largest_norm(config: Optimizer) -> None:
    """A gradient five times too long gives the moments of one a fifth as long."""
    model, gradient = small_model(), torch.randn(4, 4)
    optimizer = build_optimizer(model.named_parameters(), config)
    model[0].weight.grad = gradient.clone()
    apply_update(optimizer, 1e-3, torch.tensor(10.0), max_norm=2.0)
    mean = optimizer.state[model[0].weight]["exp_avg"].float()
    assert torch.allclose(mean, 0.1 * gradient / 5, rtol=1e-2 if config is SHORT else 1e-5)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_muon_takes_the_matrices_within_blocks_and_adamw_the_rest(moments: str) -> None:
    model = Transformer(TINY)
    reference = Transformer(TINY)
    reference.load_state_dict(model.state_dict())
    optimizer = build_optimizer(model.named_parameters(), Optimizer(name="Muon", moments_dtype=moments))
    matrices = [p for name, p in reference.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours.grad, theirs.grad = torch.randn_like(ours), None
        theirs.grad = ours.grad / (torch.tensor(2.0) + 1e-6)
    apply_update(optimizer, 1e-3, torch.tensor(2.0), max_norm=1.0)
    muon.step()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        by_muon = name.startswith("layers.") and ours.ndim == 2
        assert set(optimizer.state[ours]) == ({"momentum_buffer"} if by_muon else {"step", "exp_avg", "exp_avg_sq"})
        assert torch.allclose(ours, theirs, atol=1e-7) == by_muon


def test_a_weight_that_had_no_gradient_gets_its_states_and_the_others_keep_theirs() -> None:
    model = small_model()
    optimizer = build_optimizer(model.named_parameters(), Optimizer())
    used = model[0].weight
    used.grad = torch.ones_like(used)
    apply_update(optimizer, 1e-3, torch.tensor(1.0))
    before = {name: value.clone() for name, value in optimizer.state[used].items()}
    make_states(optimizer)
    assert all(torch.equal(value, optimizer.state[used][name]) for name, value in before.items())
    assert all(optimizer.state[p].keys() == before.keys() for p in model.parameters())


def test_an_average_follows_the_weights_and_takes_their_place_for_a_while() -> None:
    model = small_model()
    average = Average(ModelParts({0: model}, (0,), None, 0, 0), 0.75)  # type: ignore[arg-type]
    weight, first = model[0].weight, model[0].weight.detach().clone()
    with torch.no_grad():
        weight += 1.0
    average.update()
    average.swap()
    assert torch.allclose(weight, first + 0.25)
    average.swap()
    assert torch.allclose(weight, first + 1.0)


def test_a_model_can_name_the_matrices_for_muon() -> None:
    model = Transformer(TINY)
    optimizer = build_optimizer(
        model.named_parameters(), Optimizer(name="Muon"), takes_muon=lambda name: "feed_forward" in name
    )
    make_states(optimizer)
    by_muon = {name for name, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    assert by_muon == {f"layers.{i}.feed_forward.{w}.weight" for i in range(4) for w in ("w1", "w2", "w3")}


EXPERTS = [(f"layers.{i}.experts.w1", nn.Parameter(torch.ones(2, 4, 3))) for i in range(2)]
ROUTER = ("layers.0.router.weight", nn.Parameter(torch.ones(4, 3)))


def test_muon_updates_each_matrix_of_a_stack_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(3, *size)) for size in ((6, 8), (8, 6))]
    alone = [nn.Parameter(matrix.detach().clone()) for stack in whole for matrix in stack]
    together = [*whole, nn.Parameter(torch.ones(2, 2))]
    one = build_optimizer([(f"layers.{i}", p) for i, p in enumerate(together)], Optimizer(name="Muon"))
    each = build_optimizer([(f"layers.{i}", p) for i, p in enumerate(alone)], Optimizer(name="Muon"))
    for _ in range(3):
        for stack, matrices in zip(whole, (alone[:3], alone[3:]), strict=True):
            stack.grad = torch.randn_like(stack)
            for matrix, gradient in zip(matrices, stack.grad.clone(), strict=True):
                matrix.grad = gradient
        for optimizer in (one, each):
            apply_update(optimizer, 0.1, torch.ones(()))
    assert torch.allclose(torch.cat([stack.flatten() for stack in whole]), torch.cat([m.flatten() for m in alone]))


def test_muon_refuses_a_weight_that_is_no_matrix() -> None:
    message = (
        r'optimizer.name = "Muon", but layers.0.filters has the shape \[2, 4, 3, 3\], and .* matrices and stacks .*'
        r'set optimizer.name = "AdamW", or make the model\'s takes_muon return False'
    )
    with pytest.raises(Refusal, match=message):
        build_optimizer([("layers.0.filters", nn.Parameter(torch.ones(2, 4, 3, 3)))], Optimizer(name="Muon"))


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_adamw_updates_a_weight_that_is_no_matrix_if_the_model_says_so(
    moments: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Optimizer(name="Muon", moments_dtype=moments)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        optimizer = build_optimizer([ROUTER, *EXPERTS], config, takes_muon=lambda name: "experts" not in name)
    assert [record.getMessage() for record in caplog.records] == [
        "AdamW updates these weights, which have too many dimensions for Muon: layers.*.experts.w1"
    ]
    make_states(optimizer)
    assert set(optimizer.state[ROUTER[1]]) == {"momentum_buffer"}
    for _, experts in EXPERTS:
        assert set(optimizer.state[experts]) == {"step", "exp_avg", "exp_avg_sq"}


def test_muon_logs_no_weights_if_none_is_larger_than_a_matrix(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_optimizer(Transformer(TINY).named_parameters(), Optimizer(name="Muon"))
        build_optimizer(EXPERTS, Optimizer())
    assert not caplog.records


@pytest.mark.parametrize("compile_", [None, pytest.param(Compile(enable=True), marks=pytest.mark.slow)])
def test_moments_in_bfloat16_train_as_those_in_float32_do(compile_: Compile | None) -> None:
    """With a decay of 0.999 a change of the mean square is far below what bfloat16 can tell apart."""
    torch.manual_seed(0)
    initial, moved, squares = torch.randn(64, 32), [], []
    for config in (Optimizer(beta2=0.999), SHORT.model_copy(update={"beta2": 0.999})):
        weight, generator = nn.Parameter(initial.clone()), torch.Generator().manual_seed(1)
        optimizer = build_optimizer([("weight", weight)], config, compile_)
        optimizer._elements = 320  # ten rows at a time
        for _ in range(200):
            weight.grad = 0.01 + 0.1 * torch.randn(64, 32, generator=generator)
            apply_update(optimizer, 1e-3, torch.tensor(1.0))
        moved.append(weight.detach() - initial)
        squares.append(optimizer.state[weight]["exp_avg_sq"].float())
    assert optimizer.state[weight]["exp_avg_sq"].dtype == torch.bfloat16
    assert (squares[1] / squares[0]).mean().item() == pytest.approx(1.0, abs=2e-3)
    assert (moved[1] - moved[0]).abs().max() < 0.03 * moved[0].abs().mean()


@pytest.mark.parametrize("compile_", [None, pytest.param(Compile(enable=True), marks=pytest.mark.slow)])
def test_parameters_in_bfloat16_are_rounded_once_an_update(compile_: Compile | None) -> None:
    """1.0 less the decay alone would be 1.0 again."""
    moved = []
    for config in (Optimizer(), SHORT):
        weight = nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))
        optimizer = build_optimizer([("weight", weight)], config, compile_)
        weight.grad = torch.full_like(weight, 0.5)
        apply_update(optimizer, 2e-3, torch.tensor(1.0))
        moved.append(weight.detach())
    assert torch.equal(*moved) and (moved[0] < 1).all()


@pytest.mark.parametrize("columns", [(6,), (6, 3)], ids=["matrix", "three dimensions"])
def test_moments_are_rounded_by_a_parameters_place_in_the_whole(columns: tuple[int, ...]) -> None:
    """A shard of a weight is rounded as the same elements of the whole are."""
    torch.manual_seed(0)
    whole = [torch.randn(8, *columns) for _ in range(2)]
    whole += [torch.zeros(8, *columns, dtype=torch.bfloat16) for _ in range(2)]
    shard = [tensor[4:, 2:].clone() for tensor in whole]
    flat = [tensor.clone().view(-1) for tensor in whole]
    one = torch.tensor(1.0)
    for tensors, place in (
        (whole, list(zip((0, 0, 0), (8, *columns), strict=False))),
        (shard, list(zip((4, 2, 0), (8, *columns), strict=False))),
        (flat, [(0, whole[0].numel())]),
    ):
        _update(*tensors, torch.tensor(place).int(), one, one.bool(), one, one * 1e-3, 0.9, 0.999, 1e-8, 0.1)
    for of_whole, of_shard, of_flat in zip(whole, shard, flat, strict=True):
        assert torch.equal(of_whole[4:, 2:], of_shard) and torch.equal(of_whole.view(-1), of_flat)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch's builds for GPUs")
@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
def test_the_update_of_moments_in_bfloat16_compiles_for_an_h100_in_few_graphs(gradients: str) -> None:
    command = [sys.executable, "-m", "tests.recipe.training.for_sm90", gradients]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout.split()[-1]) < 8  # torch compiles a function at most eight times


@pytest.mark.parametrize("config", [Optimizer(), SHORT])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_an_update_with_a_norm_that_is_not_finite_changes_nothing(norm: float, config: Optimizer) -> None:
    model = small_model()
    optimizer = build_optimizer(model.named_parameters(), config)
    model[0].weight.grad = torch.ones(4, 4)
    apply_update(optimizer, 1e-3, torch.tensor(1.0))
    weight = model[0].weight.detach().clone()
    state = {name: value.clone() for name, value in optimizer.state[model[0].weight].items()}
    model[0].weight.grad = torch.full((4, 4), math.nan)
    apply_update(optimizer, 1e-3, torch.tensor(norm))
    assert torch.equal(model[0].weight, weight)
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state[model[0].weight].items())


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_an_update_in_backward_is_the_same_to_the_bit(name: str, moments: str) -> None:
    trained, norms = [], []
    for early in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        config = Optimizer(name=name, moments_dtype=moments, weight_decay_norms_and_biases=False)  # type: ignore[arg-type]
        optimizer, norm = build_optimizer(model.named_parameters(), config, takes_muon=lambda name: True), GlobalNorm()
        if early:
            update_in_backward(optimizer, norm.add, lambda: 1e-2)
        for _ in range(3):
            model(torch.ones(2, 6)).square().sum().backward()
            assert all((p.grad is None) is early for p in model.parameters())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    norm.add(parameter.grad)
            norms.append(norm.total().item())
            apply_update(optimizer, 1e-2, torch.tensor(norms[-1]))
        trained.append([p.detach() for p in model.parameters()])
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-6)
    for late, soon in zip(*trained, strict=True):
        assert torch.equal(late, soon)


def test_the_global_norm_is_exact_for_large_tensors() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(20000, 256) * 1e-3, torch.randn(256), torch.empty(0, 256)]
    exact = torch.cat([t.flatten() for t in tensors]).double().norm().item()
    norm = GlobalNorm()
    norm.add(*tensors)
    assert norm.total().item() == pytest.approx(exact, rel=1e-6)


def test_squares_added_up_as_on_a_gpu_are_those_by_row() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(200, 16).bfloat16(), torch.randn(16), torch.empty(0, 16)]
    by_row, at_once = sum(squares_by_row(tensors)), sum(squares_at_once(tensors))
    assert at_once.item() == pytest.approx(by_row.item(), rel=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        ActivationCheckpoint(mode="full"),
        ActivationCheckpoint(mode="full", early_stop=True, preserve_rng_state=False, determinism_check="none"),
        ActivationCheckpoint(mode="selective", selective_ac_option="2"),
        ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    ],
    ids=["full", "full, other options", "every second block", "by operation"],
)
def test_recomputing_changes_neither_loss_nor_gradients_nor_names(config: ActivationCheckpoint) -> None:
    gradients = []
    for mode in (ActivationCheckpoint(mode="none"), config):
        torch.manual_seed(0)
        model = Transformer(TINY)
        apply_recompute(model, [f"layers.{n}" for n in model.layers], mode)
        tokens = torch.arange(24).view(2, 12)
        cross_entropy_sum(model(tokens), tokens).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    assert list(recomputed) == list(plain)
    for ours, reference in zip(recomputed.values(), plain.values(), strict=True):
        assert torch.equal(ours, reference)


def test_a_selective_option_recomputes_only_every_nth_block() -> None:
    model = Transformer(TINY)
    names = [f"layers.{n}" for n in model.layers]
    apply_recompute(model, names, ActivationCheckpoint(mode="selective", selective_ac_option="2"))
    assert ["forward" in vars(layer) for layer in model.layers.values()] == [True, False, True, False]
