"""Downloads from a hub on this machine: the result is usable as it is, and each error says what to do."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.recipe.tools.hub_stand_in import Hub, Repository
from tests.stored_models import random_weights, store_run
from tests.tiny_runs import TINY
from torchtitan.__main__ import main
from torchtitan.data.texts.sources import open_source
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.tools.hub import fetch
from torchtitan.tools.hub.download import choose
from torchtitan.weights import stored
from torchtitan.weights.hugging_face import open_hf

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "tests" / "assets" / "tokenizer"
TOKENIZER = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
LLAMA = "meta-llama/Llama-3.1-8B"
DEBUG = "train_configs/debug_model.toml"

# One process for all: huggingface_hub reads HF_ENDPOINT and HF_HUB_OFFLINE when it is imported.
WORKER = """
import contextlib, io, json, os, sys
from torchtitan.__main__ import main
for line in sys.stdin:
    arguments, token = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({"HF_TOKEN": token} if token else {})
    said, error = io.StringIO(), ""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as end:
            error = str(end.code)
        except BaseException as other:
            error = "traceback: " + repr(other)
    print(json.dumps([said.getvalue(), error]), flush=True)
"""


def environment(folder: Path, url: str, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    return kept | quiet | {"HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": url, "HF_HOME": str(folder / "home")} | more


class Machine:
    """A folder to work in, the hub that it reaches, and the verb."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hub = folder, Hub()
        (folder / "train_configs").symlink_to(ROOT / "train_configs")
        self.worker = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder,
            env=environment(folder, self.hub.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def download(self, arguments: str, token: str | None = None) -> tuple[str, str]:
        return self.call(f"download {arguments}", token)

    def call(self, arguments: str, token: str | None = None) -> tuple[str, str]:
        """What a verb prints, and the message it ends with."""
        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.hub.fetched.clear()
        self.worker.stdin.write(json.dumps([arguments.split(), token]) + "\n")
        self.worker.stdin.flush()
        said, error = json.loads(self.worker.stdout.readline())
        return said, error

    def files(self, folder: str) -> dict[str, bytes]:
        top = self.folder / folder
        paths = [path for path in top.rglob("*") if path.is_file() and ".cache" not in path.parts]
        return {str(path.relative_to(top)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    yield machine
    machine.worker.kill()
    machine.worker.communicate()
    machine.hub.close()


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    main(["convert", str(store_run(folder / "run")), str(folder / "hf"), "--shard_gb", "0.0005"])
    return {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}


def test_the_command_of_the_readme_fetches_the_tokenizer_that_the_8b_configuration_names(machine: Machine) -> None:
    command = re.search(r"python -m torchtitan download (tokenizer [^`]*)`", (ROOT / "README.md").read_text())
    others = {"model.safetensors": b"weights", "original/consolidated.00.pth": b"again", "README.md": b"about"}
    machine.hub.repositories[LLAMA] = Repository(TOKENIZER | others, gated=True)
    machine.hub.renamed["meta-llama/Meta-Llama-3.1-8B"] = LLAMA
    assert command is not None and command[1] == f"tokenizer {LLAMA}"
    said, error = machine.download(command[1], "hf_member")
    assert not error
    assert f"assets/hf/Llama-3.1-8B: tokenizer of {LLAMA} at {machine.hub.repositories[LLAMA].commit}, 2 files" in said
    assert "2,048 ids; " in said and "next:  CONFIG_FILE=train_configs/llama3_8b.toml ./run_llama_train.sh" in said
    assert machine.files("assets/hf/Llama-3.1-8B") == TOKENIZER
    text = "A text, and another."
    assert build_tokenizer(machine.folder / "assets/hf/Llama-3.1-8B").encode(text, True, True) == build_tokenizer(
        SHIPPED
    ).encode(text, True, True)
    # what is there is not fetched again, nor under the name the repository once had
    said, error = machine.download("tokenizer meta-llama/Meta-Llama-3.1-8B", "hf_member")
    assert not error and said.startswith("assets/hf/Llama-3.1-8B: ") and machine.hub.fetched == []
    assert (
        "next:  ./run_llama_train.sh --model.hf_assets_path other"
        in machine.download(
            f"tokenizer {LLAMA} --to other --revision {machine.hub.repositories[LLAMA].commit}", "hf_member"
        )[0]
    )


def test_a_downloaded_model_converts_to_a_checkpoint_bit_for_bit(machine: Machine, hf_model: dict[str, bytes]) -> None:
    others = {"pytorch_model-00001-of-00002.bin": b"again", "original/consolidated.00.pth": b"again", "LICENSE": b"its"}
    shards = [name for name in hf_model if name.endswith(".safetensors")]
    assert len(shards) > 1
    machine.hub.repositories["me/tiny"] = Repository(hf_model | others, cut={shards[0]})
    said, error = machine.download("model me/tiny")
    assert not error, error
    assert machine.hub.fetched.count(shards[0]) == 2  # the first time, half of it
    assert machine.files("assets/hf/tiny") == hf_model
    expected = random_weights(TINY)
    assert f"{sum(tensor.numel() for tensor in expected.values()):,} parameters" in said
    assert "next:  python -m torchtitan generate --checkpoint assets/hf/tiny" in said
    main(["convert", str(machine.folder / "assets/hf/tiny"), str(machine.folder / "imported")])
    imported = stored.open_model(str(machine.folder / "imported")).weights
    assert all(torch.equal(imported.read(name), tensor) for name, tensor in expected.items())
    assert set(open_hf(machine.folder / "assets/hf/tiny").outline) > {"model.embed_tokens.weight"}


def test_of_another_model_no_weights_are_fetched(machine: Machine, hf_model: dict[str, bytes]) -> None:
    config = json.loads(hf_model["config.json"]) | {"hidden_act": "gelu"}
    machine.hub.repositories["me/other"] = Repository(hf_model | {"config.json": json.dumps(config).encode()})
    assert "hidden_act = 'gelu', must be 'silu'" in machine.download("model me/other")[1]
    assert machine.hub.fetched == ["config.json"]


def test_a_downloaded_dataset_is_read_as_it_is(machine: Machine) -> None:
    lines = [json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(6)]
    files = {"data/train-0.jsonl": b"".join(lines[:4]), "data/test-0.jsonl": b"".join(lines[4:])}
    about = {"README.md": b"about", ".gitattributes": b"", "dataset_infos.json": b"{}"}
    machine.hub.repositories["datasets/me/texts"] = Repository(files | about)
    said, error = machine.download("dataset me/texts")
    assert not error and machine.files("assets/datasets/texts") == files
    assert "2 files, 0.0 MB, all jsonl; 1 named like held-out data (data/test-0.jsonl)" in said
    documents = open_source(
        "texts", str(machine.folder / "assets/datasets/texts/**/*train*"), "text", build_tokenizer(SHIPPED)
    )
    assert len(documents) == 4
    said, error = machine.download("dataset me/texts --include data/train* --to only")
    assert not error and list(machine.files("only")) == ["data/train-0.jsonl"]
    assert "next:  ./run_llama_train.sh --training.dataset_path only\n" in said


def test_a_broken_download_goes_on_where_it_was(machine: Machine) -> None:
    repository = Repository(TOKENIZER, faults={"tokenizer.json": 403})
    machine.hub.repositories["me/broken"] = repository
    error = machine.download("tokenizer me/broken")[1]
    assert re.search(r"answered 403 for me/broken \(Something is broken here\); .*run this again", error)
    repository.faults.clear()
    # Files are fetched in parallel, so the other one may be missing, too.
    missing = set(TOKENIZER) - set(machine.files("assets/hf/broken"))
    assert "tokenizer.json" in missing
    assert not machine.download("tokenizer me/broken")[1] and set(machine.hub.fetched) == missing
    # Another commit of the same size, one file of which the hub does not give: the older file must not count.
    repository.files |= {"tokenizer_config.json": TOKENIZER["tokenizer_config.json"].replace(b" ", b"\t")}
    repository.faults["tokenizer_config.json"] = 500
    error = machine.download("tokenizer me/broken")[1]
    assert "tokenizer_config.json is not yet the file of me/broken at " + repository.commit[:12] in error
    repository.faults.clear()
    assert not machine.download("tokenizer me/broken")[1] and machine.files("assets/hf/broken") == repository.files


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (f"tokenizer {LLAMA}-gated", None, "is gated: .*no token is set.*1. ask for access at {hub}/{repo}\n"
         "  2. make a token .* {hub}/settings/tokens\n  3. export HF_TOKEN"),
        (f"model {LLAMA}-gated", "hf_stranger", r"has no access yet \(Access to {repo} is restricted.*"
         "{hub}/settings/gated-repos"),
        (f"dataset {LLAMA}-gated", None, "is gated: .*ask for access at {hub}/datasets/{repo}\n"),
        (f"tokenizer {LLAMA}-gated", "hf_old", r"refuses your token \(Invalid credentials .* make one at {hub}/"),
        ("tokenizer me/nothing", None, "shows no model me/nothing; check the owner, .*if it is private, set HF_TOKEN"),
        ("dataset me/nothing", "hf_member", "shows no dataset me/nothing; .*that your token may read it"),
        ("model me/empty --revision v2", None, "me/empty has no --revision v2; take .* from {hub}/me/empty/commits"),
        ("tokenizer me/empty", None, "has no tokenizer.json or tokenizer.model .it has README.md.; name the repo"),
        ("model me/huge", None, "needs 1,000,000.0 GB more, but the disk of assets/hf/huge has .* left; free some"),
        ("tokenizer me/huge --to train_configs/schema.json/x", None, "cannot be written .*schema.json.*with --to"),
        ("tokenizer me/huge --include *.json", None, "--include chooses files of a dataset; .* leave it out"),
        ("tokenizer me//huge", None, "me//huge is not the name of a repository .*owner/name"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_with_what_to_do(
    machine: Machine, arguments: str, token: str | None, message: str
) -> None:
    machine.hub.repositories |= {
        f"{LLAMA}-gated": Repository(TOKENIZER | {"config.json": b"{}", "model.safetensors": b""}, gated=True),
        f"datasets/{LLAMA}-gated": Repository({"a.jsonl": b"{}"}, gated=True),
        "me/empty": Repository({"README.md": b""}),
        "me/huge": Repository(
            TOKENIZER | {"config.json": b"{}", "model.safetensors": b""}, claimed={"config.json": 10**15}
        ),
    }
    error = machine.download(arguments, token)[1]
    assert error.startswith("error: ")
    message = message.replace("{hub}", machine.hub.url).replace("{repo}", f"{LLAMA}-gated")
    assert re.search(f"(?s){message}", error), error


def test_ctrl_c_ends_at_once_and_leaves_no_parts(machine: Machine, tmp_path: Path) -> None:
    machine.hub.repositories["datasets/me/large"] = Repository({"a.jsonl": b"{}\n" * 10**6}, stalled={"a.jsonl"})
    command = [sys.executable, "-m", "torchtitan", "download", "dataset", "me/large"]
    env = environment(tmp_path, machine.hub.url)
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            if any(tmp_path.rglob("*.incomplete")) and machine.hub.fetched == ["a.jsonl"]:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[0] == b"\nstopped; run this again to resume\n"
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT and not any(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE is set, but me/tiny has to come from http://127.0.0.1:1; unset it, or",
        ),
        ({}, "http://127.0.0.1:1 cannot be reached or broke off .*Connection refused.*check the network"),
    ],
)
def test_without_a_network_it_says_so(tmp_path: Path, more: dict[str, str], message: str) -> None:
    command = [sys.executable, "-m", "torchtitan", "download", "tokenizer", "me/tiny"]
    env = environment(tmp_path, "http://127.0.0.1:1", **more)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and re.match(f"error: {message}", done.stderr) and "Traceback" not in done.stderr, done


HF = ["config.json", "generation_config.json", "model-1-of-2.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("kind", "names", "chosen"),
    [
        ("model", [*HF, "consolidated.00.pth", "params.json", "pytorch_model.bin", "model.onnx"], HF),
        ("model", ["checklist.chk", "consolidated.00.pth", "params.json", "tokenizer.model"],
         ["consolidated.00.pth", "params.json", "tokenizer.model"]),
        ("tokenizer", [*HF, "original/tokenizer.model"], ["generation_config.json", "original/tokenizer.model"]),
        ("dataset", [".gitattributes", "README.md", "en/a.json.gz", "en/b.json.gz"], ["en/a.json.gz", "en/b.json.gz"]),
        ("dataset", ["README.md", "a.parquet", "b/c.parquet", "load.py"], ["a.parquet", "b/c.parquet"]),
    ],
)  # fmt: skip
def test_only_what_is_read_here_is_chosen(kind: str, names: list[str], chosen: list[str]) -> None:
    assert sorted(choose(kind, "me/it", names)) == chosen


@pytest.mark.parametrize(
    ("kind", "names", "include", "message"),
    [
        ("model", ["config.json", "pytorch_model.bin"], None, "neither config.json and model.*it has config.json, py"),
        ("model", [], None, "it has no file"),
        ("dataset", ["a.jsonl", "b.parquet"], None, "1 jsonl, 1 parquet, but .* of one kind; choose them.* --include"),
        ("dataset", ["a.arrow"], None, "none of JSONL .* \\(it has a.arrow\\), but"),
        ("dataset", [f"{i}.txt" for i in range(20)], ["*.md"], "matches no file of me/it; .* and 8 more"),
    ],
)  # fmt: skip
def test_a_repository_without_what_is_read_here_is_refused(
    kind: str, names: list[str], include: list[str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(kind, "me/it", names, include)


def test_a_run_fetches_its_tokenizer_once_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched = []

    def put(args: argparse.Namespace, _: object) -> None:
        fetched.append(args.repo)
        shutil.copytree(ROOT / "tests/assets/tokenizer", args.to, dirs_exist_ok=True)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(fetch.download, "run", put)
    for said, folder in (("1", "Llama-3.2-1B"), ("1", "Llama-3.2-1B"), ("someone/else", "mine")):
        fetch.main(said, DEBUG, "--model.hf_assets_path", str(tmp_path / folder))
    assert fetched == ["meta-llama/Llama-3.2-1B", "someone/else"]
    with pytest.raises(SystemExit):
        fetch.main("1", DEBUG, "--model.hf_assets_path", str(tmp_path / "unknown"))
    assert "is named after no repository that is known here; use DOWNLOAD=OWNER/NAME" in capsys.readouterr().err


def test_a_converted_model_is_pushed_and_comes_back_the_same(machine: Machine) -> None:
    store_run(machine.folder / "run")
    convert = f"convert run pushed --tokenizer {SHIPPED} --push me/mine"
    for token, why in ((None, "needs a token that may write"), ("hf_stranger", "does not let this token write there")):
        assert why in machine.call(convert, token)[1]
        assert not (machine.folder / "pushed").exists()
    said, error = machine.call(convert, "hf_member")
    assert not error and f"pushed: {machine.hub.url}/me/mine/commit/" in said
    there = {name: data for name, data in machine.hub.repositories["me/mine"].files.items() if name != ".gitattributes"}
    assert there == machine.files("pushed") and "model.safetensors" in there
    assert not machine.download("model me/mine --to fetched", "hf_member")[1]
    assert machine.files("fetched") == there
    assert "does not let this token" in machine.call(convert.replace("pushed", "again"), "hf_stranger")[1]
    assert not (machine.folder / "again").exists()
    assert f"pushed: {machine.hub.url}" in machine.call(convert.replace("pushed", "again"), "hf_member")[0]
    assert "add --to hf" in machine.call("convert pushed other --push me/mine", "hf_member")[1]
