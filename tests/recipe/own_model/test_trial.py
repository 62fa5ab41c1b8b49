"""What a run finds out about a user's module on its first samples: what it refuses, and what it says once."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from tests import tiny_models
from tests.recipe.own_model import any_models
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.config.load import ConfigError
from torchtitan.models.families import plan_model
from torchtitan.models.llama.model import Transformer
from torchtitan.own_model.derive import derive
from torchtitan.own_model.trials.first_samples import check_collate
from torchtitan.parallel.collectives import stop_process_group
from torchtitan.refusal import Refusal


def with_layers(*layers, **more):
    return {"build": lambda: nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 3)), "layers": "0"} | more


class Changing(nn.Module):
    """Each forward changes the state that `what` names."""

    def __init__(self, what):
        super().__init__()
        self.what, self.calls, self.linear = what, 0, nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.what == "parameter":
            self.weight.data.mul_(0.9)
        elif self.what == "mean":
            self.mean.lerp_(x.detach().mean(0), 0.1)
        elif self.what == "count":
            self.count.add_(1)
        elif self.what == "number":
            self.calls += 1
        return self.linear(x) * self.weight


class Draws(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


class OnlyEvaluated(nn.Module):
    def forward(self, x):
        if self.training:
            raise RuntimeError("not made for training")
        return x


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x).T


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"anything": 1}


class WithTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(output / self.temperature, target)


def summed(output, target):
    return F.cross_entropy(output, target, reduction="sum")


def contrastive(output, target):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def noisy(output, target):
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), target)


def one_left_out(output, target):
    return F.cross_entropy(output, target.masked_fill(target == 2, -100))


def weighted(output, target):
    return F.cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 3.0]))


class ZeroHead(nn.Sequential):
    """Gives every sample the same output at first."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        nn.init.zeros_(self[2].weight), nn.init.zeros_(self[2].bias)


class MixesInTraining(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)

    def forward(self, x):
        return super().forward(x + x.roll(1, 0) if self.training else x)


class Overwrites(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)

    def forward(self, x):
        return super().forward(x.mul_(0.5))


def with_a_gradient_alone(output, target):
    """Its value is always 0, its gradient that of scores which are compared within the batch."""
    scores = output.gather(1, target[:, None])[:, 0]
    return ((scores - scores.detach()) * (scores - scores.mean()).detach()).mean()


def over_positives(output, target):
    """As detectors do; the first sample has none."""
    losses = F.cross_entropy(output, target, reduction="none")
    return losses.sum(), (target == 2).sum()


def with_zero_first():
    x, y = any_models.classes().tensors
    y[0] = 0
    return TensorDataset(x, y)


class Shrinking(Dataset):
    """Writes into its samples when it gives them."""

    def __init__(self):
        self.x = any_models.numbers(8)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return self.x[index].mul_(0.9), index % 3


def one_class():
    """All but one of the labels are equal."""
    return TensorDataset(any_models.numbers(8), (torch.arange(96) == 50).long())


