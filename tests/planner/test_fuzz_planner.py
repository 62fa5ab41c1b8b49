"""The planner's files, damaged at random, are read or refused in a sentence.

python -m tests.planner.test_fuzz_planner --count 10000 --seed 1      by hand; the suite does a few of each kind
"""

from collections.abc import Callable
from pathlib import Path

import tomli_w

from tests.house.fuzzing import ROOT, Target, attack_all, attack_by_hand
from titan_planner.places.network import read_cluster_network
from titan_planner.places.placement import read_networks
from titan_planner.places.ravnest import read_providers
from titan_planner.plan.cluster import read_cluster
from titan_planner.published.rows import read_rows


def make_targets(folder: Path) -> dict[str, Target]:
    unlike = {"region": "a", "devices": 4, "inside": [0.1, 100.0], "kind": "A100", "memory_gib": 40}
    groups = [unlike, {**unlike, "region": "b", "tflops": 120.0}]
    planning = ROOT / "tests/assets/planning"
    texts: dict[str, tuple[str, str, Callable[[Path], object]]] = {
        "cluster": ("a.toml", (ROOT / "clusters/cpu_1x2.toml").read_text(), read_cluster),
        "unlike": ("a.toml", tomli_w.dumps({"groups": groups, "pairs": {"a-b": [90.0, 1.0]}}), read_cluster_network),
        "networks": ("a.toml", (planning / "dtfm_networks.toml").read_text(), read_networks),
        "selene": ("a.toml", (planning / "megatron_selene.toml").read_text(), read_rows),
        "tables": ("a.toml", (planning / "torchtitan_tables.toml").read_text(), read_rows),
        "ravnest": ("a.json", (planning / "ravnest_clusters.json").read_text(), read_providers),
    }
    targets = {}
    for name, (file, text, read) in texts.items():
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
        targets[name] = Target(folder / name, file, lambda folder, file=file, read=read: read(folder / file))
    return targets


def test_a_damaged_file_of_the_planner_ends_in_no_traceback(tmp_path: Path) -> None:
    targets = make_targets(tmp_path)
    seen, tracebacks = attack_all(targets, count=25, seed=3)
    assert not tracebacks, "\n".join(tracebacks[:5])
    assert sum(seen.values()) == 25 * len(targets) and sum(n for (_, e), n in seen.items() if e == "refused") > 30


if __name__ == "__main__":
    attack_by_hand(make_targets)
