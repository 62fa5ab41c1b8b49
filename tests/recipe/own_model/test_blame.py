"""What a user reads when samples, a plan of tensor parallelism, or a checkpoint do not fit the model."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.recipe.own_model import any_models
from torchtitan.models.families import find_spec, load_run
from torchtitan.observe.health import NotFiniteError
from torchtitan.own_model.tensor_plan import check_plan
from torchtitan.refusal import Refusal

BAD = 20  # no rank tries this sample before training


def with_labels(*bad):
    x, y = any_models.classes().tensors
    y[list(bad)] = 7
    return TensorDataset(x, y)


def entropy(output, labels):
    return F.cross_entropy(output, labels)


def of_probabilities(output, target):
    return F.binary_cross_entropy(output.sigmoid(), target)


class Reads(nn.Module):
    """Looks its labels up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 3)

    def forward(self, labels):
        return self.table(labels)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"data": lambda: with_labels(BAD), "loss": entropy},
            r"^sample 20 of the data fails in the loss of the ModelSpec at .*test_blame.py:\d+: IndexError: Target 7 "
            "is out of bounds; correct the sample",
        ),
        (
            {"data": lambda: TensorDataset(with_labels(BAD, 21).tensors[1], torch.zeros(96).long()), "build": Reads},
            r"sample 2\d of the data fails in the model's forward at .*test_blame.py:\d+: IndexError: .*correct",
        ),
        (
            {
                "data": lambda split: with_labels(*[BAD] * (split == "validation")),
                "metrics": {"right": lambda o, t: F.cross_entropy(o, t)},
                "loss": lambda o, t: F.cross_entropy(o, t % 3),
                "validation__enable": True,
                "validation__freq": 1,
            },
            "sample 20 of the data fails in the metric right at ",
        ),
    ],
    ids=["loss", "forward", "metric"],
)
def test_a_sample_that_fails_is_named_with_the_line(train, said, message):
    with pytest.raises(Refusal, match=message):
        train(steps=12, **said)


def test_an_error_that_no_sample_causes_stays_as_it_is(train):
    calls = []

    def fails_later(output, labels):
        calls.extend([0] * output.requires_grad)
        if len(calls) > 5:
            raise RuntimeError("for another reason")
        return F.cross_entropy(output, labels)

    with pytest.raises(RuntimeError, match="^for another reason$"):
        train(steps=12, loss=fails_later)


def test_of_a_loss_that_is_not_finite_the_sample_is_named(train):
    def data():
        x, y = any_models.classes().tensors
        x[BAD] = torch.nan
        return TensorDataset(x, y)

    with pytest.raises(NotFiniteError) as caught:
        train(steps=12, data=data, metrics__log_freq=3)
    text = str(caught.value)
    assert "Inspect the samples below" in text and "document" not in text
    assert "sample 20, whose own loss is nan\nThe loss of each of the 7 others alone is finite." in text


def test_inputs_of_numpys_type_are_refused_with_the_fix(train):
    with pytest.raises(Refusal, match=r'gives float64, as numpy does, .*convert to float32 .*\.astype\("float32"\)'):
        train(data=lambda: [(np.ones(8), index % 3) for index in range(96)])
    with pytest.raises(Refusal, match="the loss of the ModelSpec fails on the first sample.*convert to float32"):
        train("other", data=lambda: [(torch.ones(8), np.ones(3)) for _ in range(96)], loss=of_probabilities)


C, R, WHOLE = ColwiseParallel, RowwiseParallel, Replicate()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.0": C()}, r"has a part of the outputs of blocks.0.0, and blocks.0.2 fails on them at .*give "
         r"blocks.0.2 RowwiseParallel\(\), or blocks.0.0 ColwiseParallel\(output_layouts=Replicate\(\)\)"),
        ({"blocks.*.2": R()}, r"blocks.0.2 takes a part of its inputs .* gets all .*give the module before it Colwise"),
        ({"head": C()}, "outputs of head, and the model returns sizes .*1, 2.* instead of .*1, 3.*; give head Colwise"),
        ({"blocks.*.0": C(), "blocks.*.2": R(), "head": C(output_layouts=WHOLE)}, None),
        ({"blocks.*.2": R(input_layouts=WHOLE)}, None),
    ],
)  # fmt: skip
def test_an_incomplete_plan_of_tensor_parallelism_is_refused_by_module(plan, message):
    if message is None:
        check_plan(any_models.Contained(), plan, 2, torch.ones(1, 8))
        return
    with pytest.raises(Refusal, match=message):
        check_plan(any_models.Contained(), plan, 2, torch.ones(1, 8))


def test_a_checkpoint_of_other_code_is_refused_by_a_few_weights_and_the_name(train):
    keys = {"checkpoint__enable": True, "name": "EDITED"}
    train(**keys)
    find_spec.cache_clear()
    with pytest.raises(Refusal) as caught:
        train(steps=3, build=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), **keys)
    text = str(caught.value)
    assert "model.0.weight is [8, 8] there, [16, 8] here" in text and "and 6 more; model.name = " in text
    assert "is the same, so its code has changed" in text and "optimizer." not in text and "flavor" not in text


def test_a_float16_run_tells_its_loss_from_the_first_update_that_it_kept(train, caplog):
    caplog.set_level("INFO", "torchtitan")
    records = train(
        steps=12, loss=lambda o, t: 40 * F.cross_entropy(3 * o, t), training__mixed_precision_param="float16"
    )
    losses = [record["loss"] for record in records if record["loss"] is not None]
    assert records[0]["loss"] is None and f"loss {losses[0]:.3f} to {losses[-1]:.3f}" in caplog.text


@pytest.mark.parametrize(("name", "missing"), [("gone.py:SPEC", "/gone.py"), ("gone.away:SPEC", "module gone.away")])
def test_a_model_that_is_missing_is_refused_with_both_places(tmp_path, name, missing):
    toml = tmp_path / "train.toml"
    toml.write_text(f'[model]\nname = "{name}"\n')
    with pytest.raises(Refusal, match=f"{missing}, nor beside {toml}; correct the "):
        load_run(["--job.config_file", str(toml)], 1)
