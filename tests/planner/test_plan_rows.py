"""Files of published runs: what `plan rows` reads, what it refuses, and what it says of runs that set no default."""

import itertools
import random
import statistics
from pathlib import Path

import pytest

from titan_planner.plan.cost import Rates
from titan_planner.published.fit import fit, fit_bytes
from titan_planner.published.rows import Row, read_rows
from torchtitan.__main__ import main

PLANNING = Path(__file__).resolve().parents[1] / "assets" / "planning"
DEVICE = '[device]\nname = "B200"\nmatrix_tflops = 2250.0\nmemory_gb = 180\nmemory_gbps = 8000\n'
NETWORK = "[[network]]\ndevices = 8\ngbytes_per_second = 900\n"
GPT = {"name": "a", "hidden": 4096, "feedforward": 16384, "heads": 32, "layers": 8, "gpus": 8, "tensor_parallel": 2}
GPT |= {"pipeline_parallel": 2, "data_parallel": 2, "global_batch": 16, "microbatch": 1, "stages_per_rank": 1}
GPT |= {"recompute": "none", "seq_len": 4096, "vocab_size": 50304, "step_seconds": 1.0}
HARDWARE = '[hardware.x]\nname = "Unheard-of 9"\npeak_bf16_tflops = 500\nmemory_gb = 64\nmemory_gbps = 3000\n'
LLAMA = {"id": 1, "hardware": "x", "model": "llama3", "flavor": "8B", "gpus": 8, "dp_shard": 8, "tp": 1, "cp": 1}
LLAMA |= {"pp": 1, "local_batch": 2, "seq_len": 8192, "recompute": "full", "compile": True, "float8": "none"}
LLAMA |= {"async_tp": False, "tokens_per_second": 5000}


def toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def read(folder: Path, head: str, *rows: dict) -> list[Row]:
    file = folder / "rows.toml"
    file.write_text(head + "".join("[[row]]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in row.items()) for row in rows))
    return read_rows(file)


def seconds(row: Row) -> float:
    return float(row.predict(Rates()).total)


def test_a_shape_may_be_said_in_several_ways(tmp_path: Path) -> None:
    shape = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336, "vocab_size": 128256}
    other = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "feedforward": 14336, "vocab_size": 128256}
    plain, named, half = ({**LLAMA, "id": i} for i in range(3))
    rows = read(tmp_path, HARDWARE, plain, {**named, "flavor": "mine", **shape}, {**half, "layers": 16})
    assert seconds(rows[0]) == seconds(rows[1])
    assert 1.7 < seconds(rows[0]) / seconds(rows[2]) < 2
    by_megatron = {**LLAMA, "software": "Megatron-LM"}
    a, b = read(tmp_path, HARDWARE, {**by_megatron, "id": 1}, {**by_megatron, "id": 2, "flavor": "", **other})
    assert seconds(a) == seconds(b) and a.bytes() == b.bytes()
    assert not a.layout.shards and a.layout.splits_optimizer


def test_what_a_row_does_not_say_follows_or_is_named_as_assumed(tmp_path: Path) -> None:
    accumulating, once = read(tmp_path, HARDWARE, {**LLAMA, "global_batch": 64}, {**LLAMA, "id": 2})
    assert accumulating.layout.microbatches == 4 and once.seconds == pytest.approx(2 * 8192 / 5000)
    assert accumulating.seconds == pytest.approx(4 * once.seconds)
    assert once.assumed == ("between_nodes_gbit_per_gpu = 200", "inside_gbytes_per_second = 450")
    lacking = {key: value for key, value in GPT.items() if key not in ("data_parallel", "feedforward")}
    one_level, same = read(tmp_path, DEVICE + NETWORK, {**lacking, "name": "b"}, GPT)
    assert one_level.layout.dp == 2 and seconds(one_level) == seconds(same)
    four = read(tmp_path, DEVICE + NETWORK.replace("8", "4"), GPT)[0]
    assert four.device.per_node == 4


