"""How the suite is shared among processes of pytest-xdist: what needs the started ranks in one, the rest by file."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ranks  # noqa: F401  (a fixture of all folders)

ROOT = Path(__file__).parents[1]
_SLOW = {"fleet", "distributed", "test_netem.py", "test_sites.py", "test_scripts.py"}
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script starts the suite in the background


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _SLOW.intersection(item.path.parts) or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(key=lambda item: "ranks" not in getattr(item, "fixturenames", ()))  # the longest part begins first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByNeed(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if "/gpu/" in file:  # one test each, because most of its time is a GPU's start
                return nodeid
            if file.endswith(("test_faults.py", "test_namespaces.py")):  # the ranks of one would starve the other's
                return "distributed"
            return "ranks" if "ranks: Ranks" in (ROOT / file).read_text(encoding="utf-8") else file

    return ByNeed(config, log)