ACCUMULATE = {"training__local_batch_size": 4, "training__global_batch_size": 8}
BUDGET = {"activation_checkpoint__mode": "memory_budget", "compile__enable": True, "compile__backend": "eager"}
OFFLOAD = {"training__enable_cpu_offload": True}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"loss": summed}, "the loss of the ModelSpec is .* so it is a sum.*or a pair: the sum, and how many"),
        ({"loss": lambda o, t: (F.cross_entropy(o, t), len(t))}, "divided by the number of samples once too often"),
        (
            {"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")},
            "the loss .* gives no tensor of one number: it returns .2.",
        ),
        ({"loss": None, "step": lambda m, x, t: summed(m(x), t)}, "the step of the ModelSpec is .* so it is a sum"),
        ({"loss": WithTemperature()}, "the loss of the ModelSpec has parameters .temperature., which no optimizer"),
        ({"loss": one_left_out, **ACCUMULATE}, "the loss .* no mean over samples.*2 pieces.*, .target != -100..sum"),
        ({"loss": weighted, **ACCUMULATE}, "the loss .* no mean over samples.*weight.target..sum"),
        (
            {"data": one_class, "loss": weighted, **ACCUMULATE},
            "the loss .*with the samples' classes exchanged .* no mean over samples.*weight.target..sum",
        ),
        ({"build": ZeroHead, "loss": weighted, **ACCUMULATE}, "the loss .* no mean over samples"),
        ({"loss": with_a_gradient_alone, **ACCUMULATE}, "the loss .* in training, gives 8 samples at once a gradient"),
        ({"build": MixesInTraining, **ACCUMULATE}, "the loss .* in training, .* so the loss or the model mixes"),
        ({"data": Shrinking}, "gives other values when a sample is read again"),
        ({"loss": contrastive, **ACCUMULATE}, "the loss .* no mean over samples.*local_loss = True in the ModelSpec"),
        (
            {"loss": None, "step": lambda m, x, t: weighted(m(x), t), **ACCUMULATE},
            "the step .* no mean over samples.*weight.target..sum",
        ),
        (
            {"build": lambda: Turned(8, 3), "loss": lambda o, t: F.cross_entropy(o.T, t), "metrics_of_all": {"n": len}},
            "metrics_of_all .* one of size .3, 2. for two samples does not count them there",
        ),
        ({"metrics": {"right": weighted}, **ACCUMULATE}, "the metric right .* no mean over samples"),
        ({"metrics": {"right": lambda o, t: (o.argmax(1) >= 0).float().sum()}}, "the metric right .* so it is a sum"),
        (
            {"metrics": {"right": lambda o, t: (o.argmax(1) < 0).sum()}},
            "the metric right .* the whole number 0, which is no",
        ),
        ({"metrics": {"right": lambda o, t: 0.5}}, "the metric right .* no tensor of one number: it returns float"),
        ({"build": lambda: Changing("mean"), **ACCUMULATE}, "changes the buffer mean by the samples it sees.*2 pieces"),
        ({"build": lambda: Changing("parameter"), **OFFLOAD}, "changes the parameter weight.*make it a buffer"),
        ({"build": lambda: nn.Sequential(nn.Linear(8, 3), OnlyEvaluated())}, "forward fails in training, on the first"),
        ({"data": list}, "the dataset, a list, has no samples"),
        ({"build": lambda: WithExtraState(8, 3)}, "the model, a WithExtraState, keeps a state of its own"),
        (
            {
                "build": lambda: nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, track_running_stats=False)),
                **ACCUMULATE,
            },
            "1 is a BatchNorm1d, whose numbers depend on the batch.*2 pieces.*GPipe",
        ),
        (
            with_layers(
                nn.Linear(8, 8),
                Draws(),
                activation_checkpoint__mode="full",
                activation_checkpoint__preserve_rng_state=False,
            ),
            "preserve_rng_state = false, but the model draws random numbers",
        ),
        (with_layers(nn.Linear(8, 8), Draws(), **BUDGET), "memory_budget.*the compiler draws others"),
        ({"compile__enable": True}, "compile.enable = true compiles layers, and the model names none"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_would_give_wrong_numbers_is_refused(train, said, message):
    with pytest.raises(Refusal, match=message):
        train(**said)


def test_a_cache_that_a_recompute_would_fill_again_is_refused_and_inputs_are_cast_to_the_weights_type(tmp_path):
    keys = {"training__epochs": -1, "training__steps": 2, "activation_checkpoint__mode": "full"}
    try:
        with pytest.raises(Refusal, match="runs transformer.h.0 again in backward.*use_cache = False"):
            train_here(tiny_config(tmp_path / "cache", model__name="tests.recipe.own_model.their_models:GPT2", **keys))
        stop_process_group()
        keys |= {
            "model__name": "tests.recipe.own_model.their_models:VIT",
            "training__mixed_precision_param": "bfloat16",
        }
        assert len(train_here(tiny_config(tmp_path / "types", **keys))) == 2
    finally:
        stop_process_group()


class Misspelt(nn.Linear):
    def forward(self, x):
        return self.layer(x)


HERE = "test_trial.py:"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"build": lambda: nn.Linear(8, "3")}, f"build of the ModelSpec fails at .*{HERE}.*: TypeError: "),
        ({"build": nn.Linear(8, 3)}, "build of the ModelSpec is a Linear; give its class, or a function"),
        ({"build": lambda: None}, "build of the ModelSpec returns NoneType; return an nn.Module"),
        (
            {"build": lambda: torch.jit.trace(any_models.mlp(), torch.zeros(1, 8))},
            "a compiled program.*load_state_dict",
        ),
        ({"build": lambda: any_models.mlp().requires_grad_(False)}, "no weight of the model requires a gradient"),
        ({"build": lambda: Misspelt(8, 3)}, f"forward fails on the first sample at .*{HERE}.*has no attribute 'layer'"),
        ({"data": lambda: 1 / 0}, f"data of the ModelSpec fails at .*{HERE}.*: ZeroDivisionError"),
        ({"data": lambda: None}, "data of the ModelSpec gives NoneType; give a torch.utils.data.Dataset"),
        ({"data": lambda: [(torch.zeros(8 + n), 1) for n in range(9)]}, "reading the first samples .* stack expects"),
        ({"data": lambda: [(None, 1)] * 9}, "reading the first samples .* fails: TypeError: default_collate"),
        (
            {"data": lambda: [torch.zeros(8)] * 9},
            "a sample is .inputs, target., or a dictionary with labels, but the dataset gave Tensor",
        ),
        ({"data": lambda: [(torch.zeros(7), 1)] * 9}, "forward fails on the first sample.*shapes cannot be multiplied"),
        (
            {"data": lambda: [(torch.zeros(8), 9)] * 9},
            "the loss of the ModelSpec fails .*: IndexError: Target 9 is out",
        ),
        ({"loss": lambda o, t: 1 / 0}, f"the loss of the ModelSpec fails on the first sample at .*{HERE}"),
        ({"loss": lambda o, t: F.cross_entropy(o.detach(), t)}, "loss .* gives no gradient to any weight.*detach"),
        ({"metrics": {"right": lambda o: o}}, "the metric right of the ModelSpec fails on the first sample: TypeError"),
        ({"loss": None, "step": lambda m, x, t: m.nothing(x)}, f"the step of the ModelSpec fails .* at .*{HERE}"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_mistake_ends_in_one_sentence_with_the_line_in_the_users_file(train, said, message):
    with pytest.raises(Refusal, match=message):
        train(**said)


@pytest.mark.parametrize("text", ["import nothing_here", "class A\n", "SPEC = ModelSpec()", "SPEC = 1"])
def test_a_file_that_cannot_be_loaded_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "net.py").write_text(f"from torchtitan.models.spec import ModelSpec\n{text}")
    with pytest.raises(ConfigError, match="net.py:2: |has no ModelSpec called SPEC"):
        plan_model(tiny_config(tmp_path, model__name=f"{tmp_path / 'net.py'}:SPEC"))


