"""Cuts of a module on one process: what each stage needs of the others, and what is refused."""

from collections import namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.recipe.own_model import any_models
from torchtitan.own_model.cut import Stage, check_stages, cut_ways, divide
from torchtitan.own_model.derive import candidates_of, derive
from torchtitan.own_model.record import record
from torchtitan.refusal import Refusal


def cut(model, num_stages, batches, layers=None, changing=frozenset()):
    """What arrives at each stage in training, and after the last what is returned."""
    known = derive(model, layers, batches[0])
    ways = record(model, dict(candidates_of(model, layers)), batches, changing)
    known = replace(known, changing=changing, ways=ways)
    stages = divide([*known.parts, *known.rest], ways[True], num_stages)
    check_stages(model, known, stages, batches)
    one = cut_ways(known, stages)[True]
    return [{f"{value.of} {value.number}" for value in one.arriving[number]} for number in range(num_stages + 1)]


def numbers(size=8):
    return [torch.randn(n, size) for n in (2, 3)]


@pytest.mark.parametrize("stages", [2, 3, 7])
def test_stages_give_the_models_output_and_carry_what_later_ones_need(stages):
    words = [default_collate([any_models.Words("train")[i][0] for i in range(n)]) for n in (2, 3)]
    arriving = cut(any_models.Skipping(), stages, words, "blocks")
    assert arriving[0] == {"the inputs 0", "the inputs 1"} and arriving[-1] == {"the output 0", "the output 1"}
    assert arriving[1] >= {"the inputs 1", "embedding 0"} and "the inputs 0" not in arriving[1]  # a skip, a late input


class Between(nn.Module):
    """Does something between its modules."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.a, self.b, self.c, self.act = (nn.Linear(8, 8) for _ in range(3)), 0, 0, nn.ReLU(inplace=True)
        self.a, self.b, self.c = self.__dict__.pop("a")
        self.scale, self.kept = nn.Parameter(torch.ones(8)), None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.c(getattr(self, self.what)(self.a(x)))

    def in_place(self, x):
        x += 1
        return self.b(F.relu(x, inplace=True)) + x

    def no_grad(self, x):
        with torch.no_grad():
            x = x * 2
        return self.b(x)

    def autocast(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(x).float()

    def module_in_place(self, x):
        return self.act(self.b(self.act(x)))

    def lists(self, x):
        return self.b(sum([x, *(x[:, :1] for _ in range(len(x)))]))

    def decision(self, x):
        return self.b(x if x.mean() > 0 else -x)

    def draws(self, x):
        x = F.dropout(x, 0.5, True)
        return self.b(x) + x

    def twice(self, x):
        return self.b(self.b(x))

    def weight_on_both_sides(self, x):
        return self.b(x * self.scale) * self.scale

    def weight_of_another(self, x):
        return F.linear(self.b(x), self.a.weight)

    def beside(self, x):
        return self.b(x) + self.a.kept

    def size(self, x):
        return self.b(x).repeat(len(x), 1)


@dataclass
class Pair:
    first: torch.Tensor
    second: dict[str, torch.Tensor] | None = None


Named = namedtuple("Named", "one other")


class InClasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (Returns(kind) for kind in (Pair, Named, lambda *both: {"x": both[0], "y": both[1]}))

    def forward(self, x):
        pair = self.a(x)
        named = self.b(pair.first)
        last = self.c(named.one + pair.second["twice"])
        return Pair(last["x"], {"all": last["y"] + named.other["twice"]} if self.training else None)


class Returns(nn.Linear):
    def __init__(self, kind):
        super().__init__(8, 8)
        self.kind = kind

    def forward(self, x):
        y = super().forward(x)
        return self.kind(y, {"twice": 2 * y}) if self.kind in (Pair, Named) else self.kind(y, 2 * y)


def test_modules_and_models_may_give_dataclasses_named_tuples_and_dictionaries_and_other_ones_in_validation():
    arriving = cut(InClasses(), 3, numbers())
    assert arriving[1:] == [{"a 0", "a 1"}, {"b 0", "b 1", "a 1"}, {"the output 0", "the output 1"}]


class Leaves(nn.Linear):
    def forward(self, x):
        self.kept = x * 2
        return super().forward(x)


@pytest.mark.parametrize(
    "what", ["in_place", "no_grad", "autocast", "module_in_place", "lists", "weight_on_both_sides"]
)
@pytest.mark.parametrize("stages", [2, 3])
def test_whatever_python_stands_between_modules_runs_as_it_is(what, stages):
    cut(Between(what), stages, numbers())


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("decision", "looks at numbers that come from a to decide"),
        ("draws", "draws random numbers between its modules .* before b, and uses them again after a cut, at c"),
        ("twice", "calls b more than once"),
        ("weight_of_another", "a.weight is used on both sides of a cut, in stages .0, 2."),
        ("beside", "forward reads a tensor from inside a which that module does not return"),
        ("size", "has the size .4, 8. for inputs of .2, 8., and .9, 8. for .3, 8.,"),
    ],
)
def test_what_a_pipeline_would_do_otherwise_is_refused(what, says):
    model = Between(what)
    if what == "beside":
        model.a = Leaves(8, 8)
    with pytest.raises(Refusal, match=says):
        cut(model, 3, numbers())


def test_a_batch_that_takes_another_way_than_the_first_samples_ends_the_run_in_a_sentence():
    model, batches = any_models.BySize(), numbers()
    known = derive(model, None, batches[0])
    known = replace(known, ways=record(model, dict(candidates_of(model, None)), batches, frozenset()))
    stage = Stage(model, cut_ways(known, divide(known.parts, known.ways[True], 2)), 0, batches[0])
    stage.sizes = ((4, 8),)
    stage.listen()
    with pytest.raises(Refusal, match="stage 0: forward went another way than on the first samples: it did not call a"):
        stage(torch.randn(4, 8))


def test_a_module_that_gives_other_numbers_in_stages_is_refused():
    """Through a channel that no operation on tensors shows."""

    class Hidden(nn.Linear):
        def forward(self, x):
            self.number = x.abs().mean().item()
            return super().forward(x)

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * getattr(self.other[0], "number", 1.0)

    model = nn.Sequential(Hidden(8, 8), Reads(8, 8))
    model[1].other = [model[0]]
    with pytest.raises(Refusal, match="cut into 2 pipeline stages, the model gives other numbers than whole"):
        cut(model, 2, numbers())
