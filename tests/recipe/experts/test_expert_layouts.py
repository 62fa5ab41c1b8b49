"""Experts on any layout train as on one process, whoever has them and however the tokens choose."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import COMPILED, differences, layout, of_one_process, seldom
from tests.recipe.distributed.test_qwen3_layouts import generated
from tests.recipe.experts import own_experts
from tests.recipe.experts.test_experts import VOCAB, store
from tests.tiny_models import EXPERTS
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.hardware import Place
from torchtitan.models.families import plan_model
from torchtitan.parallel.collectives import GlobalNorm, sum_over
from torchtitan.training.assemble import start_run
from torchtitan.weights.stored import open_model

# With two local batches a step, so that neither balance knows the global batch before the last of them.
FAMILY = {"model__name": "tests.tiny_models:EXPERTS", "optimizer__lr": 3e-3, "training__global_batch_size": 16,
          "training__steps": 6}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2": (2, layout(4)),
    "EP 2": (2, layout(4, expert_parallel_degree=2)),
    "TP 2": (2, layout(tp=2)),
    "EP 2 x FSDP 2": (4, layout(2, expert_parallel_degree=2)),
    "EP 4": (4, layout(2, expert_parallel_degree=4)),
    "EP 2 x TP 2": (4, layout(4, tp=2, expert_parallel_degree=2)),
    "CP 2 x EP 2": (4, layout(4, cp=2, expert_parallel_degree=2)),
    "HSDP 2 x EP 2": (4, layout(2, replicate=2, expert_parallel_degree=2)),
    "EP 2 x PP 2, zero bubble": (4, layout(4, pp=2, expert_parallel_degree=2, schedule="ZBVZeroBubble")),
    "EP 2 x PP 2 x FSDP 2": (8, layout(2, pp=2, expert_parallel_degree=2)),
    "FSDP 8, more ranks than experts of a token": (8, layout(1)),
}
OFTEN = [("EP 2 x TP 2", "loss"), ("CP 2 x EP 2", "bias"), ("EP 2 x PP 2 x FSDP 2", "loss")]
CASES = [(name, balance) for name in LAYOUTS for balance in ("loss", "bias")]


@pytest.mark.parametrize(("name", "balance"), seldom(CASES, OFTEN))
def test_a_layout_trains_as_one_process_does(ranks: Ranks, tmp_path: Path, name: str, balance: str) -> None:
    world_size, overrides = LAYOUTS[name]
    overrides = overrides | FAMILY | {"model__balance": balance}
    records = ranks(cases.train, world_size, str(tmp_path / "ranks"), overrides)[0]
    reference = train_here(tiny_config(tmp_path / "one", **of_one_process(overrides)))
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4
    assert [r["expert_load_by_layer"] for r in records] == [r["expert_load_by_layer"] for r in reference]
    assert records[-1]["loss"] < records[0]["loss"] - 0.1


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP 2 x FSDP 2, recompute by operation, Muon": (4, layout(2, expert_parallel_degree=2) | {
        "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op",
        "optimizer__name": "Muon"}),
    "EP 2, compiled, full recompute": (2, layout(4, expert_parallel_degree=2) | COMPILED | {
        "activation_checkpoint__mode": "full"}),
    "HSDP 2 x EP 2 x TP 2, documents kept apart": (8, layout(4, replicate=2, tp=2, expert_parallel_degree=2) | {
        "model__attn_mask_type": "block_causal"}),
}  # fmt: skip


@pytest.mark.parametrize("name", seldom(OPTIONS, ["EP 2 x FSDP 2, recompute by operation, Muon"]))
def test_an_option_trains_alike_on_a_layout(ranks: Ranks, tmp_path: Path, name: str) -> None:
    world_size, overrides = OPTIONS[name]
    overrides = overrides | FAMILY | {"training__steps": 3}
    records = ranks(cases.train, world_size, str(tmp_path / "ranks"), overrides)[0]
    reference = train_here(tiny_config(tmp_path / "one", **of_one_process(overrides)))
    # Muon rounds to bfloat16: where sums in another order fall on the other side, the update differs by it.
    assert differences(records, reference, "loss") <= (1e-4 if "Muon" in name else 1e-5)
    assert differences(records, reference, "grad_norm") <= (1e-3 if "Muon" in name else 1e-4)


def gradients(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any], biases: Sequence[Sequence[float]]
) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """For each choice of biases: a step's loss, its gradient norm, and the whole gradient of each weight of experts."""
    config = tiny_config(folder, world_size, **overrides)
    run = start_run(config, plan_model(config), Place(rank, rank, world_size))
    loader, model = run.build_training_loader(0), run.build_model(0)
    forward_backward, norm = run.build_forward_backward(model), GlobalNorm(run.mesh.stage_group)
    batch, found = loader.next(), []
    assert batch is not None
    for values in biases:
        for name, parameter in model.named_parameters():
            parameter.grad = None
            if name.endswith("router.bias"):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
                local.copy_(torch.tensor(values))
        loss = sum_over(forward_backward(batch).share.clone(), run.mesh.losses.get_group()).item()
        norm.add(*model.own_gradients())
        named = [
            (name, p.grad) for name, p in model.named_parameters() if p.grad is not None and ".feed_forward" in name
        ]
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named}
        found.append((loss, norm.total().item(), {name: gradient.clone() for name, gradient in whole.items()}))
    loader.close()
    return found


