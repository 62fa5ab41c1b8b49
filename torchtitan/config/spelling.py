"""Other spellings of options, as torchtitan and most command lines know them: `--key true`, and lists with commas."""

from collections.abc import Sequence

from torchtitan.config.names import sections

_SAID = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def spelled_out(argv: Sequence[str]) -> list[str]:
    """The command line in the parser's own spelling: `--section.key`, `--section.no_key`, and a word for each item."""
    kinds = {f"--{s}.{key}": field.annotation for s, of in sections().items() for key, field in of.model_fields.items()}
    words: list[str] = []
    kind, is_list = None, False  # of the option whose values follow
    for word in argv:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            option = option.replace("-", "_").replace("__", "--", 1)
            kind = kinds.get(option)
            is_list = "list[" in str(kind)
            is_split = is_list or kind in (bool, bool | None)
            words.append(option if is_split else word)
            if not equals or not is_split:
                continue
            word = value
        if kind is bool and word.lower() in _SAID:
            section, _, key = words.pop().rpartition(".")
            words.append(f"{section}.{key}" if _SAID[word.lower()] else f"{section}.no_{key}")
        else:
            word = str(_SAID.get(word.lower(), word)) if kind == bool | None else word
            words += [part for part in word.split(",") if part] if is_list else [word]
        kind = None if kind is bool else kind  # a list may go on
    return words
