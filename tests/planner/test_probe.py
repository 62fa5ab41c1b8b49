"""A probe: rates that are known come back from what they would have made a probe measure, and its file is read."""

import itertools
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli

from titan_planner.plan.cluster import read_cluster
from titan_planner.plan.cost import Device, Layout, Machine, Rates, step
from titan_planner.probe.rates import fitted
from titan_planner.probe.report import matrices, unlike, write
from torchtitan.__main__ import main
from torchtitan.config.keys.model import Model
from torchtitan.launch.start import plan_program
from torchtitan.models.families import find_model
from torchtitan.models.operations import Attention, Pass, Product, Share
from torchtitan.refusal import Refusal

RATES = Rates(product=0.8, size=300.0, attention=0.4, memory=1.0, unfused=3.0, inside=1.0, between=1.0, fsdp=0.5)
RATES = replace(RATES, latency=1e-5, hop=5e-5, layer=3e-4, optimizer=40.0)
MODEL = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336, "n_layers": 2, "vocab_size": 2048}
SIZES = (2**14, 2**22, 2**27)


def machine(per_node: int) -> Machine:
    """A node of one device has no links, so nothing can be known of them."""
    rates = RATES if per_node > 1 else replace(RATES, fsdp=1.0)
    return Machine(Device(900e12, 3e12, 300e9 if per_node > 1 else 1e12, 25e9, per_node), rates)


def measured(nodes: int, per_node: int, **other: Any) -> list[dict[str, Any]]:
    """What each rank of such machines measures, by the formulas that a plan uses."""
    here, alone = machine(per_node), Layout()
    world = nodes * per_node
    shapes = [(8192, 8192, 256), (8192, 256, 8192), (1024, 8192, 8192), (8192, 8192, 8192)]

    def group(ranks: int, stride: int, factor: float = 1.0) -> list[list[float]]:
        return [[ranks, size, factor * float(here.collective(size, ranks, stride))] for size in SIZES for _ in range(2)]

    steps = []
    for length in (4096, 8192):
        blueprint = find_model(Model(**MODEL))  # type: ignore[arg-type]
        assert blueprint.spec.operations is not None
        work = blueprint.spec.operations(blueprint.shape, Share(8, length))
        seconds = step(here, work, Layout(dp=world, compiled=False))
        norm = 2 * float(here.collective(4, world))
        parts = {"step": float(seconds.total), "update": float(seconds.parts["optimizer"]) + norm}
        steps.append({"axis": "dp", "model": MODEL, "sequences": 8, "length": length, **parts})
    found = {
        "bytes": 64 * 2**30,
        "device": "a GPU",
        "on_cpu": False,
        "dtype": "bfloat16",
        "speeds": {"bfloat16": 800e12, "float32": 60e12},
        "peak": here.device.flops,
        "products": [[*shape, float(here.seconds(Product(*shape), alone)[0])] for shape in shapes],
        "moving": [2**30, float(here.seconds(Pass(2**30, 0), alone)[0])],
        "attention": [1e12, 3.5 * float(here.seconds(Attention(1e12), alone)[0])],
        "inside": group(per_node, 1) if per_node > 1 else [],
        "fsdp": group(per_node, 1, RATES.fsdp) if per_node > 1 else [],
        "across": group(nodes, per_node) if nodes > 1 else [],
        "all": group(world, 1) if nodes > 1 else [],
        "pairs": [],
        "steps": steps,
    }
    return [found | other for _ in range(world)]


def with_pairs(every: list[dict[str, Any]], per_node: int, delay: np.ndarray, rate: np.ndarray) -> list[dict[str, Any]]:
    """`delay` in seconds and `rate` in bytes a second, from each node to each."""
    every, small, large = [*every], SIZES[0], SIZES[-1]
    for a in range(len(delay)):
        for b in range(a + 1, len(delay)):
            trip = delay[a, b] + delay[b, a]
            pairs = {a: [[a, b, small, trip + small / rate[a, b]], [a, b, large, trip + large / rate[a, b]]]}
            pairs[b] = [[b, a, large, trip + small / rate[a, b] + (large - small) / rate[b, a]]]
            for node, found in pairs.items():
                rank = node * per_node
                every[rank] = every[rank] | {"pairs": [*every[rank]["pairs"], *found]}
    return every


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (4, 1), (4, 8)])
def test_known_rates_come_back(nodes: int, per_node: int) -> None:
    found = fitted(measured(nodes, per_node), per_node)
    unknown = {"inside", "latency", "fsdp"} if per_node == 1 else set()
    unknown |= {"hop", "between"} if nodes == 1 else set()
    for expected, given in ((RATES, found.rates), (machine(per_node).device, found.device)):
        for name, value in asdict(expected).items():  # type: ignore[call-overload]
            assert name in unknown or getattr(given, name) == pytest.approx(value, rel=0.02), name


