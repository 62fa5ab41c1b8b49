"""Mixtures of experts against plain lines and against transformers, their files, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.stored_models import hold
from tests.tiny_models import EXPERTS, TINY_EXPERTS
from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.checkpoint.storage import Storage
from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Model
from torchtitan.experts.load import Load, describe_load
from torchtitan.models.describe import describe_size
from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.families import find_model, find_spec, plan_model
from torchtitan.models.mixture import MixtureOfExperts, grouped, grouped_by_loop
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.estimate import estimate
from torchtitan.weights.checkpoint import save_checkpoint
from torchtitan.weights.stored import open_model

FAMILY = "tests.tiny_models:EXPERTS"
VOCAB = 2048
PUBLISHED = {  # family and flavor: parameters, and those that a token uses
    ("qwen3_moe", "30B-A3B"): (30_532_122_624, 3_353_032_704),
    ("qwen3_moe", "235B-A22B"): (235_093_634_560, 22_190_763_520),
    ("mixtral", "8x7B"): (46_702_792_704, 12_879_925_248),
    ("mixtral", "8x22B"): (140_630_071_296, 39_161_468_928),
}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_published_models_have_their_parameter_counts_and_config(name: str, flavor: str) -> None:
    blueprint = find_model(Model(name=name, flavor=flavor))
    total, used = PUBLISHED[name, flavor]
    assert describe_size(blueprint) == f"{total:,} parameters, of which a token uses {used:,}"
    with torch.device("meta"):
        model = blueprint.spec.build(blueprint.shape)
    for part in blueprint.parts():
        assert part.parameters == sum(p.numel() for p in model.get_submodule(part.name).parameters()), part.name
    assert blueprint.spec.hugging_face is not None
    hf = blueprint.spec.hugging_face()
    config = hf.to_config(blueprint.shape, "bfloat16", 1, 2)
    assert hf.from_config(config) == blueprint.shape
    transformers = pytest.importorskip("transformers")
    of_transformers = transformers.AutoConfig.for_model(**config)
    assert hf.from_config(of_transformers.to_dict() | {"head_dim": of_transformers.head_dim}) == blueprint.shape


@dataclass(frozen=True)
class RoutedArgs(ExpertArgs):
    """DeepSeek V3's router: sigmoid, a bias that chooses, groups, a shared expert, a first layer without experts."""

    score: Any = field(default="sigmoid", init=False)
    score_scale: float = field(default=2.5, init=False)
    num_groups: int = field(default=4, init=False)
    groups_per_token: int = field(default=2, init=False)
    num_shared_experts: int = field(default=1, init=False)
    num_dense_layers: int = field(default=1, init=False)
    dense_hidden_dim: int | None = field(default=48, init=False)


def store(folder: Path, weights: Mapping[str, Tensor], **keys: Any) -> Path:
    """A run folder whose checkpoint of step 0 holds these weights."""
    config = tiny_config(folder, **keys).model_dump(mode="json")
    save_checkpoint(hold(dict(weights)), Storage(f"{folder}/checkpoint"), config, None)
    return folder


def randomized(module: nn.Module) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and parameter.requires_grad else 0.0, 0.2)
    return module


def plainly(mixture: MixtureOfExperts, args: ExpertArgs, x: Tensor) -> Tensor:
    """A token and an expert at a time."""

    def network(v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return w2 @ (F.silu(w1 @ v) * (w3 @ v))

    outs = []
    for token in x.flatten(0, 1):
        logits = mixture.router.weight @ token
        scores = logits.softmax(0) if args.score == "softmax" else logits.sigmoid()
        ranked = scores.detach() if mixture.router.bias is None else scores.detach() + mixture.router.bias
        if args.num_groups > 1:
            size = args.num_experts // args.num_groups
            worth = [sum(sorted(group.tolist())[-2:]) for group in ranked.split(size)]
            best = sorted(range(args.num_groups), key=lambda g: -worth[g])[: args.groups_per_token]
            allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        else:
            allowed = list(range(args.num_experts))
        chosen = sorted(allowed, key=lambda e: -ranked[e].item())[: args.experts_per_token]
        total = sum(scores[e] for e in chosen) if args.normalizes else 1.0
        w = mixture.experts
        out = sum(args.score_scale * scores[e] / total * network(token, w.w1[e], w.w2[e], w.w3[e]) for e in chosen)
        if mixture.shared is not None:
            shared = mixture.shared
            out = out + network(token, shared.w1.weight, shared.w2.weight, shared.w3.weight)
        outs.append(out)
    return torch.stack(outs).view_as(x)


ARGS = {
    "softmax": ExpertArgs(16, 2, 2, 2, 24),
    "odd sizes, not normalised": replace(ExpertArgs(18, 2, 1, 1, 7, num_experts=5, experts_per_token=3)),
    "sigmoid, bias, groups, shared": RoutedArgs(16, 2, 2, 2, 24, num_experts=8, experts_per_token=3, balance="bias"),
}


@pytest.mark.parametrize("name", ARGS)
def test_a_mixture_is_what_plain_lines_compute(name: str) -> None:
    args = ARGS[name]
    if "not normalised" in name:
        object.__setattr__(args, "normalizes", False)
    mixture = randomized(MixtureOfExperts(args))
    x = torch.randn(2, 9, args.dim, requires_grad=True)
    found, expected = mixture(x), plainly(mixture, args, x)
    assert torch.allclose(found, expected, atol=1e-5)
    weights = [x, *(p for p in mixture.parameters() if p.requires_grad)]
    direction = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((out * direction).sum(), weights) for out in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert mixture.counts.sum() == 2 * 9 * args.experts_per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_product_equals_a_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 10, 10], dtype=torch.int32)
    rows, weights = torch.randn(10, 16, dtype=dtype), torch.randn(4, 24, 16, dtype=dtype)
    results = []
    for product in (grouped, grouped_by_loop):
        given = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = product(*given, ends)
        (out.float().square() * 0.5).sum().backward()
        results.append((out, *(each.grad for each in given)))
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("hidden_dim", [24, 20])  # by torch's product, and by the loop
def test_rows_between_experts_change_nothing(hidden_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ExpertArgs(16, 2, 2, 2, hidden_dim, num_experts=4, experts_per_token=2)
    mixture = randomized(MixtureOfExperts(args)).bfloat16()
    x = torch.randn(512, 16, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for multiple in (32, 2**20):  # 2**20: none
        monkeypatch.setattr("torchtitan.models.mixture._MULTIPLE", multiple)
        out = mixture(x)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), [x, *mixture.parameters()])))
    for a, b in zip(*results, strict=True):
        assert torch.linalg.vector_norm((a - b).float()) < 1e-2 * torch.linalg.vector_norm(b.float())


