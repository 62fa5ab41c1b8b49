"""What is derived from a user's module: its parts, cuts and streams of samples; and what leaves it again."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.recipe.own_model import any_models
from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.config.load import ConfigError
from torchtitan.data.batch import OwnSlots
from torchtitan.data.cursor import Order
from torchtitan.models.balance import balance
from torchtitan.models.families import plan_model
from torchtitan.models.spec import ModelSpec, Part
from torchtitan.own_model.derive import derive
from torchtitan.own_model.grouping import Grouping
from torchtitan.own_model.samples import SampleLoader, open_dataset
from torchtitan.parallel.collectives import stop_process_group
from torchtitan.refusal import Refusal


def test_the_cut_is_as_good_as_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(200):
        costs = [(draw.randrange(9), draw.randrange(9)) for _ in range(draw.randrange(2, 9))]
        stages = draw.randrange(1, len(costs) + 1)

        def worst(ranges, costs=costs):
            sums = [tuple(map(sum, zip(*(costs[i] for i in part), strict=True))) for part in ranges]
            return max(time for time, _ in sums), max(size for _, size in sums)  # time comes first

        ends = itertools.combinations(range(1, len(costs)), stages - 1)
        cuts = [list(itertools.starmap(range, itertools.pairwise((0, *inner, len(costs))))) for inner in ends]
        parts = [Part(str(number), size, time, "other") for number, (time, size) in enumerate(costs)]
        assert worst(balance(parts, stages)) == min(map(worst, cuts))


def inputs_of(spec):
    dataset, _ = open_dataset(spec.data, "train")
    return next(iter(DataLoader(dataset, batch_size=1)))[0]


def test_what_is_derived_counts_shared_weights_once():
    spec = any_models.TOWERS
    known = derive(spec.build(), spec.layers, inputs_of(spec))
    assert known.shared == (("out.weight", "again.weight"),)
    assert known.num_parameters == sum(p.numel() for p in spec.build().parameters())
    assert [part.name for part in known.parts] == ["left", "right"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (ModelSpec(build=any_models.mlp, data=any_models.classes), "has no loss"),
        (ModelSpec(build=any_models.mlp, loss=any_models.accuracy), "brings no data"),
    ],
)
def test_a_spec_that_lacks_something_is_refused_by_name(tmp_path, monkeypatch, spec, says):
    name = says.replace(" ", "_")  # a name is looked up once
    monkeypatch.setattr(any_models, name, spec, raising=False)
    with pytest.raises(ConfigError, match=says):
        plan_model(tiny_config(tmp_path, model__name=f"tests.recipe.own_model.any_models:{name}"))


def test_a_list_of_layers_that_is_none_and_a_forward_that_fails_are_refused():
    with pytest.raises(Refusal, match="layers = 'nothing' .* use one of 'blocks', 'heads'"):
        derive(any_models.Skipping(), "nothing", inputs_of(any_models.SKIPPING))
    with pytest.raises(Refusal, match="forward fails on the first sample"):
        derive(any_models.mlp(), None, torch.zeros(1, 5))


class Noisy(Dataset):
    """Its samples hold a random number."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.rand(()) + torch.tensor(random.random()), index


def loader(rank=0, ranks=1, *, pads=False, workers=0, dataset=None, epochs=3, grouping=None):
    layout, order = OwnSlots(8, 8, rank, ranks), Order(8, 0, not pads)
    more = {
        "local_batch_size": 8 // ranks,
        "epochs": 1 if pads else epochs,
        "pads": pads,
        "held_out": None,
        "workers": workers,
        "is_random": True,
    }
    return SampleLoader(dataset or Noisy(), layout, order, grouping=grouping, **more)


def rows(batch):
    (part,) = batch.parts
    return list(zip(batch.origin.slots, part.inputs.tolist(), part.targets.tolist(), strict=True))