@pytest.mark.parametrize("shared", [0.5, 1.0])
def test_steps_on_each_axis_are_predicted_by_the_rates_fitted_on_them(shared: float) -> None:
    known = replace(RATES, exposed=1.0, shared=shared, tensor=2e-3, alone=1.2)
    here, every = replace(machine(2), rates=known), measured(1, 2, on_cpu=True)
    model, steps = MODEL | {"n_layers": 4}, []
    blueprint = find_model(Model(**model))  # type: ignore[arg-type]
    assert blueprint.spec.operations is not None
    layouts = {"dp": Layout(dp=2), "tp": Layout(tp=2), "cp": Layout(cp=2), "pp": Layout(pp=2, microbatches=8)}
    for length, (axis, layout) in itertools.product((64, 512), layouts.items()):
        share = Share(1 if axis == "pp" else 8, length, int(layout.tp), int(layout.cp))
        work = blueprint.spec.operations(blueprint.shape, share)
        seconds = step(here, work, replace(layout, compiled=False))
        norm = 2 * float(here.collective(4, 2))
        parts = {"step": float(seconds.total), "update": float(seconds.parts["optimizer"]) + norm}
        steps.append({"axis": axis, "model": model, "sequences": 8, "length": length, **parts})
    fit = fitted([found | {"steps": steps} for found in every], 2)
    for name, bound in {"unfused": 0.05, "layer": 0.1, "tensor": 0.05}.items():
        assert getattr(fit.rates, name) == pytest.approx(getattr(known, name), rel=bound), name
    for one in steps:
        share = Share(
            1 if one["axis"] == "pp" else 8, one["length"], **{a: 2 for a in ("tp", "cp") if a == one["axis"]}
        )
        work, layout = blueprint.spec.operations(blueprint.shape, share), replace(layouts[one["axis"]], compiled=False)
        assert float(step(fit, work, layout).total) == pytest.approx(one["step"], rel=0.02), one["axis"]


def test_the_file_is_a_cluster_file_that_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "new" / "here.toml"
    write(file, measured(2, 8), 8, "2.13", 31.4)
    cluster = read_cluster(file)
    assert cluster.num_devices == 16 and cluster.machine.device.between == pytest.approx(25e9, rel=0.02)
    assert "tensor" not in tomli.loads(file.read_text())["rates"]  # no step ran along that axis
    assert "a probe of 20" in cluster.rests_on and "torch 2.13 in bfloat16" in cluster.rests_on
    assert "unlike" not in capsys.readouterr().out
    main(["plan", "train_configs/llama3_8b.toml", "--cluster", str(file), "--", "--training.global_batch_size", "16"])
    assert "rests on a probe of 20" in capsys.readouterr().out


def test_matrices_hold_both_directions_of_every_pair() -> None:
    delay = np.array([[0, 1, 2], [1, 0, 3], [2, 3, 0]]) * 1e-3
    rate = np.array([[1, 2, 3], [4, 1, 5], [6, 7, 1]]) * 1e9
    found, gbit = matrices(with_pairs(measured(3, 2), 2, delay, rate), 3, 300e9)
    assert gbit == pytest.approx(rate * 8e-9 + np.diag([2400 - 8] * 3))
    assert found == pytest.approx(delay * 1e3, abs=0.01)  # the small message takes a moment, too


def test_unlike_devices_and_links_are_named_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    every = measured(2, 1)
    every[1] |= {"products": [[*shape, 2 * seconds] for *shape, seconds in every[1]["products"]], "bytes": 32 * 2**30}
    every = with_pairs(every, 1, np.full((2, 2), 1e-3), np.array([[1, 2], [1, 1]]) * 1e9)
    write(file := tmp_path / "here.toml", every, 1, "2.13", 1.0)
    said = capsys.readouterr().out
    assert "rank 1 has 50% of the products of rank 0" in said and "rank 1 has 50% of the usable memory" in said
    assert "the link from node 1 to node 0 has 50% of the bandwidth of the link from node 0 to node 1" in said
    case = tomli.loads(file.read_text())["case"][0]
    assert case["tflops"] == pytest.approx([1800, 900]) and case["memory_gib"] == [64, 32]
    assert case["gbit"][0][1] == pytest.approx(2 * case["gbit"][1][0])
    assert unlike(measured(2, 1), np.ones((2, 2))) == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(Refusal, match="cannot be written"):
        write(tmp_path / "taken" / "here.toml", measured(1, 2), 2, "2.13", 1.0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_leaves_the_probe_before_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "here.toml").write_text("before")
    (tmp_path / "here.toml.part").symlink_to("/dev/full")
    with pytest.raises(Refusal, match="cannot be written: No space left on device"):
        write(tmp_path / "here.toml", measured(1, 2), 2, "2.13", 1.0)
    assert (tmp_path / "here.toml").read_text() == "before"


@pytest.mark.parametrize(
    ("out", "env", "message"),
    [
        (".", {}, "no name of a TOML file"),
        ("here.json", {}, "no name of a TOML file"),
        ("/proc/none/here.toml", {}, "/proc cannot be written"),
        ("here.toml", {"NGPU": "none"}, "NGPU = none"),
        ("here.toml", {"NNODES": "2"}, "no node rank"),
    ],
)
def test_what_cannot_be_started_is_refused_before_any_rank(
    out: str, env: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("os.access", lambda path, _: str(path) != "/proc")  # root may write everywhere
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["probe", "--out", out])
    assert message in capsys.readouterr().err


def test_a_probe_starts_as_a_run_does() -> None:
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NGPU": "4", "MAX_RESTARTS": "3"}
    start = plan_program(env, "measuring", ["-m", "a.program", "x"], gpus=4)
    assert start.arguments[-3:] == ["-m", "a.program", "x"] and "--nproc_per_node=4" in start.arguments
    assert "--max_restarts=0" in start.arguments and "NODE_RANK=1" in start.understood
    assert plan_program({"NGPU": "1"}, "measuring", ["-m", "a.program"], gpus=0).arguments == ["-m", "a.program"]
