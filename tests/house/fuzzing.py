"""Files that a user gives, damaged at random: whoever reads them works with them or refuses in a sentence.

python -m tests.house.fuzzing --count 10000 --seed 1      by hand; the suite does a few of each kind
"""

import argparse
import contextlib
import copy
import json
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from tests.tiny_runs import tiny_config
from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.data.prepared.prepare import prepare
from torchtitan.data.prepared.tokens import PreparedTokens
from torchtitan.data.texts.sources import open_source
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.models.downloads import find_download
from torchtitan.models.families import find_families, load_run_or_exit
from torchtitan.models.llama.spec import LLAMA3
from torchtitan.models.qwen3.spec import QWEN3
from torchtitan.refusal import Refusal
from torchtitan.tools.text.writer import stop_ids

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests/assets/tokenizer"
# What stands in place of a value: other kinds, and numbers at the edges.
CORPUS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "0"),
    *("None", "\x00", "\ud800", "x" * 5000, "../..", [], [[]], {}, {"a": {}}, [None], ["\n"]),
]


def damage_text(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled or put in."""
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        end = min(len(data), place + chance.choice([1, 1, 2, 8, 100, 5000]))
        new = chance.choice([b"", bytes([chance.randrange(256)]), data[place:end] * 2, b"\xff\xfe", b"\x00", b"[" * 50])
        data = data[:place] + new + data[end:]
    return data


def damage_json(value: Any, chance: random.Random, corpus: Sequence[Any] = CORPUS) -> Any:
    """One value somewhere inside replaced or removed, or a key renamed."""
    value, path = copy.deepcopy(value), []
    at = value
    while isinstance(at, dict | list) and at and (not path or chance.random() < 0.7):
        key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
        path.append((at, key))
        at = at[key]
    if not path:
        return chance.choice(corpus)
    parent, key = path[-1]
    way = chance.randrange(6)
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, dict):
        parent[f"{key}_"] = parent.pop(key)
    else:
        parent[key] = chance.choice(corpus)
    return value


class Target:
    """A file, and what reads it."""

    def __init__(self, folder: Path, file: str, read: Callable[[Path], object]) -> None:
        self.folder, self.file, self._read = folder, folder / file, read
        self.whole = self.file.read_bytes()

    def attack(self, chance: random.Random) -> str:
        """Damage the file, read it, put it back; "read" or "refused", or the traceback."""
        data = damage_text(self.whole, chance)
        if self.file.suffix == ".json" and chance.random() < 0.7:
            data = json.dumps(damage_json(json.loads(self.whole), chance)).encode("utf-8", "surrogatepass")
        if self.file.suffix == ".toml" and chance.random() < 0.7:
            with contextlib.suppress(TypeError, UnicodeEncodeError):  # a value that TOML cannot say
                data = tomli_w.dumps(damage_json(tomli.loads(self.whole.decode()), chance)).encode()
        self.file.write_bytes(data)
        try:
            self._read(self.folder)
        except Refusal:
            return "refused"
        except SystemExit as error:
            return "refused" if error.code not in (0, None) else "read"
        except BaseException:  # a panic of Rust code is no Exception
            return traceback.format_exc()
        finally:
            self.file.write_bytes(self.whole)
        return "read"


def read_source(folder: Path, file: str) -> None:
    source = open_source("x", str(folder / file), "text", build_tokenizer(ASSETS))
    if hasattr(source, "tokens"):
        for index in range(min(len(source), 50)):
            source.tokens(index)
    else:
        for shard in range(source.num_shards):
            source.open(shard, None).read(50)


def read_manifest(folder: Path) -> None:
    storage = Storage(str(folder))
    found = storage.examine(3)
    assert isinstance(found, str | Manifest)
    if isinstance(found, Manifest):
        assert not storage.faults(found, found.files)


def make_targets(folder: Path) -> dict[str, Target]:
    import pyarrow
    import pyarrow.parquet

    targets = {}

    def add(name: str, file: str, read: Callable[[Path], object]) -> None:
        targets[name] = Target(folder / name, file, read)

    for family, spec, flavor in (("llama3", LLAMA3, "1B"), ("qwen3", QWEN3, "0.6B")):
        (folder / family).mkdir()
        config = spec.hugging_face().to_config(spec.flavors[flavor], "float32", 1, 2)
        (folder / family / "config.json").write_text(json.dumps(config))
        add(family, "config.json", lambda folder: find_download(folder, find_families()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copytree(ASSETS, folder / name)
        add(name, name, lambda folder: build_tokenizer(folder).encode("A text, 12\n", bos=True, eos=True))
    (folder / "generation").mkdir()
    (folder / "generation/generation_config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": 3}')
    add("generation", "generation_config.json", lambda folder: stop_ids(folder, build_tokenizer(ASSETS)))

    lines = [json.dumps({"text": f"text {i} é", "id": i}) for i in range(50)]
    (folder / "text").mkdir()
    (folder / "text/a.jsonl").write_text("\n".join(lines))
    add("text", "a.jsonl", lambda folder: read_source(folder, "a.jsonl"))
    (folder / "plain").mkdir()
    (folder / "plain/a.txt").write_text("\n".join(lines))
    add("plain", "a.txt", lambda folder: read_source(folder, "a.txt"))
    (folder / "parquet").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), folder / "parquet/a.parquet")
    add("parquet", "a.parquet", lambda folder: read_source(folder, "a.parquet"))

    prepare("x", str(folder / "text/a.jsonl"), str(ASSETS), str(folder / "tokens"), workers=1)
    for file in ("meta.json", "documents.bin", "tokens.bin", "checksums.bin"):
        shutil.copytree(folder / "tokens", folder / file)

        def read(folder: Path) -> None:
            tokens = PreparedTokens(folder, build_tokenizer(ASSETS))
            for index in range(len(tokens)):
                tokens.tokens(index)

        add(file, file, read)

    (folder / "manifest/step-3").mkdir(parents=True)
    storage = Storage(str(folder / "manifest"))
    (folder / "manifest/step-3.writing").mkdir()
    (folder / "manifest/step-3.writing/a").write_bytes(b"abc")
    files = storage.describe(storage.being_written(3), ["a"])
    config = tiny_config(folder).model_dump(mode="json")
    storage.complete(Manifest(3, files, config, layout="1 rank", versions={"torch": "2"}, run={}))
    manifest = next(p.name for p in (folder / "manifest/step-3").iterdir() if p.name != "a")
    add("manifest", f"step-3/{manifest}", read_manifest)

    (folder / "toml").mkdir()
    shutil.copy(ROOT / "train_configs/llama3_8b.toml", folder / "toml/a.toml")
    add("toml", "a.toml", lambda folder: load_run_or_exit(["--job.config_file", str(folder / "a.toml")], 8, rank=0))
    return targets


def attack_all(targets: dict[str, Target], count: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often each target was read and refused, and the tracebacks."""
    seen: Counter[tuple[str, str]] = Counter()
    tracebacks = []
    for name, target in targets.items():
        chance = random.Random(f"{seed} {name}")
        for number in range(count):
            ended = target.attack(chance)
            seen[name, ended if ended in ("read", "refused") else "traceback"] += 1
            if ended not in ("read", "refused"):
                tracebacks.append(f"{name}, number {number}:\n{ended}")
    return seen, tracebacks


def attack_by_hand(make: Callable[[Path], dict[str, Target]]) -> None:
    """What `python -m` of a list of targets does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000, help="mutations of each file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen, tracebacks = attack_all(make(Path(folder)), args.count, args.seed)
    print("\n".join(tracebacks[:40]))
    for (name, ended), number in sorted(seen.items()):
        print(f"{name:24} {ended:10} {number}")
    print(f"{sum(seen.values())} mutations, {len(tracebacks)} tracebacks")


if __name__ == "__main__":
    attack_by_hand(make_targets)
