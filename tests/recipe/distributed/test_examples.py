"""The examples: each trains on every layout that its README lists as in one process."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import differences
from tests.tiny_runs import tiny_config, train_here

# Asked without loading it, which takes seconds.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the examples' images are scikit-learn's")
FSDP, PIPELINE = {"training__local_batch_size": 4}, {"parallelism__pipeline_parallel_degree": 2}
TENSOR = {"parallelism__tensor_parallel_degree": 2}
MIXED = PIPELINE | FSDP | {"parallelism__pipeline_parallel_schedule": "GPipe"}
LAYOUTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "digits": [(2, FSDP), (2, PIPELINE)],
    "resnet": [(2, FSDP), (2, PIPELINE)],
    "pairs": [(2, FSDP), (4, MIXED)],
    "sorter": [(2, FSDP), (4, MIXED), (2, TENSOR), (4, TENSOR | FSDP)],
    "towers": [(2, FSDP)],
    "vit": [(2, FSDP), (2, PIPELINE)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_example_trains_on_its_layouts_as_in_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    keys = {"model__name": f"examples/{name}/{name}.py:SPEC", "training__epochs": -1, "optimizer__lr": 1e-3}
    alone = train_here(tiny_config(tmp_path / "one", **keys))
    for number, (world_size, layout) in enumerate(LAYOUTS[name]):
        records = ranks(cases.train, world_size, str(tmp_path / str(number)), keys | layout)[0]
        assert differences(records, alone, "loss") < 1e-5