class Lengths(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.arange(1 + index % 5) + index, index % 3


def padded(samples):
    """With a 0 for the padding, which no sample holds."""
    words = [1 + sample[0] % 9 for sample in samples]
    return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.tensor([sample[1] for sample in samples])


class SeesPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.table(words).mean(1))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"build": lambda: Changing("number")}, "forward changes calls, a plain number: no checkpoint holds it"),
        ({"build": lambda: Changing("parameter"), **ACCUMULATE}, "the parameter weight, and a step calls it 2 times"),
        (
            {"build": SeesPadding, "data": Lengths, "collate": padded, **ACCUMULATE},
            "so it depends on how far collate pads",
        ),
        ({"build": lambda: Changing("count"), **ACCUMULATE}, "changes the buffer count, and a step calls it 2 times"),
        ({"loss": contrastive, **ACCUMULATE, "local_loss": True}, "each of the 2 pieces of a batch is compared alone"),
        ({"loss": contrastive}, "so it is no mean over samples; a layout that divides a batch would give other"),
        ({"loss": noisy, **ACCUMULATE}, "the loss or the model draws random numbers, so the run cannot try whether"),
    ],
)
def test_what_depends_on_the_layout_is_said(train, caplog, said, message):
    caplog.set_level("INFO", "torchtitan")
    train(**said)
    assert message in caplog.text


@pytest.mark.parametrize("said", [{"loss": over_positives, "data": with_zero_first}, {"build": Overwrites}])
def test_what_is_a_mean_over_samples_trains_in_any_division(train, said):
    once, divided = train("once", **said), train("divided", **said, **ACCUMULATE)
    assert [r["loss"] for r in once] == pytest.approx([r["loss"] for r in divided], rel=1e-6)


