"""What the fleet's verbs need beyond what training needs; a verb asks for it before it loads a file that imports it."""

from torchtitan.packages import require_packages as require

_SWARM = "uvicorn", "starlette", "httpx", "cryptography"
_CONSOLE = "nicegui", "sqlalchemy"


def require_packages(installs: bool = True) -> None:
    """`installs`: a rank of a run does not, as its neighbours would at the same time."""
    require("titan_fleet", [*_SWARM, *_CONSOLE], installs)
