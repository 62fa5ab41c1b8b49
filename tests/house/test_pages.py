"""The pages hold together: links and anchors lead somewhere, and so do the pages that code and messages name."""

import re
from pathlib import Path

from torchtitan.root import PACKAGES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")] if page.is_file()
)
CODE = [*ROOT.glob("*.py"), *ROOT.glob("*.sh"), *(path for package in PACKAGES for path in package.rglob("*.py"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def test_every_link_and_anchor_of_a_page_leads_somewhere() -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []


def test_every_page_that_code_names_is_there() -> None:
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in CODE
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert sorted(pair for pair in named if not (ROOT / pair[1]).is_file()) == []


def test_every_room_says_in_one_line_what_it_is() -> None:
    rooms = {path.parent for package in PACKAGES for path in package.rglob("*.py")} - set(PACKAGES)
    silent = [room for room in rooms if not (room / "__init__.py").read_text(encoding="utf-8").startswith('"""')]
    assert sorted(str(room.relative_to(ROOT)) for room in silent) == []
