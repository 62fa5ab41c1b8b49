"""Downloads a tokenizer, a model or a dataset from the Hugging Face hub into a folder that this recipe reads.

    python -m torchtitan download tokenizer meta-llama/Llama-3.1-8B      into assets/hf/Llama-3.1-8B

It fetches only the files that this recipe reads. The token comes from HF_TOKEN or `hf auth login`. It is not an
argument, because other users of the machine can see arguments.
"""

import argparse
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Any

from torchtitan.data.tokenizers.files import PATTERNS
from torchtitan.refusal import Refusal
from torchtitan.tools.hub.push import answer_of

HUGGING_FACE = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
META = ("params.json", "consolidated.*.pth")
ABOUT_DATA = ("*.md", "dataset_info*.json")
NOTES = ".cache/huggingface/download"  # huggingface_hub notes the commit of each file here and keeps incomplete files


def choose(kind: str, repo: str, names: list[str], include: list[str] | None = None) -> list[str]:
    """Which of a repository's files to fetch."""
    from torchtitan.data.texts.file_kinds import READABLE, kind_by_name

    def matching(*patterns: str) -> list[str]:
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]

    has = f"it has {', '.join(names[:12]) or 'no file'}{f' and {len(names) - 12} more' if len(names) > 12 else ''}"
    tokenizer = matching(*PATTERNS)
    if kind == "model":
        for form, weights in ((HUGGING_FACE, ".safetensors"), (META, ".pth")):
            chosen = matching(*form)
            if form[0] in chosen and any(name.endswith(weights) for name in chosen):
                return chosen + tokenizer
        neither = "neither config.json and model*.safetensors nor Meta's params.json and consolidated.*.pth"
        raise Refusal(f"{repo} has {neither} ({has}); choose a repository or a --revision that has one of the two")
    if kind == "tokenizer":
        if matching("tokenizer.json", "tokenizer.model", "original/tokenizer.model"):
            return tokenizer
        raise Refusal(
            f"{repo} has no tokenizer.json or tokenizer.model ({has}); name the repository of a model, which has one"
        )
    if include:
        if chosen := matching(*include):
            return chosen
        raise Refusal(f"--include {' '.join(include)} matches no file of {repo}; {has}")
    kinds = {name: kind_by_name(Path(name)) for name in names if name not in matching(*ABOUT_DATA)}
    found = Counter(kind for kind in kinds.values() if kind is not None)
    if len(found) == 1:
        return [name for name, kind in kinds.items() if kind is not None]
    which = ", ".join(f"{count} {kind}" for kind, count in found.items()) or f"none of {READABLE} ({has})"
    raise Refusal(f"{repo} has {which}, but a run reads files of one kind; choose them, as by --include '*.jsonl'")


def fetch(kind: str, repo: str, commit: str, sizes: dict[str, int], folder: Path) -> None:
    """Fetch these files of this commit. It is an error if one of them is missing at the end."""
    from huggingface_hub import snapshot_download

    folder.mkdir(parents=True, exist_ok=True)
    missing = sum(size for name, size in sizes.items() if _size(folder / name) != size)
    if missing > (free := shutil.disk_usage(folder).free):
        room = f"{missing / 1e9:,.1f} GB more, but the disk of {folder} has {free / 1e9:,.1f} GB left"
        raise Refusal(f"{repo} needs {room}; free some space, or give a folder on another disk with --to")
    patterns = [escape(name) for name in sizes]
    snapshot_download(repo, repo_type=_type(kind), revision=commit, local_dir=folder, allow_patterns=patterns)
    # If the hub fails half-way, huggingface_hub only warns and keeps older files of the same name.
    for name, size in sizes.items():
        note = folder / NOTES / f"{name}.metadata"
        if (
            (size and _size(folder / name) != size)
            or not note.is_file()
            or note.read_text().partition("\n")[0] != commit
        ):
            raise Refusal(f"{folder / name} is not yet the file of {repo} at {commit[:12]}; run this again to resume")


def describe(kind: str, folder: Path, names: list[str]) -> tuple[str, str]:
    """A summary of what the recipe finds in the folder, and the command to run next."""
    if kind == "tokenizer":
        from torchtitan.data.tokenizers.tokenizer import build_tokenizer

        what = f"{build_tokenizer(folder).vocab_size:,} ids"
        for config in sorted(Path("train_configs").glob("*.toml")):
            if f'hf_assets_path = "./{folder}"' in config.read_text():
                return what, f"CONFIG_FILE={config} ./run_llama_train.sh"
        return what, f"./run_llama_train.sh --model.hf_assets_path {quote(str(folder))}"
    if kind == "model":
        from torchtitan.weights.stored import open_model

        count = sum(tensor.numel() for tensor in open_model(str(folder)).weights.outline.values())
        next_one = f"python -m torchtitan generate --checkpoint {quote(str(folder))} --prompt 'Once upon a time'"
        return f"{count:,} parameters", next_one
    from torchtitan.data.texts.sources import locate_text

    what, next_one = f"all {locate_text('', str(folder)).kind}", "./run_llama_train.sh --training.dataset_path "
    held_out = [name for name in names if re.search(r"(?<![a-z])(valid|test|dev|eval)", name.lower())]
    if not held_out or len(held_out) == len(names):
        return what, next_one + quote(str(folder))
    what += f"; {len(held_out)} named like held-out data ({held_out[0]})"
    return what, f"{next_one}'{folder}/**/*train*'  # or another glob that leaves those files out"