@pytest.mark.parametrize("name", seldom(["EP 4", "EP 2 x TP 2", "EP 2 x FSDP 2"], ["EP 4"]))
def test_each_expert_gets_the_gradient_of_one_process_however_unevenly_tokens_choose(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    nobody = [0.0, 0.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.0]
    two_for_all = [0.0, 9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    on_one_rank = [9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    world_size, overrides = LAYOUTS[name]
    overrides = overrides | FAMILY | {"model__balance": "bias"}
    biases = ([0.0] * 8, nobody, two_for_all, on_one_rank)
    answers = ranks(gradients, world_size, str(tmp_path / "ranks"), overrides, biases)[0]
    (reference,) = ranks(gradients, 1, str(tmp_path / "one"), of_one_process(overrides), biases)
    for values, (loss, norm, found), (expected_loss, expected_norm, expected) in zip(
        biases, answers, reference, strict=True
    ):
        assert abs(loss - expected_loss) <= 1e-5 * expected_loss and abs(norm - expected_norm) <= 1e-4 * expected_norm
        assert len(found) == 4 * 4 and found.keys() == expected.keys()
        for weight, gradient in expected.items():
            size = gradient.abs().max()
            assert size > 0 and (found[weight] - gradient).abs().max() <= 1e-5 * size, (values, weight)
            if ".experts." in weight:
                idle = [expert for expert in range(8) if gradient[expert].abs().max() == 0]
                assert idle == {0: [], 1: [3], 2: [0, *range(3, 8)], 3: [*range(2, 8)]}[biases.index(values)]


@pytest.mark.parametrize("balance", seldom(["loss", "bias"], ["loss"]))
def test_a_run_goes_on_where_other_ranks_have_the_experts(ranks: Ranks, tmp_path: Path, balance: str) -> None:
    saving = {"checkpoint__enable": True, "checkpoint__interval": 5, "training__steps": 6, "model__balance": balance}
    keys = FAMILY | saving
    alone = train_here(tiny_config(tmp_path / "alone", **keys))
    run, first = tmp_path / "run", keys | {"training__steps": 3, "lr_scheduler__total_steps": 6}
    ranks(cases.train, 4, str(run), first | layout(2, expert_parallel_degree=4))
    ranks(cases.train, 4, str(run), keys | layout(4, tp=2, expert_parallel_degree=2))
    records = read_records(run)
    assert differences(records, alone, "loss") <= 1e-5
    assert differences(records, alone, "grad_norm") <= 1e-4


def test_a_family_of_experts_of_ones_own_needs_no_change_to_the_package(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shutil.copy(own_experts.__file__, tmp_path / "mine.py")
    mine = FAMILY | {"model__name": f"{file}:SPEC", "model__flavor": "small", "training__steps": 6}
    alone = train_here(tiny_config(tmp_path / "alone", **mine))
    run, saving = tmp_path / "run", {"checkpoint__enable": True, "checkpoint__interval": 2}
    for steps, more in (
        (2, layout(2, expert_parallel_degree=2)),
        (4, layout(4, pp=2, layer_counts=[1, 3], expert_parallel_degree=2)),  # the first stage has no experts
    ):
        part = {"training__steps": steps, "lr_scheduler__total_steps": 6}
        ranks(cases.train, 4, str(run), mine | saving | part | more)
    # the shared expert and the dense first layer are split over TP
    ranks(cases.train, 4, str(run), mine | saving | layout(4, tp=2, expert_parallel_degree=4))
    records = read_records(run)
    assert differences(records, alone, "loss") <= 1e-5 and differences(records, alone, "grad_norm") <= 1e-4
    assert len(records[-1]["expert_load_by_layer"]) == 3  # one of four layers has no experts
    capsys.readouterr()
    main(["generate", "--checkpoint", str(run), "--prompt", "The", "--max_new_tokens", "8", "--temperature", "0"])
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.parametrize("flavor", ["tiny"])
def test_split_experts_write_the_same_text(flavor: str, ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        name: 1 + 0.1 * torch.randn_like(p) if p.ndim == 1 else 0.15 * torch.randn_like(p)
        for name, p in EXPERTS.build(replace(EXPERTS.flavors[flavor], vocab_size=VOCAB)).named_parameters()
    }
    run = store(tmp_path / "run", weights, model__name="tests.tiny_models:EXPERTS", model__flavor=flavor)
    (expected,) = ranks(generated, 1, str(run))
    assert ranks(generated, 4, str(run)) == [expected] * 4


def test_an_adapter_beside_experts_leaves_them_and_their_routers_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    keys = {"model__name": "tests.tiny_models:EXPERTS", "model__balance": "bias"}
    shape = replace(EXPERTS.flavors["tiny"], vocab_size=VOCAB, balance="bias")
    weights = {name: 0.1 * torch.randn_like(p) for name, p in EXPERTS.build(shape).named_parameters()}
    base = store(tmp_path / "base", weights, **keys)
    lora = keys | {
        "lora__rank": 4, "checkpoint__enable": True, "checkpoint__initial_load_path": str(base),
        "training__steps": 4, "training__global_batch_size": 16,
    }  # fmt: skip
    alone = train_here(tiny_config(tmp_path / "alone", **lora))
    records = ranks(cases.train, 4, str(tmp_path / "ranks"), lora | layout(2, expert_parallel_degree=2))[0]
    assert differences(records, alone, "loss") <= 1e-5 and differences(records, alone, "grad_norm") <= 1e-4
    assert records[-1]["loss"] < records[0]["loss"]
    saved = open_model(str(tmp_path / "ranks")).weights  # the adapter merged into its base
    for name, weight in weights.items():
        assert torch.equal(saved.read(name), weight) == (".attention.w" not in name), name
