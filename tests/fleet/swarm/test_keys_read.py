"""A run that is the only site of a swarm reads every key of [swarm], and its dry run counts what a site holds."""

from pathlib import Path
from typing import Any

from tests.fleet.swarm.served import keys, served
from tests.tiny_runs import keys_read, tiny_config, train_here
from titan_fleet.swarm.identity import shared
from torchtitan.config.names import key_names
from torchtitan.models.families import plan_model
from torchtitan.tools.dry_run.estimate import estimate


def test_every_key_of_the_swarm_is_read_by_a_run(tmp_path: Path) -> None:
    keys(tmp_path, 1)
    alone: dict[str, Any] = {"swarm__sites": 1, "swarm__quorum": 1, "swarm__every": 2, "swarm__delay": 0}
    alone |= {"swarm__fragments": 2, "training__steps": 2}
    config = tiny_config(tmp_path / "site", **alone)
    with keys_read() as read, served(tmp_path, config.swarm, shared(config)) as (url, _):
        place = {"swarm__syncer": url, "swarm__site": "site-0", "swarm__keys": str(tmp_path / "keys/site-0")}
        train_here(tiny_config(tmp_path / "site", **alone, **place))
    assert sorted(key for key in set(key_names()) - read if key.startswith("swarm.")) == []


def test_a_site_holds_three_numbers_more_of_each_parameter(tmp_path: Path) -> None:
    place = {"swarm__syncer": "https://meet.example.org:1", "swarm__site": "a", "swarm__keys": "keys"}
    skipping = {"model__name": "tests.recipe.own_model.any_models:SKIPPING", "model__flavor": "tiny"}
    alone, site = (
        estimate(config, plan_model(config), 0, 1)
        for config in (tiny_config(tmp_path, **skipping, **more) for more in ({}, place))
    )
    assert site.peak["optimizer"] - alone.peak["optimizer"] == 12 * alone.parameters
