"""How the suite is shared among processes of pytest-xdist: what needs the started ranks in one, the rest by file."""

import pytest


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs_ranks = "ranks" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ranks" if needs_ranks else item.path.name))