def all_batches(loaders):
    found = []
    while True:
        batches = [each.next() for each in loaders]
        if None in batches:
            return found
        found.append(sorted(row for batch in batches for row in rows(batch)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_do_not_depend_on_the_ranks_and_epochs_differ(ranks):
    alone = all_batches([loader()])
    assert all_batches([loader(rank, ranks) for rank in range(ranks)]) == alone
    assert len(alone) == 18 and alone[0] != alone[6]


def test_batches_of_like_length_hold_every_sample_but_those_of_the_last_batch_in_an_order_of_the_epoch():
    lengths = np.arange(len(Noisy())) * 5 % 7
    grouped = Grouping(lengths, 8)

    def batches(rank, ranks):
        return [batch.origin.indices for batch in iter(loader(rank, ranks, grouping=grouped, epochs=2).next, None)]

    alone = batches(0, 1)
    assert [sorted(a + b) for a, b in zip(batches(0, 2), batches(1, 2), strict=True)] == [sorted(b) for b in alone]
    per_epoch = len(Noisy()) // 8
    epochs = [[index for batch in alone[e : e + per_epoch] for index in batch] for e in (0, per_epoch)]
    assert all(len(set(epoch)) == 8 * per_epoch for epoch in epochs) and epochs[0] != epochs[1]
    assert sum(len({lengths[i] for i in batch}) for batch in alone) < 2.5 * len(alone)  # 8 at random have 5 lengths
    with pytest.raises(Refusal, match="was written for"):
        loader(grouping=grouped).load_state_dict(loader().state_dict())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [None, any_models.Pairs()])
def test_samples_go_on_where_the_state_was_taken_although_workers_read_ahead(workers, dataset):
    if dataset is not None and workers:
        return  # a stream is read in the process itself
    whole = loader(dataset=dataset)
    expected = [whole.next() for _ in range(9)]
    before = loader(workers=workers, dataset=dataset)
    for _ in range(5):
        before.next()
    after = loader(workers=workers, dataset=dataset)
    after.load_state_dict(before.state_dict())
    for batch in expected[5:]:
        found = after.next()
        assert found.origin == batch.origin and torch.equal(found.parts[0].targets, batch.parts[0].targets)


def test_held_out_samples_come_once_and_the_last_batch_is_filled_up():
    batches = list(iter(loader(pads=True).next, None))
    assert [batch.parts[0].valid for batch in batches] == [8] * 6 + [2]
    assert sorted(i for batch in batches for i in batch.origin.indices) == list(range(50))


def test_a_trained_model_leaves_as_safetensors_and_as_a_program(tmp_path, capsys):
    from safetensors.torch import load_file

    config = {
        "model__name": "tests.recipe.own_model.any_models:SKIPPING",
        "training__epochs": -1,
        "checkpoint__enable": True,
    }
    train_here(tiny_config(tmp_path / "run", **config))
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    model = any_models.Skipping().eval()
    model.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    word, place = torch.arange(5), torch.linspace(0, 1, 5)
    for ours, theirs in zip(program(word=word, place=place).values(), model(word, place=place).values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_program_takes_the_sizes_that_collate_gives_and_export_says_for_which_it_was_tried(tmp_path, capsys):
    from safetensors.torch import load_file

    said = {}
    for name in ("SENTENCES", "BY_SIZE"):
        model = f"tests.recipe.own_model.any_models:{name}"
        more = {"training__epochs": -1, "training__steps": 1, "checkpoint__enable": True}
        train_here(tiny_config(tmp_path / name, model__name=model, **more))
        stop_process_group()
        main(["export", str(tmp_path / name), str(tmp_path / f"{name}-out")])
        said[name] = capsys.readouterr().out
    assert "program, which gives the model's outputs for inputs of [1, 1], [8, 8], [2, 8], [3, 8]" in said["SENTENCES"]
    model = any_models.Reader().eval()
    model.load_state_dict(load_file(tmp_path / "SENTENCES-out/model.safetensors"))
    program = torch.export.load(tmp_path / "SENTENCES-out/model.pt2").module()
    for size in ((1, 4), (5, 9), (7, 30)):
        words = torch.arange(size[0] * size[1]).view(size) % 10
        inputs = {"words": words, "mask": (words > 0).long()}
        assert torch.allclose(program(**inputs), model(**inputs), atol=1e-5, equal_nan=True), size
    assert "program for inputs of [8, 8] only (with [1, 8]: " in said["BY_SIZE"]  # which looks at the batch's size
