"""The door to this room: says which packages it needs, before anything of it is loaded."""

import importlib.util
from typing import TYPE_CHECKING

from torchtitan.config.schema import Config
from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from titan_fleet.swarm.site import Site
    from torchtitan.training.run import Run

PACKAGES = "uvicorn", "starlette", "httpx", "cryptography"


def require_packages() -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise Refusal(f"a swarm needs packages that are not installed: python -m pip install {' '.join(missing)}")


def join(config: Config, run: "Run") -> "Site":
    require_packages()
    from titan_fleet.swarm.site import Site

    return Site(config, run)