class Random(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(8) + random.random(), index % 3


class RandomStream(IterableDataset):
    def __iter__(self):
        return iter([(torch.randn(8), 0)] * 96)


@pytest.mark.parametrize(("data", "fix"), [(Random, "set data_is_random = True"), (RandomStream, "in its __iter__")])
def test_a_dataset_that_draws_unseeded_numbers_is_refused(train, data, fix):
    with pytest.raises(Refusal, match=f"draws random numbers when it reads a sample.*{fix}"):
        train(data=data)


def test_runs_with_random_samples_and_dropout_repeat_and_resume_to_the_bit(train, tmp_path):
    drops = {"build": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))}
    drops |= {"data": Random, "data_is_random": True, "checkpoint__enable": True, "lr_scheduler__total_steps": 6}
    drops |= {"validation__enable": True, "validation__freq": 3}
    whole, again = train("a", steps=6, **drops), train("b", steps=6, **drops)
    train("c", steps=3, **drops)
    resumed = train("c", steps=6, **drops)
    losses = [[record["loss"] for record in records] for records in (whole, again, resumed)]
    held_out = [read_records(tmp_path / folder, "validation.jsonl") for folder in "abc"]
    assert losses[0] == losses[1] == losses[2]
    assert held_out[0] == held_out[1] == held_out[2]


class Named(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)

    def forward(self, x):
        return super().forward(x)


def test_datasets_of_hugging_face_give_dictionaries_with_labels(train):
    from datasets import Dataset as Table

    x, y = any_models.classes().tensors
    pairs = train("pairs", build=Named)
    table = Table.from_dict({"x": x.tolist(), "label": y.tolist()})
    for folder, data in {
        "format": table.with_format("torch"),
        "transform": table.with_transform(lambda rows: {"x": torch.tensor(rows["x"]), "labels": rows["label"]}),
        "dictionaries": [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)],
    }.items():
        assert [r["loss"] for r in train(folder, build=Named, data=data)] == [r["loss"] for r in pairs], folder


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.table(words).sum(1))


def test_samples_of_unlike_length_are_padded_by_collate(train, caplog):
    caplog.set_level("INFO", "torchtitan")
    said = {"build": Bag, "data": Lengths, "collate": padded, "validation__enable": True}
    once = train("once", **said)
    halves = train("halves", training__local_batch_size=4, training__global_batch_size=8, **said)
    for one, other in zip(once, halves, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    with pytest.raises(Refusal, match="reading the first samples .* stack expects each tensor to be equal size"):
        train("without", **(said | {"collate": None}))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def frozen():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    model[0].requires_grad_(False), model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (frozen(), torch.randn(1, 3, 8, 8)),
        (frozen().requires_grad_(), torch.randn(1, 3, 8, 8)),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(1, 6, 16)),
        (nn.GRU(8, 16), torch.randn(1, 5, 8)),
    ],
    ids=["frozen", "trained", "attention", "GRU"],
)
def test_flops_are_those_of_forward_and_backward(model, inputs):
    with FlopCounterMode(display=False) as counter:
        output = model(inputs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
    assert derive(model, None, inputs).flops == counter.get_total_flops()


def test_an_lstm_counts_two_flops_for_each_weight_and_step_and_as_many_for_each_gradient():
    model = Recurrent()
    weights = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    of_inputs = sum(size for name, size in weights.items() if "ih_l0" in name)  # data has no gradient
    assert derive(model, None, torch.randn(1, 5, 8)).flops == 2 * 5 * (3 * sum(weights.values()) - of_inputs)


class WithBuffer(Transformer):
    def __init__(self, args):
        super().__init__(args)
        self.register_buffer("seen", torch.zeros(()))


def test_a_family_with_a_buffer_which_nothing_would_fill_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "BUFFERED", replace(tiny_models.LLAMA, build=WithBuffer), raising=False)
    try:
        with pytest.raises(Refusal, match="has the buffer seen, which nothing fills or saves"):
            train_here(tiny_config(tmp_path, model__name="tests.tiny_models:BUFFERED"))
    finally:
        stop_process_group()


def test_layers_that_are_containers_are_layers():
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))))
    known = derive(model, "0", torch.zeros(1, 8))
    assert [(part.name, part.kind) for part in known.parts] == [(f"0.{n}", "layer") for n in range(3)]


def test_a_collate_that_draws_is_refused():
    def mixed(samples):
        return torch.stack(samples)[torch.randperm(len(samples))], None

    with pytest.raises(Refusal, match="collate of the ModelSpec draws random numbers.*mix samples in a step"):
        check_collate(mixed, [torch.ones(1)] * 2)
    check_collate(torch.stack, [torch.ones(1)] * 2)
