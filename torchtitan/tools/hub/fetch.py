"""Fetches the tokenizer that a run needs, if its folder has none: run_llama_train.sh calls this where DOWNLOAD is set.

DOWNLOAD=1 takes the repository that the folder is named after, DOWNLOAD=OWNER/NAME another one. Nodes that share the
folder fetch it once: the others wait for the lock and then find it.
"""

import argparse
import fcntl
import sys
from pathlib import Path

from torchtitan.data.tokenizers.files import find_file
from torchtitan.models.downloads import name_on_the_hub
from torchtitan.models.families import load_run_or_exit
from torchtitan.refusal import Refusal
from torchtitan.tools.hub import download


def fetch_tokenizer(folder: Path, said: str) -> None:
    repo = name_on_the_hub(folder) if said == "1" else said
    if repo == "OWNER/NAME":
        raise Refusal(
            f"DOWNLOAD = 1, but {folder} is named after no repository that is known here; use DOWNLOAD=OWNER/NAME"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".download.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_there(folder):
                asked = dict.fromkeys(("model", "revision", "include"))
                download.run(argparse.Namespace(kind="tokenizer", repo=repo, to=folder, **asked), [])
    except OSError as error:
        raise Refusal(
            f"DOWNLOAD = {said}: {folder} cannot be written ({error}); set model.hf_assets_path to a folder that can"
        ) from None


def _is_there(folder: Path) -> bool:
    try:
        find_file(folder)
    except Refusal:
        return False
    return True


def main(said: str, file: str, *options: str) -> None:
    config, _ = load_run_or_exit(["--job.config_file", file, *options], None, rank=0)
    folder = Path(config.model.hf_assets_path)
    try:
        if not _is_there(folder):
            fetch_tokenizer(folder, said)
    except Refusal as error:
        print(f"run_llama_train.sh: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
