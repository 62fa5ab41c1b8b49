"""Makes tests/assets: a small corpus of real prose, and a byte-level BPE tokenizer of 2048 tokens trained on it.

    apt-get install --no-install-recommends python3.11-doc
    python scripts/make_test_assets.py /usr/share/doc/python3.11/html/_sources

The argument is the folder of the Python documentation's reST sources. The same sources give byte-identical files.
The script refuses a folder without the documentation's chapters or licence.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

CHAPTERS = ("faq", "howto", "library", "reference", "tutorial")
TRAIN_BYTES = 3_700_000
VALIDATION_BYTES = 150_000
VALIDATION_FILE_BYTES = 40_000  # many short files, so that no one topic decides the validation loss
WHOLE_FILE_BYTES = 20_000  # a file up to this size stays one document
SECTION_BYTES = 4_000  # in a longer one, a document ends at the first heading after this many bytes
PARAGRAPH_BYTES = 16_000  # and at the first unindented paragraph after this many bytes, even without a heading
SHORTEST_BYTES = 1_000
PROSE_SHARE = (
    0.72  # least share of letters and spaces among characters outside indentation; tables of symbols have less
)

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

README = """# Test assets

`scripts/make_test_assets.py` makes these files. Do not edit them by hand; run the script again:

    apt-get install --no-install-recommends python3.11-doc
    python scripts/make_test_assets.py /usr/share/doc/python3.11/html/_sources

| file | content |
| --- | --- |
| `pydocs/train.jsonl` | {train} |
| `pydocs/validation.jsonl` | {validation} |
| `pydocs/LICENSE` | copyright notice and licences of the documentation |
| `tokenizer/tokenizer.json` | byte-level BPE, {vocab_size} tokens with `{bos}` and `{eos}`, trained on `train.jsonl` |
| `tokenizer/tokenizer_config.json` | names the tokens that begin and end a document |

