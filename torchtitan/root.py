"""Where train.py, train_configs/ and the small assets are, and which version this is."""

from itertools import takewhile
from pathlib import Path

PACKAGE = Path(__file__).parent
INSIDE = PACKAGE / "shipped"  # pip puts them there (setup.py)
ROOT = INSIDE if INSIDE.is_dir() else PACKAGE.resolve().parent
_NAMES = ("torchtitan", "titan_planner", "titan_fleet")
# The recipe works without the others, and the planner without the fleet; the fleet needs the planner.
PACKAGES = list(takewhile(Path.is_dir, (PACKAGE.parent / name for name in _NAMES)))
VERSION = "0.3.0"
