"""`swarm plan`: unlike providers form sites, each of which holds the model in the memory that its providers have."""

import argparse
import json
import os
import subprocess
from pathlib import Path

import pytest

from titan_planner.sites import verb
from titan_planner.sites.clusters import FILLED, form
from torchtitan.config.load import load_config
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

RUN = """
[model]
name = "tests.tiny_models:LLAMA"
flavor = "tiny"
hf_assets_path = "tests/assets/tokenizer"
[training]
seq_len = 64
local_batch_size = 2
global_batch_size = 2
mixed_precision_param = "float32"
[swarm]
every_seconds = 60.0
"""
RAM = {"big": 0.03, "half": 0.015, "rest": 0.013, "small": 0.002}  # GB; the model needs about 0.014


def planned(folder: Path, ram: dict[str, float], *options: str) -> argparse.Namespace:
    (folder / "train.toml").write_text(RUN)
    nodes = {
        name: {"IP": f"192.0.2.{number}:8080", "benchmarks": {"ram": size, "bandwidth": 100 // number}}
        for number, (name, size) in enumerate(ram.items(), start=1)
    }
    (folder / "nodes.json").write_text(json.dumps(nodes))
    return argparse.Namespace(
        file=folder / "nodes.json", config=str(folder / "train.toml"), out=folder / "plan", step_seconds=1.0,
        syncer="https://meet.example.org:29700",
    )  # fmt: skip


def test_providers_form_sites_whose_cuts_fit_each_ones_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list = []
    monkeypatch.setattr("titan_planner.sites.clusters.form", lambda *of: found.extend(form(*of)) or found)
    verb.run(planned(tmp_path, RAM), [])
    assert sorted([p.name for p in site.providers] for site in found) == [["big"], ["half", "rest"]]
    for site in found:
        assert sum(site.counts) == (4 if len(site.providers) > 1 else 0)
        for provider, rank in zip(site.providers, site.ranks, strict=True):
            assert rank.peak_bytes <= FILLED * RAM[provider.name] * 2**30
        file = load_config(["--job.config_file", str(tmp_path / f"plan/{site.name}.toml")], len(site.providers))
        assert (file.parallelism.pipeline_parallel_layer_counts or []) == site.counts
        assert (file.swarm.site, file.swarm.sites, file.swarm.every_seconds) == (site.name, 2, 60.0)
        for rank, provider in enumerate(site.providers):
            words = [tmp_path / "plan/start.sh", provider.name, "--metrics.log_freq", "3"]
            own = {k: v for k, v in os.environ.items() if k not in ("NNODES", "NODE_RANK", "MASTER_ADDR", "NGPU")}
            own |= {"PRINT_ONLY": "1"}
            said = subprocess.run(words, env=own, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert said.returncode == 0 and f"{site.name}.toml" in said.stdout + said.stderr, said
            assert len(site.providers) == 1 or f"--node-rank={rank}" in said.stdout.replace("_", "-"), said
    said = capsys.readouterr().out
    assert "a part that fits: small" in said and "swarm keys --syncer meet.example.org --sites site-1,site-2" in said


def test_what_no_provider_holds_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    """tests/recipe/tools/test_dry_run.py refuses what no cut holds."""
    with pytest.raises(
        Refusal, match=r"the model does not fit these 1 providers\. 1 sites: one alone holds 0\.00 GiB, and needs"
    ):
        verb.run(planned(tmp_path, {"one": 0.004}), [])