def explain(error: Exception, kind: str, repo: str, revision: str | None) -> str:
    """The message for an error: what went wrong, and what to do about it."""
    from huggingface_hub import constants, errors, get_token

    hub, token = constants.ENDPOINT, get_token()
    page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the error that made huggingface_hub look for the file on this machine
    status, said = answer_of(error)
    offline = "or run this on a machine with a network and copy the folder"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, but {repo} has to come from {hub}; unset it, {offline}"
    if isinstance(error, errors.GatedRepoError) and not token:
        return (
            f"{repo} is gated: only accounts with access get its files, and no token is set\n"
            f"  1. ask for access at {page}\n  2. make a token of the type Read at {hub}/settings/tokens\n"
            "  3. export HF_TOKEN=hf_... and run this again"
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated, and the account of your token has no access yet ({said})\n  ask for it at {page}; "
            f"{hub}/settings/gated-repos shows the answer. A fine-grained token also needs 'Read access to contents "
            "of all public gated repos you can access'"
        )
    if status == 401 and token:
        return f"{hub} refuses your token ({said}); make one at {hub}/settings/tokens and export HF_TOKEN=hf_..."
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "that your token may read it" if token else "if it is private, set HF_TOKEN"
        return f"{hub} shows no {_type(kind)} {repo}; check the owner, the name, model or dataset, and {private}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no --revision {revision}; take a branch, tag or commit from {page}/commits/main"
    if status is not None:
        return f"{hub} answered {status} for {repo} ({said}); fix the cause or wait, and run this again to resume"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return f"the folder cannot be written ({error}); correct its permissions, or give another folder with --to"
    return f"{hub} cannot be reached or broke off ({said}); check the network and run this again to resume, {offline}"


def _type(kind: str) -> str:
    return "dataset" if kind == "dataset" else "model"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


HELP = "fetch a tokenizer, model or dataset from the Hugging Face hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("tokenizer", "model", "dataset"), help="what to fetch from the repository")
    parser.add_argument("repo", metavar="REPO", help="owner/name on the hub, as in the address of its page")
    parser.add_argument("--to", type=Path, help="folder to write to (default: assets/hf/NAME, or assets/datasets/NAME)")
    parser.add_argument("--model", help="family of a model that its config.json does not tell: path/to/file.py:SPEC")
    parser.add_argument("--revision", help="branch, tag or commit to fetch (default: main)")
    parser.add_argument("--include", nargs="+", metavar="GLOB", help="files of a dataset to fetch: 'en/*.json.gz'")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    from huggingface_hub import HfApi, errors

    kind, repo, begin = args.kind, args.repo, time.perf_counter()
    if args.include and kind != "dataset":
        raise Refusal(f"--include chooses files of a dataset; the files of a {kind} are known, so leave it out")
    try:
        info: Any = HfApi().repo_info(repo, repo_type=_type(kind), revision=args.revision, files_metadata=True)
        # A gated repository shows its list of files to everyone. A mirror without gates may not know auth_check.
        if info.gated:
            HfApi().auth_check(repo, repo_type=_type(kind))
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        names = choose(kind, repo, sorted(sizes), args.include)
        # info.id, because a renamed repository still answers to its old name
        folder = args.to or Path("assets", "datasets" if kind == "dataset" else "hf", info.id.split("/")[-1])
        signal.signal(signal.SIGINT, lambda *_: _stop(folder))
        if kind == "model" and "config.json" in names:  # refuse an unusable model before fetching 100 GB of it
            from torchtitan.models.downloads import find_download
            from torchtitan.models.families import find_families

            fetch(kind, repo, info.sha, {"config.json": sizes["config.json"]}, folder)
            find_download(folder, find_families(args.model), args.model)
        fetch(kind, repo, info.sha, {name: sizes[name] for name in names}, folder)
    except errors.HFValidationError as error:
        raise Refusal(f"{repo} is not the name of a repository ({error}); give owner/name") from error
    # The HTTP library, which depends on the version of huggingface_hub, raises HTTPError; hf_xet raises RuntimeError.
    except (OSError, errors.HTTPError, RuntimeError) as error:
        raise Refusal(explain(error, kind, repo, args.revision)) from error
    size, seconds = sum(sizes[name] for name in names), time.perf_counter() - begin
    what, command = describe(kind, folder, names)
    what = f"{kind} of {info.id} at {info.sha}, {len(names)} files, {size / 1e6:,.1f} MB, {what}"
    print(f"{folder}: {what}; {seconds:.0f} s\nnext:  {command}")


def _stop(folder: Path) -> None:
    """Stop at once on Ctrl-C. huggingface_hub would first finish the current files, and cannot resume half a file."""
    for part in (folder / NOTES).rglob("*.incomplete"):
        part.unlink(missing_ok=True)
    print("\nstopped; run this again to resume", flush=True)
    os._exit(128 + signal.SIGINT)
