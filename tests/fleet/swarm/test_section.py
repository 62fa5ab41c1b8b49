"""The rules of [swarm]: a mistake says value, rule and fix, as the recipe's own sections do."""

from pathlib import Path

import pytest

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
    ("[swarm]\nevery = 5", "swarm.delay = 10 is no less than swarm.every = 5"),
]  # fmt: skip


def test_a_mistake_in_a_swarm_says_value_rule_and_fix(tmp_path: Path) -> None:
    for text, message in MISTAKES:
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(["--job.config_file", str(tmp_path / "a.toml")], 1)
        assert f"  {message}" in str(caught.value)
