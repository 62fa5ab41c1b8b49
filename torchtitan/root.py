"""Where train.py, train_configs/ and the small assets are, and which version this is."""

from pathlib import Path

INSIDE = Path(__file__).parent / "shipped"  # pip puts them there (setup.py)
ROOT = INSIDE if INSIDE.is_dir() else Path(__file__).resolve().parents[1]
VERSION = "0.2.0"
