"""Where a model is cut into pipeline stages, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Parallelism
from torchtitan.models.decoder.args import parts
from torchtitan.models.families import load_run
from torchtitan.models.llama.args import LLAMA3_FLAVORS as FLAVORS
from torchtitan.models.pipeline_rules import plan_microbatches
from torchtitan.models.stages import StagePlan, plan_stages

EIGHT = replace(FLAVORS["8B"], n_layers=8, vocab_size=32000)
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


def plan(degree: int, args=EIGHT, seq_len: int = 2048, **keys) -> StagePlan:
    return plan_stages(parts(args, seq_len), Parallelism(pipeline_parallel_degree=degree, **_long(keys)))


def _long(keys: dict) -> dict:
    return {key if key.startswith("module") else f"pipeline_parallel_{key}": value for key, value in keys.items()}


def counts(stages: StagePlan) -> list[int]:
    return [sum(part.kind == "layer" for part in stage) for stage in stages.stages]


def test_every_module_is_on_one_stage_in_order() -> None:
    for degree, schedule in [(2, "1F1B"), (4, "Interleaved1F1B"), (4, "DualPipeV"), (8, "GPipe")]:
        stages = plan(degree, schedule=schedule)
        names = [part.name for stage in stages.stages for part in stage]
        assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(8)), "norm", "output"]
        assert sorted(s for rank in range(degree) for s in stages.of_rank(rank)) == list(range(len(stages.ranks)))


def test_without_a_pipeline_one_stage_holds_all() -> None:
    assert counts(plan(1)) == [8]
    assert plan(1).ranks == (0,)


@pytest.mark.parametrize("flavor", ["8B", "70B", "405B", "1B"])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_the_default_cut_has_the_fastest_slowest_stage_of_all_cuts(flavor: str, degree: int) -> None:
    args, seq_len = FLAVORS[flavor], 8192
    *_, last_layer, norm, output = parts(args, seq_len)
    layer, end = last_layer.flops, norm.flops + output.flops

    def slowest(layers: list[int]) -> int:
        return max([*(n * layer for n in layers[:-1]), layers[-1] * layer + end])

    ours = counts(plan(degree, args, seq_len))
    assert sum(ours) == args.n_layers
    # Any cut is bounded below by what the last stage and the mean of the others need.
    best = min(
        max(last * layer + end, -(-(args.n_layers - last) // (degree - 1)) * layer) for last in range(1, args.n_layers)
    )
    assert slowest(ours) == best


def test_the_largest_stage_is_small_where_time_leaves_a_choice() -> None:
    # 126 layers on 16 stages: 8 layers are the slowest; the embedding's stage gets one less, and so does the last.
    assert counts(plan(16, FLAVORS["405B"], 8192)) == [7, *[8] * 14, 7]


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    assert plan(2, schedule="Interleaved1F1B").ranks == (0, 1, 0, 1)
    assert plan(2, schedule="ZBVZeroBubble").ranks == (0, 1, 1, 0)
    assert plan(4, schedule="DualPipeV").ranks == (0, 1, 2, 3, 3, 2, 1, 0)


def test_torchtitans_keys_cut_as_torchtitan_does() -> None:
    # 8 layers + 1 + 1 for the ends = 10 on 4 stages: 3, 3, 2, 2, less one at each end
    assert counts(plan(4, first_stage_less_layers=1, last_stage_less_layers=1)) == [2, 3, 2, 1]
    assert counts(plan(4, first_stage_less_layers=1)) == [2, 3, 2, 1]
    assert counts(plan(2, layers_per_stage=5, schedule="1F1B")) == counts(plan(2))
    assert len(plan(2, layers_per_stage=2, schedule="LoopedBFS", first_stage_less_layers=0,
                    last_stage_less_layers=0).ranks) == 4  # fmt: skip


def test_layer_counts_and_module_lists_are_taken_as_they_are() -> None:
    assert counts(plan(4, layer_counts=[3, 1, 2, 2])) == [3, 1, 2, 2]
    assert counts(plan(4, layer_counts=[0, 4, 4, 0])) == [0, 4, 4, 0]
    modules = [["tok_embeddings"], [f"layers.{i}" for i in range(8)], ["norm"], ["output"]]
    cut = plan(4, module_fqns_per_model_part=modules)
    assert [[part.name for part in stage] for stage in cut.stages] == modules


LONG = [["tok_embeddings", "layers.0"], [f"layers.{i}" for i in range(1, 8)], ["norm", "output"]]


@pytest.mark.parametrize(
    ("degree", "keys", "message"),
    [
        (2, {"layer_counts": [4, 4], "layers_per_stage": 4}, "both say how the stages are cut; remove one"),
        (16, {}, "makes 16 stages, but the model has only 8 layers"),
        (2, {"layer_counts": [4, 5]}, "adds up to 9, but the model has 8 layers; use 8"),
        (4, {"layer_counts": [4, 0, 2, 2]}, "only the first and the last"),
        (2, {"layer_counts": [8]}, "two or more stages"),
        (2, {"layer_counts": [2, 2, 4]}, "schedule 1F1B has one stage a rank; cut it into 2"),
        (2, {"layer_counts": [2, 2, 2, 1, 1], "schedule": "LoopedBFS"}, "equally many on each rank"),
        (4, {"layer_counts": [2, 2, 2, 2], "schedule": "Interleaved1F1B"}, "two or more; cut it into 8 or 12"),
        (2, {"layer_counts": [4, 4], "schedule": "DualPipeV"}, "two stages a rank; cut it into 4"),
        (2, {"layers_per_stage": 2}, "cut into 5 stages for pipeline_parallel_degree = 2"),
        (4, {"first_stage_less_layers": 5}, "leave a stage with -1 of the 8 layers"),
        (2, {"module_fqns_per_model_part": LONG[:2]}, "leaves out norm, output"),
        (2, {"module_fqns_per_model_part": [[*LONG[0], *LONG[1]], [*LONG[2], "head"]]}, "names head"),
        (2, {"module_fqns_per_model_part": [[*LONG[1], *LONG[0]], LONG[2]]}, "twice or out of order"),
        (2, {"module_fqns_per_model_part": [*LONG, []]}, "has an empty stage"),
        (2, {"schedule_csv": "none.csv"}, "cannot be read: No such file"),
    ],
)
def test_an_impossible_cut_is_refused(degree: int, keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=".*".join(message.split("*"))):
        plan(degree, **keys)


def test_a_schedule_file_says_who_holds_which_stage(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    stages = plan(2, schedule_csv=str(file))
    assert (stages.ranks, stages.csv_microbatches, counts(stages)) == ((0, 1), 2, counts(plan(2)))
    with pytest.raises(ValueError, match="schedules 2 stages, but the model is cut into 4"):
        plan(2, schedule_csv=str(file), layer_counts=[2, 2, 2, 2])
    assert not stages.backward_in_two_parts
    file.write_text("0F0,,,0I0,0W0\n,1F0,1B0\n")
    assert plan(2, schedule_csv=str(file)).backward_in_two_parts


def test_only_a_schedule_file_with_backward_in_two_parts_is_refused_for_a_compiled_model(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    options = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule_csv", str(file)]
    options += ["--compile.enable", "--training.local_batch_size", "1"]
    file.write_text("0F0,,,0B0\n,1F0,1B0\n")
    assert load_run(options, 2)[0].compile.model
    file.write_text("0F0,,,0I0,0W0\n,1F0,1B0\n")
    with pytest.raises(ConfigError, match='schedule_csv = ".*" runs backward in two parts, which a compiled block'):
        load_run(options, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 rows, one a rank"),
        ("0F0,0B0\n0F0,0B0\n", "has stage 0 on rank 0 and on rank 1"),
        ("0F0,0B0\n1B0\n", "does not take every microbatch forward on every stage"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "does not take every microbatch forward on every stage"),
        ("a,b\nc,d\n", "does not take every microbatch forward on every stage"),
    ],
)
def test_a_schedule_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        plan(2, schedule_csv=str(file))


@pytest.mark.parametrize(
    ("schedule", "local_batch_size", "message"),
    [
        ("1F1B", 2, "needs at least one for each of 4 stages; use local_batch_size = 4 or more, or GPipe"),
        ("DualPipeV", 6, "needs at least one for each of 8 stages; use local_batch_size = 8"),
        ("Interleaved1F1B", 9, "rounds of equal size, 4 or a few more in each; use local_batch_size = 8 or 12"),
        ("InterleavedZeroBubble", 11, "use local_batch_size = 8 or 12"),
    ],
)
def test_a_local_batch_the_schedule_cannot_run_is_refused(schedule: str, local_batch_size: int, message: str) -> None:
    parallelism = Parallelism(pipeline_parallel_degree=4, pipeline_parallel_schedule=schedule)
    stages = plan_stages(parts(EIGHT, 2048), parallelism)
    with pytest.raises(ValueError, match=message):
        plan_microbatches(parallelism, stages, local_batch_size)
    fitting = 12
    assert plan_microbatches(parallelism, stages, fitting) == fitting


def test_microbatches_divide_the_local_batch(tmp_path: Path) -> None:
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=3)
    with pytest.raises(ValueError, match="does not divide training.local_batch_size = 8; use one of 1, 2, 4, 8"):
        plan_microbatches(parallelism, plan(2), 8)
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    with pytest.raises(ValueError, match="schedules 2; use local_batch_size = 2"):
        parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file))
        plan_microbatches(parallelism, plan(2, schedule_csv=str(file)), 8)