**Origin.** The text comes from the reST sources of the Python {release} documentation
(https://docs.python.org/3.11/), as shipped in Debian's package `python3.11-doc` (3.11.2-6+deb12u9): the tutorial,
howto, faq and language reference, and part of the library reference.

**Licence.** PSF License Agreement (version 2); code examples are also under the Zero-Clause BSD licence. See
`pydocs/LICENSE`. The tokenizer is derived from the text.

**Changes made to the documentation.** The script leaves out author and index directives, web and mail addresses, and
parts that are mostly symbols, because they are not prose. It splits files over {whole} KB at section or paragraph
borders. It sorts documents by their SHA-256 and writes each as one line, a JSON object `{{"text": ...}}`. The
validation files are whole pages; `train.jsonl` contains no part of them.
"""


def read_page(path: Path) -> str:
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    text = re.sub(r"^\.\. (module|section)author::.*\n", "", text, flags=re.M)
    text = re.sub(r"^\.\. _[^\n]*: https?://.*\n", "", text, flags=re.M)  # link targets are not prose
    text = re.sub(r"\s*<https?://[^>]*>|https?://[\w./%#?=&~:+@-]*|[\w.-]+@[\w-]+(\.[\w-]+)+", "", text)
    return re.sub(r"^( *)\.\. index::.*\n(?:\1 +\S.*\n|[ \t]*\n(?=\1 +\S))*", "", text, flags=re.M).strip() + "\n"


def opens_section(block: str) -> bool:
    return re.match(r"([^\n]+\n)?[^\n]+\n([=\-~^*\"#+'])\2{2,}\n", block) is not None


def split_page(text: str) -> list[str]:
    if len(text.encode()) <= WHOLE_FILE_BYTES:
        return [text]
    documents: list[list[str]] = [[]]
    size, label = 0, ""
    for block in re.split(r"(?<=\n\n)(?=\S)", text):  # an unindented paragraph and everything indented below it
        if re.fullmatch(r"(\.\. _[^\n]*:\n)+\n+", block):
            label += block  # a label belongs to the heading below it
            continue
        if size >= (SECTION_BYTES if opens_section(block) else PARAGRAPH_BYTES):
            documents.append([])
            size = 0
        documents[-1].append(label + block)
        label = ""
        size += len(block.encode())
    if size < SHORTEST_BYTES and len(documents) > 1:
        tail = documents.pop()
        documents[-1] += tail
    return ["".join(blocks).strip() + "\n" for blocks in documents]


def is_prose(text: str) -> bool:
    words = re.sub(r"^ +", "", text, flags=re.M)
    share = sum(c.isalpha() or c.isspace() for c in words) / len(words)
    return share >= PROSE_SHARE and len(text.encode()) >= SHORTEST_BYTES


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def select_documents(sources: Path) -> tuple[list[str], list[str]]:
    """(train, validation). The order of the documents depends only on their content."""
    pages = {
        path.relative_to(sources).as_posix(): [d for d in split_page(read_page(path)) if is_prose(d)]
        for chapter in CHAPTERS
        for path in sorted((sources / chapter).glob("**/*.rst.txt"))
        if path.name != "index.rst.txt"
    }
    # Sorting by a hash of the name draws the same random pages each time. The library comes last: only it is truncated.
    order = sorted((name for name in pages if pages[name]), key=digest)
    train: list[str] = []
    validation: list[str] = []
    held_out = set()
    for name in order:
        short = sum(len(d.encode()) for d in pages[name]) <= VALIDATION_FILE_BYTES
        if short and sum(len(d.encode()) for d in validation) < VALIDATION_BYTES:
            validation += pages[name]
            held_out.add(name)
    size = 0
    for name in sorted(order, key=lambda name: name.startswith("library/")):
        if name not in held_out and size < TRAIN_BYTES:
            train += pages[name]
            size += sum(len(d.encode()) for d in pages[name])
    return sorted(train, key=digest), sorted(validation, key=digest)


def extract_license(sources: Path, release: str) -> str:
    notice = (sources / "copyright.rst.txt").read_text(encoding="utf-8").strip()
    text = (sources / "license.rst.txt").read_text(encoding="utf-8")
    # The rest of the file covers software inside Python; none of that is in the corpus.
    begin = text.index("Terms and conditions for accessing or otherwise using Python")
    end = text.index(".. _OtherLicenses:")
    return f"{notice}\n\n\n{text[begin:end].strip()}\n".replace("|release|", release)


def train_tokenizer(texts: list[str]) -> str:
    """The text of a tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte, so that any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for this vocabulary"
    return tokenizer.to_str(pretty=True) + "\n"


def write_corpus(documents: list[str], path: Path) -> str:
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return f"{len(documents):,} documents, {path.stat().st_size:,} bytes"


def make_assets(sources: Path, out: Path, release: str) -> None:
    missing = [name for name in (*CHAPTERS, "license.rst.txt", "copyright.rst.txt") if not (sources / name).exists()]
    if missing:
        raise ValueError(
            f"{sources} has no {', '.join(missing)}, so it is not the Python documentation's reST sources; use "
            "/usr/share/doc/python3.11/html/_sources of Debian's package python3.11-doc"
        )
    for folder in ("pydocs", "tokenizer"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    train, validation = select_documents(sources)
    figures = {
        "train": write_corpus(train, out / "pydocs" / "train.jsonl"),
        "validation": write_corpus(validation, out / "pydocs" / "validation.jsonl"),
    }
    files = {
        "pydocs/LICENSE": extract_license(sources, release),
        "tokenizer/tokenizer.json": train_tokenizer(train),
        "tokenizer/tokenizer_config.json": json.dumps({"bos_token": BOS, "eos_token": EOS}, indent=2) + "\n",
        "README.md": README.format(
            **figures, vocab_size=VOCAB_SIZE, bos=BOS, eos=EOS, release=release, whole=WHOLE_FILE_BYTES // 1000
        ),
    }
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
    print(f"{out}: train {figures['train']}; validation {figures['validation']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder of the documentation's .rst.txt files")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "tests" / "assets")
    parser.add_argument("--release", default="3.11.2", help="the documentation's version, named in the licence")
    args = parser.parse_args()
    make_assets(args.sources, args.out, args.release)


if __name__ == "__main__":
    main()
