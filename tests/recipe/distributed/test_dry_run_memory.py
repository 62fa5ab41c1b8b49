"""The dry run's estimate is compared with the resident size of real gloo ranks, in which the kernel counts every page.

`pytest -rP` shows the figures.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.recipe.distributed.test_layouts import seldom
from tests.recipe.tools.measured_peak import peak_on_cpu
from tests.stored_models import VOCAB
from tests.tiny_runs import tiny_config
from torchtitan.models.families import plan_model
from torchtitan.tools.dry_run.estimate import estimate

BASE: dict[str, Any] = {
    "model__name": "llama3",
    "model__flavor": "debugmodel",
    "training__seq_len": 512,
    "training__local_batch_size": 4,
}
PP: dict[str, Any] = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 8}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, accumulating": (1, {}),
    "FSDP 2, recomputing": (2, {"activation_checkpoint__mode": "full"}),
    "TP 2": (2, {"parallelism__tensor_parallel_degree": 2}),
    "PP 2, 1F1B": (2, PP),
    "PP 2, ZBVZeroBubble": (2, PP | {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}),
}

OFTEN = "FSDP 2, recomputing", "PP 2, ZBVZeroBubble"


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[Ranks]:
    """What earlier tests leave on a rank's heap moves the measured peak by a tenth."""
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", seldom(CASES, OFTEN))
def test_the_estimate_is_within_a_tenth_of_what_ranks_hold(name: str, fresh_ranks: Ranks) -> None:
    world_size, overrides = CASES[name]
    overrides = BASE | overrides
    config = tiny_config("unused", world_size, **overrides)
    blueprint = plan_model(config).with_vocabulary(VOCAB)
    measured = fresh_ranks(peak_on_cpu, world_size, overrides)
    for rank in range(world_size):
        estimated = estimate(config, blueprint, rank, world_size, gpu=False).peak_bytes
        print(f"{name}, rank {rank}: estimated {estimated / 2**20:.1f} MiB, measured {measured[rank] / 2**20:.1f} MiB")
        assert estimated == pytest.approx(measured[rank], rel=0.1)
