"""An adapter trains as peft's does, goes to peft and back, and merged gives the same model in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.recipe.lora import own_module
from tests.stored_models import store_run
from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.config.schema import Config
from torchtitan.data.batch import Batch
from torchtitan.hardware import Place
from torchtitan.models.families import plan_model
from torchtitan.training.assemble import start_run

LOADING = {"checkpoint__enable": True, "optimizer__lr": 3e-3}


def batches_of(config: Config) -> list[Batch]:
    """What the run will read, and on ten steps the rates that it will have."""
    with start_run(config, plan_model(config), Place(0, 0, 1)) as run:
        loader = run.build_training_loader(0)
        batches = [loader.next() for _ in range(config.training.steps)]
        loader.close()
        rates = [config.optimizer.lr * run.learning_rate_factor(step + 1) for step in range(len(batches))]
    return list(zip(batches, rates, strict=True))


def train_plainly(model: nn.Module, config: Config, loss_of: Any, batches: Any) -> list[tuple[float, float]]:
    """The loop that a user would write; losses and norms of gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, section.lr, (section.beta1, section.beta2), weight_decay=section.weight_decay
    )
    seen = []
    for batch, rate in batches:
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs).logits.flatten(0, 1), batch.labels.flatten())


def furthest(records: list[dict[str, Any]], seen: list[tuple[float, float]]) -> float:
    ours = [(record["loss"], record["grad_norm"]) for record in records]
    return max(abs(a - b) / abs(b) for pair in zip(ours, seen, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize(
    ("name", "targets", "rslora"),
    [("LLAMA", None, False), ("QWEN3", ["q_proj", "v_proj", "down_proj"], True)],
)
def test_ten_steps_are_pefts_and_the_adapter_goes_there_and_back(
    name: str, targets: list[str] | None, rslora: bool, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = tmp_path / "base"
    if name == "LLAMA":
        main(["convert", str(store_run(tmp_path / "run")), str(base)])
    else:
        whole = {"checkpoint__enable": True, "training__steps": 1, "model__name": "tests.tiny_models:QWEN3"}
        train_here(tiny_config(tmp_path / "run", **whole))
        main(["convert", str(tmp_path / "run"), str(base)])
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    all_linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    chosen = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets or all_linear, use_rslora=rslora, init_lora_weights=False
    )
    torch.manual_seed(5)
    theirs = peft.get_peft_model(plain, chosen)
    theirs.save_pretrained(tmp_path / "first")

    # ours begins with their adapter, so the first loss compares the logits, and the others the training
    keys = LOADING | {
        "lora__rank": 4,
        "lora__alpha": 6.0,
        "lora__rslora": rslora,
        "model__name": f"tests.tiny_models:{name}",
    }
    keys |= {"checkpoint__initial_load_path": base, "lora__initial_load_path": str(tmp_path / "first")}
    keys |= {"lora__targets": ["wq", "wv", "w2"] if targets else []}
    config = tiny_config(tmp_path / "ours", **keys)
    seen = train_plainly(theirs, config, text_loss, batches_of(config))
    assert furthest(train_here(config), seen) <= 1e-5

    main(["convert", str(tmp_path / "ours"), str(tmp_path / "adapter")])
    main(["convert", str(tmp_path / "ours"), str(tmp_path / "merged"), "--merge"])
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.randint(2048, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens).logits
        for model in (loaded, merged):
            assert (model(tokens).logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert (loaded(tokens).logits - merged(tokens).logits).abs().max() <= 1e-5 * expected.abs().max()

    again = tiny_config(tmp_path / "again", **keys | {"lora__initial_load_path": str(tmp_path / "adapter")})
    batch = batches_of(again)[0][0]
    assert abs(train_here(again)[0]["loss"] - text_loss(merged, batch).item()) <= 1e-5 * text_loss(merged, batch).item()


class PlainLora(nn.Module):
    """What the paper says, beside the layer."""

    def __init__(self, layer: nn.Linear, a: Tensor, scaling: float) -> None:
        super().__init__()
        self.layer, self.scaling = layer, scaling
        self.a, self.b = nn.Parameter(a), nn.Parameter(torch.zeros(layer.out_features, len(a)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scaling * (x @ self.a.T @ self.b.T)


def test_a_users_module_trains_as_thirty_plain_lines_do_and_is_taken_away(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(3)
    model = own_module.Model()
    torch.save(model.state_dict(), tmp_path / "base.pt")
    keys = LOADING | {"lora__rank": 4, "checkpoint__initial_load_path": tmp_path / "base.pt", "training__steps": 6}
    keys |= {"model__name": f"{own_module.__file__}:SPEC", "lora__targets": ["blocks.*.up", "leave"]}
    config = tiny_config(tmp_path / "run", **keys)
    records = train_here(tiny_config(tmp_path / "first", **keys | {"training__steps": 1, "optimizer__lr": 1e-30}))
    main(["export", str(tmp_path / "first"), str(tmp_path / "start")])
    first = load_file(tmp_path / "start/adapter/adapter_model.safetensors")

    model.requires_grad_(False)
    for name in ["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.3.up", "leave"]:
        owner, _, leaf = name.rpartition(".")
        layer = PlainLora(model.get_submodule(name), first[f"base_model.model.{name}.lora_A.weight"], 16 / 4)
        setattr(model.get_submodule(owner), leaf, layer)
    with start_run(config, plan_model(config), Place(0, 0, 1)) as run:
        loader = run.build_training_loader(0)
        samples = [loader.next().parts[0] for _ in range(6)]
        loader.close()
        rates = [config.optimizer.lr * run.learning_rate_factor(step) for step in range(1, 7)]
    batches = list(zip(samples, rates, strict=True))
    loss = lambda model, part: F.cross_entropy(model(part.inputs), part.targets)  # noqa: E731
    records = train_here(config)
    assert furthest(records, train_plainly(model, config, loss, batches)) <= 1e-5

    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    merged = own_module.Model()
    merged.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    x = torch.randn(7, 8)
    assert torch.allclose(merged(x), model(x), atol=1e-5)
    peft = pytest.importorskip("peft")
    base = own_module.Model()
    base.load_state_dict(torch.load(tmp_path / "base.pt"))
    assert torch.allclose(peft.PeftModel.from_pretrained(base, tmp_path / "out/adapter")(x), model(x), atol=1e-5)
