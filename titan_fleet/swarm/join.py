"""The door to this room, by which a run with [swarm] comes in."""

from typing import TYPE_CHECKING

from titan_fleet.packages import require_packages
from torchtitan.config.schema import Config

if TYPE_CHECKING:
    from titan_fleet.swarm.site import Site
    from torchtitan.training.run import Run


def join(config: Config, run: "Run") -> "Site":
    require_packages(installs=False)
    from titan_fleet.swarm.site import Site

    return Site(config, run)
