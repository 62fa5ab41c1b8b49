"""Where train.py, train_configs/ and the small assets are, and which version this is."""

from pathlib import Path

PACKAGE = Path(__file__).parent
INSIDE = PACKAGE / "shipped"  # pip puts them there (setup.py)
ROOT = INSIDE if INSIDE.is_dir() else PACKAGE.resolve().parent
_NAMES = ("torchtitan", "titan_planner", "titan_fleet")
PACKAGES = [path for name in _NAMES if (path := PACKAGE.parent / name).is_dir()]  # the recipe works without the others
VERSION = "0.3.0"