@pytest.mark.parametrize(
    ("head", "row", "said"),
    [
        (
            DEVICE + NETWORK,
            {**GPT, "hidden": "wide"},
            r"row a, has hidden = 'wide'; use a positive number, or",
        ),
        (DEVICE + NETWORK, {**GPT, "tensor_parallel": 4}, r"has gpus = 8, but its degrees multiply to 16"),
        (DEVICE + NETWORK, {**GPT, "recompute": "some"}, r"has recompute = 'some'; use one of none, false, full"),
        (DEVICE + NETWORK, {**GPT, "sequence_parallel": 1}, r"has sequence_parallel = 1; use true or false"),
        (
            DEVICE + NETWORK,
            {**GPT, "num_experts": 8},
            r"has num_experts = 8; a mixture of experts is predicted as a family",
        ),
        (DEVICE + NETWORK, {**GPT, "microbatch": 3}, r"has global_batch = 16, no multiple of its parts"),
        (DEVICE, GPT, r"has no \[\[network\]\]"),
        (NETWORK, GPT, r"\[device\] lacks peak_bf16_tflops or matrix_tflops"),
        (HARDWARE, {**LLAMA, "hardware": "y"}, r"hardware = 'y'; use one of x"),
        (HARDWARE, {**LLAMA, "flavor": "9B"}, r"has flavor = '9B'; use one of debugmodel, .*, or give dim, hidden_dim"),
        (HARDWARE, {**LLAMA, "model": "gpt"}, r"has model = 'gpt'; give a shape and the nearest family"),
        (HARDWARE, {**LLAMA, "model": "debug_any:SPEC"}, r"has model = 'debug_any:SPEC'"),
        (HARDWARE, {k: v for k, v in LLAMA.items() if k != "tokens_per_second"}, r"row 1, lacks tokens_per_second"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_its_key(tmp_path: Path, head: str, row: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(tmp_path, head, row)


def test_a_row_that_is_left_out_need_not_be_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="row moe, has ep = 8"):
        read(tmp_path, DEVICE + NETWORK, GPT, {**GPT, "name": "moe", "ep": 8})
    main(["plan", "rows", str(tmp_path / "rows.toml"), "--leave_out", "moe"])
    assert "1 rows that nothing was fitted on: mean" in capsys.readouterr().out
    with pytest.raises(ValueError, match="two rows with one name"):
        read(tmp_path, DEVICE + NETWORK, GPT, GPT)
    with pytest.raises(ValueError, match=r"has no \[\[row\]\]"):
        read(tmp_path, DEVICE)
    (tmp_path / "rows.toml").write_text("[")
    with pytest.raises(ValueError, match="cannot be read as TOML"):
        read_rows(tmp_path / "rows.toml")


def test_the_formulas_of_activation_memory_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "rows", str(PLANNING / "megatron_selene.toml")])
    lines = capsys.readouterr().out.partition("what [[memory]] states")[2].splitlines()[1:]
    assert len(lines) == 16 and all(line.endswith("0.0%") for line in lines)


def test_megatrons_memory_is_weights_gradients_a_share_of_the_optimizer_and_activations(tmp_path: Path) -> None:
    [row] = read(tmp_path, DEVICE + NETWORK, {**GPT, "pipeline_parallel": 1, "data_parallel": 4, "memory_gib": 40})
    kinds = row.held()
    parameters = (8 * 12 * 4096**2 + 50304 * 4096 * 2) / 2
    assert kinds["parameters"] + kinds["gradients"] == pytest.approx(6 * parameters)
    assert kinds["optimizer"] == pytest.approx(12 * parameters / 4)
    tokens = 4096
    scores = 5 * 32 / 2 * 4096**2
    kept = 8 * (tokens * 4096 * 34 / 2 + scores)  # sequence parallelism divides all of it
    assert kinds["activations"] == pytest.approx(kept + (2 + 4) * tokens * 50304 / 2 + 4 * tokens * 4096, rel=1e-6)


def test_reserved_memory_is_predicted_from_two_rows() -> None:
    rows = [row for row in read_rows(PLANNING / "torchtitan_tables.toml") if row.memory_bytes]
    h100 = [row for row in rows if int(row.name) < 42]
    for some, bar in ((h100, 0.048), ([row for row in h100 if row.layout.tp == 1], 0.025)):
        errors = []
        for known in itertools.combinations(some, 2):
            times = fit_bytes(known)
            errors.append(statistics.mean(abs(row.bytes(**times) / row.memory_bytes - 1) for row in some))
        assert statistics.median(errors) == pytest.approx(bar, abs=0.0005)


@pytest.mark.parametrize(
    ("file", "bar"),
    [
        ("mpt_a100_80gb", 0.044),
        ("mpt_a100_40gb", 0.060),
        ("mpt_h100", 0.052),
        ("nemo_h100", 0.048),
        ("simumax_b200", 0.055),
    ],
)
def test_other_software_is_predicted_from_two_rows(file: str, bar: float) -> None:
    rows = read_rows(PLANNING / f"{file}.toml")
    draw, errors = random.Random(0), []
    for _ in range(11):
        known = draw.sample(rows, 2)
        rates, _ = fit(known, 2)
        errors.append(statistics.mean(abs(row.error(rates)) for row in rows if row not in known))
    assert statistics.median(errors) == pytest.approx(bar, abs=0.0005)


@pytest.mark.parametrize(("machine", "bar"), [("B200", 0.109), ("H100", 0.469)])
def test_mixtures_of_experts_are_predicted_worse(machine: str, bar: float) -> None:
    rows = [row for row in read_rows(PLANNING / "megatron_bridge_qwen3.toml") if machine in row.name]
    rates, _ = fit([row for row in rows if "25.11" in row.name], 2)
    errors = [abs(row.error(rates)) for row in rows if "26.02" in row.name]
    assert statistics.mean(errors) == pytest.approx(bar, abs=0.0005)


def test_a_mixture_under_fsdp_is_predicted_half_too_slow() -> None:
    (row,) = read_rows(PLANNING / "nemo_automodel_qwen3.toml")
    assert row.error(Rates()) == pytest.approx(0.502, abs=0.0005)


@pytest.mark.parametrize(
    ("file", "count", "mean", "most"), [("torchtitan_tables", 18, 0.051, 0.139), ("simumax_b200", 24, 0.035, 0.086)]
)
def test_memory_is_predicted_without_a_fit(file: str, count: int, mean: float, most: float) -> None:
    rows = [row for row in read_rows(PLANNING / f"{file}.toml") if row.memory_bytes]
    errors = [abs(row.bytes() / (row.memory_bytes or 1) - 1) for row in rows[:count]]  # then come two of H200
    assert len(errors) == count and statistics.mean(errors) == pytest.approx(mean, abs=0.0005)
    assert max(errors) == pytest.approx(most, abs=0.0005)