def balancing_of_transformers(logits: Tensor, args: ExpertArgs) -> Tensor:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    loss = load_balancing_loss_func((logits,), args.num_experts, args.experts_per_token)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_loss_balance_and_gradients_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The balancing loss takes the share of choices from the last batch, so the same batch is given twice."""
    transformers = pytest.importorskip("transformers")
    spec = find_spec(family)
    args = replace(spec.flavors["debugmodel"], vocab_size=VOCAB, dim=64, n_layers=2, balance_rate=0.5)
    model = randomized(spec.build(args))
    run = tmp_path / "run"
    config = tiny_config(run, model__name=family, model__flavor="debugmodel", model__dim=64, model__n_layers=2)
    save_checkpoint(
        hold(dict(model.named_parameters())), Storage(f"{run}/checkpoint"), config.model_dump(mode="json"), None
    )
    main(["convert", str(run), str(tmp_path / "hf")])
    twin, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values())
    tokens = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    model(tokens)
    for mixture in mixtures:
        mixture.batch_tokens = tokens.numel()
        mixture.before.copy_(mixture.counts)
    theirs = twin(tokens, output_router_logits=True)
    ours = model(tokens)
    assert (ours - theirs.logits).abs().max() <= 1e-4
    added = sum(balancing_of_transformers(logits, args) for logits in theirs.router_logits) / 2 * args.balance_rate
    of_scores = [
        mixture.balancing_loss(logits.softmax(-1))
        for mixture, logits in zip(mixtures, theirs.router_logits, strict=True)
    ]
    assert abs(sum(of_scores) - added) <= 1e-5
    loss, expected = (
        F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for out in (ours, theirs.logits)
    )
    loss.backward()  # with the balancing loss, which begins in the routers
    (expected + added).backward()
    assert spec.hugging_face is not None
    to_name, gradients = spec.hugging_face().to_name, {name: p.grad for name, p in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            theirs_name = to_name(name).replace("block_sparse_moe", "mlp")
            assert (parameter.grad - gradients[theirs_name]).abs().max() <= 1e-4, name
    for i, mixture in enumerate(mixtures):
        both = torch.cat([mixture.experts.w1.grad, mixture.experts.w3.grad], 1)
        assert (both - gradients[f"model.layers.{i}.mlp.experts.gate_up_proj"]).abs().max() <= 1e-4


def test_there_and_back_nothing_has_changed(tmp_path: Path) -> None:
    weights = {
        name: torch.randn(p.shape).to(torch.bfloat16)
        for name, p in EXPERTS.build(replace(TINY_EXPERTS, vocab_size=VOCAB)).named_parameters()
    }
    run = store(tmp_path / "run", weights, model__name=FAMILY)
    main(["convert", str(run), str(tmp_path / "hf"), "--shard_gb", "0.0003"])
    main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")])
    back = open_model(str(tmp_path / "back"))
    assert back.family == "qwen3_moe" and back.blueprint.shape == replace(TINY_EXPERTS, vocab_size=VOCAB)
    assert back.weights.outline.keys() == weights.keys()
    assert all(torch.equal(back.weights.read(name), weight) for name, weight in weights.items())
    main(["convert", str(tmp_path / "back"), str(tmp_path / "again"), "--shard_gb", "0.0003"])
    for path in (tmp_path / "hf").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_an_export_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = tmp_path / "run"
    model = EXPERTS.build(replace(TINY_EXPERTS, vocab_size=VOCAB))
    config = tiny_config(run, model__name=FAMILY)
    save_checkpoint(
        hold(dict(model.named_parameters())), Storage(f"{run}/checkpoint"), config.model_dump(mode="json"), None
    )
    main(["convert", str(run), str(tmp_path / "hf")])
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(Refusal, match=r"missing: model.layers.1.mlp.experts.\*.up_proj.weight"):
        open_model(str(tmp_path / "hf"))


@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_a_run_learns_and_keeps_its_experts_busy(balance: str, tmp_path: Path) -> None:
    keys = {"model__name": FAMILY, "model__balance": balance, "model__balance_rate": 0.01, "optimizer__name": "Muon"}
    last = (records := train_here(tiny_config(tmp_path, **keys)))[-1]
    assert last["loss"] < records[0]["loss"] - 0.3
    assert last["dead_experts"] == 0 and 0.85 < last["expert_entropy"] <= 1
    assert round(last["expert_load"], 4) == max(last["expert_load_by_layer"]) < 4
    assert (tmp_path / "experts.png").is_file()


def test_the_bias_is_in_float32_and_follows_no_update_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.experts.load.sum_over", lambda tensor, _: tensor)
    mixture = randomized(MixtureOfExperts(ARGS["sigmoid, bias, groups, shared"])).to(torch.bfloat16)
    load, bias = Load([mixture], [""], None, None, 8, 8), mixture.router.bias  # type: ignore[arg-type]
    load.reset(torch.device("cpu"))
    assert bias.dtype == torch.float32 and mixture.router.weight.dtype == torch.bfloat16
    bias.zero_()
    for norm, most in ((torch.inf, 0.0), (1.0, 0.001)):
        mixture(torch.randn(8, 16, dtype=torch.bfloat16))
        load.after_update(torch.tensor(norm))
        assert bias.abs().max() == torch.tensor(most) and mixture.counts.sum() == 0 < mixture.before.sum()


def test_the_load_is_described_in_numbers() -> None:
    found = describe_load([[2, 2, 2, 2], [8, 0, 0, 0]])
    assert found == {
        "expert_load": 4.0, "dead_experts": 3, "expert_entropy": 0.5, "expert_load_by_layer": [1.0, 4.0],
        "dead_experts_by_layer": [0, 3], "expert_entropy_by_layer": [1.0, 0.0],
    }  # fmt: skip


LLAMA = {"model__name": "llama3", "model__flavor": "debugmodel"}
EP = "parallelism__expert_parallel_degree"
REFUSALS: dict[str, tuple[int, dict[str, Any]]] = {
    "does not divide the 8 experts": (6, {EP: 3}),
    "does not divide the 4 ranks of a stage": (4, {EP: 8}),
    "has no experts; use 1": (2, LLAMA | {EP: 2}),
    "has no experts to share out; use 1": (2, {"model__name": "tests.recipe.own_model.any_models:MLP", EP: 2}),
    "a token chooses among 8 of num_experts = 8": (1, {"model__experts_per_token": 9}),
    "llama3 has no balance": (1, LLAMA | {"model__balance": "bias"}),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_is_refused(message: str) -> None:
    world_size, overrides = REFUSALS[message]
    size = {"training__local_batch_size": 1, "training__global_batch_size": 12}
    with pytest.raises(ConfigError, match=message):
        plan_model(tiny_config("unused", world_size, **{"model__name": FAMILY} | size | overrides))


def test_a_bias_has_no_place_in_files_of_transformers() -> None:
    assert EXPERTS.hugging_face is not None
    with pytest.raises(Refusal, match='model.balance = "bias" has trained a bias'):
        EXPERTS.hugging_face().to_config(replace(TINY_EXPERTS, balance="bias"), "float32", 0, 1)


def test_a_model_with_layers_between_that_have_no_experts_is_refused() -> None:
    assert EXPERTS.hugging_face is not None
    hf = EXPERTS.hugging_face()
    config = json.loads(json.dumps(hf.to_config(replace(TINY_EXPERTS, vocab_size=97), "float32", 0, 1)))
    with pytest.raises(
        Refusal,
        match=r"decoder_sparse_step = 2, must be 1; mlp_only_layers = \[0\], must be \[\]; norm_topk_prob = False",
    ):
        hf.from_config(config | {"decoder_sparse_step": 2, "mlp_only_layers": [0], "norm_topk_prob": False})


def test_a_dry_run_counts_each_expert_once_and_frees_what_fsdp_gathers() -> None:
    keys = {"model__name": FAMILY, "parallelism__expert_parallel_degree": 4, "activation_checkpoint__mode": "full"}
    size = {"training__local_batch_size": 1, "training__global_batch_size": 16, "model__n_layers": 8}
    config = tiny_config("unused", 16, **keys | size)
    blueprint = plan_model(config).with_vocabulary(64)
    found = estimate(config, blueprint, 0, 16)
    assert found.parameters == blueprint.num_parameters
    assert found.peak["optimizer"] == pytest.approx(8 * blueprint.num_parameters / 16, rel=0.01)  # two moments
    layer = 4 * max(part.parameters for part in blueprint.parts())
    assert found.peak["parameters"] < 4 * blueprint.num_parameters / 16 + 2 * layer
