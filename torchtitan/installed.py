"""What `pip install .` adds: the command torchtitan-recipe, and a check of what else is installed.

torchtitan-recipe train --training.steps 20           as ./run_llama_train.sh, with the same variables
torchtitan-recipe check train_configs/llama3_8b.toml  every verb of python -m torchtitan

A file of train_configs/ that is not in the current folder is the shipped one.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from torchtitan.root import ROOT

_DEBUG_MODEL = "train_configs/debug_model.toml"
_TOKENIZER = "./tests/assets/tokenizer"  # of the debug model, relative to a clone


def main() -> None:
    refuse_other_torchtitan()  # also where the other's __init__.py was written over ours
    words = [_shipped(word) for word in sys.argv[1:]]
    if words[:1] == ["train"]:
        from torchtitan.tools import start

        os.environ["CONFIG_FILE"] = _shipped(os.environ.get("CONFIG_FILE") or _DEBUG_MODEL)
        start.run(_with_tokenizer(os.environ["CONFIG_FILE"], words[1:]))
        return
    from torchtitan.__main__ import main as run_verb

    run_verb(words)


def refuse_other_torchtitan() -> None:
    """PyPI's torchtitan has a package of this name: pip writes the files of both into one folder."""
    if list(metadata.distributions(name="torchtitan")):
        raise ImportError(
            "torchtitan-recipe and torchtitan are both installed here, and both are imported as `torchtitan`; "
            "uninstall both (pip uninstall torchtitan torchtitan-recipe), then install one, or each in its own .venv"
        )


def _shipped(word: str) -> str:
    is_shipped = word.startswith("train_configs/") and not Path(word).exists() and (ROOT / word).is_file()
    return str(ROOT / word) if is_shipped else word


def _with_tokenizer(file: str, options: Sequence[str]) -> list[str]:
    """The options of a run, which also say where the small tokenizer is, if the file means that one."""
    is_meant = Path(file).parent == ROOT / "train_configs" and _TOKENIZER in Path(file).read_text(encoding="utf-8")
    is_given = any(option.startswith("--model.hf_assets_path") for option in options)
    if not is_meant or is_given or Path(_TOKENIZER).exists():
        return [*options]
    return ["--model.hf_assets_path", str(ROOT / _TOKENIZER), *options]
