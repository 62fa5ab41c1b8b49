"""Two ranks probe their machine, as one node and as two."""

from pathlib import Path
from typing import Any

import pytest
import tomli
import torch

from tests.ranks import Ranks
from titan_planner.plan.cluster import read_cluster
from titan_planner.probe.rank import Sizes, measure
from titan_planner.probe.report import write
from torchtitan.hardware import Place
from torchtitan.parallel import collectives


def probe(rank: int, world_size: int, per_node: int) -> list[dict[str, Any]]:
    """A probe of tiny sizes, as if so many of the ranks shared a node."""
    device = torch.device("cpu")
    collectives.start_process_group(device, rank, world_size, 60)
    shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 128}
    sizes = Sizes((16, 64), 2**16, (2, 32, 16), (2**10, 2**16), shape, 2, (16, 32), 0.001, 0.0)
    return measure(Place(rank, rank % per_node, world_size), per_node, device, sizes, "float32")


@pytest.mark.parametrize("per_node", [2, 1])
def test_two_ranks_measure_their_links_and_write_a_cluster_file(ranks: Ranks, per_node: int, tmp_path: Path) -> None:
    one, other = ranks(probe, 2, per_node)
    assert one == other and len(one) == 2  # every rank knows what all have measured
    write(file := tmp_path / "here.toml", one, per_node, "2.13", 1.0)
    cluster, found = read_cluster(file), tomli.loads(file.read_text())
    assert cluster.num_devices == 2 and cluster.machine.device.per_node == per_node
    assert all(rate >= 0 for rate in found["rates"].values()) and ("tensor" in found["rates"]) == (per_node == 2)
    if per_node == 1:
        assert [(a, b) for found in one for a, b, size, _ in found["pairs"] if size == 2**16] == [(0, 1), (1, 0)]
        assert all(found["probe"]["gbit"][a][1 - a] > 0 and found["probe"]["delay_ms"][a][1 - a] > 0 for a in (0, 1))
    else:
        assert found["probe"]["collectives"]["fsdp"] and not one[0]["pairs"]
