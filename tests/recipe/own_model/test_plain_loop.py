"""A run gives the losses of the loop that a user would write, whatever collate makes of the samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

from tests.recipe.own_model import any_models
from tests.tiny_runs import read_records
from torchtitan.refusal import Refusal

RATE, STEPS = 0.1, 4


def plain_sgd(spec):
    return replace(
        spec,
        optimizer=lambda named, _: torch.optim.SGD([p for _, p in named], lr=RATE),
        schedule=lambda step, steps: 1.0,
    )


def plain_losses(spec, batch_size):
    """The loop that a user would write."""
    torch.manual_seed(0)
    model, data, losses = spec.build(), spec.data(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        inputs, target = spec.collate([data[i] for i in range(step * batch_size, (step + 1) * batch_size)])
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = spec.loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():  # ten are left, which is no whole batch
        inputs, target = spec.collate([data[i] for i in range(80, 90)])
        return losses, spec.loss(model(**inputs), target).item()


class Part(Dataset):
    """The last ten are for validation."""

    def __init__(self, split):
        self.begin, self.end = (0, 80) if split == "train" else (80, 90)

    def __len__(self):
        return self.end - self.begin

    def __getitem__(self, index):
        return any_models.Points()[self.begin + index] if index < len(self) else [][index]


@pytest.mark.parametrize("name", ["SETS", "STEPS_FIRST"])
@pytest.mark.parametrize("local_batch_size", [8, 2])
def test_points_that_collate_joins_and_sequences_with_time_first_train_as_in_a_plain_loop(
    train, tmp_path, name, local_batch_size
):
    spec = getattr(any_models, name)
    losses, held_out = plain_losses(spec, 8)
    ours = train(
        steps=STEPS,
        **vars(plain_sgd(replace(spec, data=Part))),
        training__local_batch_size=local_batch_size,
        training__shuffle=False,
        training__max_norm=float("inf"),
        validation__enable=True,
        validation__freq=STEPS,
    )
    assert [record["loss"] for record in ours] == pytest.approx(losses, rel=1e-5)
    (record,) = read_records(tmp_path / "run", "validation.jsonl")
    assert record["validation_loss"] == pytest.approx(held_out, rel=1e-5) and record["validation_tokens"] == 10


def drawn(split):
    """As many do: what is drawn, and what is for validation, is decided by generators that nobody has seeded."""
    x = torch.rand(96, 8) + torch.from_numpy(np.random.rand(96, 8)).float()
    parts = random_split(TensorDataset(x, torch.arange(96) % 3), [64, 32])
    return parts[split == "validation"]


def test_data_that_draws_is_the_same_in_every_call_and_run(train):
    np.random.seed(None)
    one = train("one", data=drawn)
    torch.manual_seed(5)
    assert [r["loss"] for r in train("two", data=drawn)] == [r["loss"] for r in one]
    torch.manual_seed(6)
    own = {tuple(x.tolist()) for x, _ in [*_opened("train"), *_opened("validation")]}
    assert len(own) == 96  # no sample is in both parts


def _opened(split):
    from torchtitan.own_model.samples import open_dataset

    dataset, is_part = open_dataset(drawn, split)
    assert is_part
    return [dataset[i] for i in range(len(dataset))]


class OwnGenerator(Dataset):
    def __init__(self):
        self.draws = np.random.default_rng()

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.tensor(self.draws.random(8), dtype=torch.float32), index % 3


class FreshGenerator(OwnGenerator):
    def __getitem__(self, index):
        return torch.tensor(np.random.default_rng().random(8), dtype=torch.float32), index % 3


@pytest.mark.parametrize("data", [OwnGenerator, FreshGenerator])
@pytest.mark.parametrize("data_is_random", [False, True])
def test_a_dataset_with_a_generator_of_its_own_is_refused(train, data, data_is_random):
    with pytest.raises(Refusal, match="gives other values when a sample is read again.*data_is_random = True"):
        train(data=data, data_is_random=data_is_random)


class Filling(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 3))

    def forward(self, x):
        return super().forward(x.nan_to_num())


def test_a_sample_with_nan_is_no_random_one(train):
    data = TensorDataset(torch.full((96, 8), float("nan")), torch.arange(96) % 3)
    assert len(train(build=Filling, data=data, steps=1)) == 1
