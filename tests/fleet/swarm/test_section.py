"""The rules of [swarm]: a mistake says value, rule and fix, as the recipe's own sections do."""

from pathlib import Path

import pytest

from torchtitan.config import torchtitan_keys
from torchtitan.config.load import ConfigError, load_config

SITE = '[swarm]\nsite = "a"\nkeys = "k"\n'
MISTAKES = [
    ('[swarm]\nsyncer = "https://x:1"\nsite = "a"', "a swarm's syncer (https://x:1) needs this site"),
    (SITE + 'syncer = "https://x:1"\nsyncers = ["https://y:1"]',
        "swarm.syncer = https://x:1 and swarm.syncers are both set; name one"),
    (SITE + 'syncers = ["https://x:1", "https://x:1"]',
        "swarm.syncers names an address twice (https://x:1, https://x:1)"),
    (SITE + 'fragments = 1\nsyncers = ["https://x:1", "https://y:1"]',
        "swarm.syncers names 2 syncers for swarm.fragments = 1, so"),
    ("[swarm]\nquorum = 3\nsites = 2", "swarm.quorum = 3 is more than swarm.sites = 2"),
    (SITE + 'syncer = "https://x:1"\n[lora]\nrank = 8\n[checkpoint]\nenable = true\ninitial_load_path = "base"',
        "lora.rank = 8: sites that meet exchange whole models, not adapters"),
    ("[swarm]\nevery = 5", "swarm.delay = 10 is no less than swarm.every = 5"),
]  # fmt: skip


def test_a_mistake_in_a_swarm_says_value_rule_and_fix(tmp_path: Path) -> None:
    for text, message in MISTAKES:
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(["--job.config_file", str(tmp_path / "a.toml")], 1)
        assert f"  {message}" in str(caught.value)


def test_torchtitans_semi_synchronous_training_is_read_as_a_swarm() -> None:
    keys = {"enable": True, "semi_sync_method": "DiLoCo", "sync_steps": 40, "fragment_sync_delay": 5, "replica_id": 1}
    keys |= {"should_quantize": False, "num_fragments": 2, "fragment_update_alpha": 0.5, "min_replica_size": 3}
    read = torchtitan_keys.read({"fault_tolerance": keys})
    meant = {"method": "diloco", "codec": "float32", "every": 40, "fragments": 2, "delay": 5, "mix": 0.5, "quorum": 3}
    assert read.values == {"swarm": meant} and not read.refusals and "trains alone" in read.warnings[1]
    read = torchtitan_keys.read({"fault_tolerance": keys | {"module_fqns_per_model_fragment": []}})
    assert "fault_tolerance.module_fqns_per_model_fragment = []: unknown key" in read.refusals[0]
