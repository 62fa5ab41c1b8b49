"""`python -m torchtitan VERB`: the tools around training; tools/verbs.py lists them."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from torchtitan.refusal import Refusal
from torchtitan.root import VERSION
from torchtitan.tools import verbs


def main(argv: Sequence[str]) -> None:
    verb, words = verbs.find(argv)
    if not verb:
        raise SystemExit(_answer(argv[0] if argv else "--help"))
    module, parser = verbs.load(verb)
    end = words.index("--") if "--" in words else len(words)
    args, options = parser.parse_args(words[:end]), words[end + 1 :]
    if options and not parser.epilog:
        parser.error(f"nothing may follow --, but {' '.join(options)} does; leave it out")
    try:
        code = module.run(args, options)
    except Refusal as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise SystemExit(f"error: {error}; check the path, its permissions and the space on its disk") from None
    if code:
        raise SystemExit(code)


def _answer(word: str) -> str | int:
    if word in ("--help", "-h"):
        print(verbs.listing())
    elif word == "--version":
        print(f"torchtitan-recipe {VERSION}")
    else:
        near = get_close_matches(word, verbs.MODULES, n=1)
        fix = f"did you mean {near[0]}?" if near else "--help lists all"
        return f"error: {word} is no verb; {fix}"
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
