"""The packages that one of this repository's parts needs beyond what training needs: installed where they may be."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal
from torchtitan.root import INSIDE, PACKAGE, ROOT


def require_packages(of: str, names: Sequence[str], installs: bool) -> None:
    """See that `names` can be imported. In a clone, the first verb installs what `of` lists into .venv, and says so."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return
    listed = PACKAGE.parent / of / "requirements.txt"
    said = f"this needs packages that are not installed ({', '.join(missing)})"
    if INSIDE.is_dir():
        extra = of.removeprefix("titan_")
        raise Refusal(
            f"{said}; in the clone that this was installed from: {sys.executable} -m pip install '.[{extra}]'"
        )
    if not installs or Path(sys.prefix) != ROOT / ".venv":
        raise Refusal(f"{said}: {sys.executable} -m pip install -r {listed}")
    print(f"setup: installing {of}/requirements.txt into .venv, only this once", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", str(listed)]
    if subprocess.run(command, check=False).returncode:
        raise Refusal(f"pip could not install {listed}; fix the error above and run this again")
    importlib.invalidate_caches()
