"""Two ranks probe their machine, as one node and as two."""

from pathlib import Path

import pytest
import tomli

from tests.distributed import cases
from tests.distributed.conftest import Ranks
from torchtitan.tools.plan.cluster import read_cluster
from torchtitan.tools.probe.report import write


@pytest.mark.parametrize("per_node", [2, 1])
def test_two_ranks_measure_their_links_and_write_a_cluster_file(ranks: Ranks, per_node: int, tmp_path: Path) -> None:
    one, other = ranks(cases.probe, 2, per_node)
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
