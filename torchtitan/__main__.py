"""`python -m torchtitan VERB`: what one does before, beside and after training; tools/verbs.py lists the verbs."""

import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches

if __name__ == "__main__":  # Ctrl-C during the imports ends Python without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torchtitan.refusal import Refusal, ends_in_a_line
from torchtitan.root import VERSION
from torchtitan.tools import verbs


def main(argv: Sequence[str]) -> None:
    verb, words = verbs.find(argv)
    try:
        if not verb:
            raise SystemExit(_answer(argv[0] if argv else "--help"))
        with ends_in_a_line("stopped"):
            module, parser = verbs.load(verb)
            end = words.index("--") if "--" in words else len(words)
            (args, unknown), options = parser.parse_known_args(words[:end]), words[end + 1 :]
            if unknown:
                where = f"; {parser.epilog}" if parser.epilog else ""
                parser.error(f"unrecognized arguments: {' '.join(unknown)}{where}")
            if options and not parser.epilog:
                parser.error(f"nothing may follow --, but {' '.join(options)} does; leave it out")
            code = module.run(args, options)
    except Refusal as error:
        raise SystemExit(f"error: {error}") from None
    except BrokenPipeError:  # `| head` has seen enough; Python flushes stdout once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise SystemExit(f"error: {error}; check the path, its permissions and the space on its disk") from None
    if code:
        raise SystemExit(code)


def _answer(word: str) -> str | int:
    if word in ("--help", "-h"):
        print(verbs.listing(), flush=True)
    elif word == "--version":
        print(f"torchtitan-recipe {VERSION}")
    elif several := [verb for verb in verbs.MODULES if verb.startswith(f"{word} ")]:
        return f"error: {word} is no verb alone; use {', '.join(several)}"
    else:
        near = get_close_matches(word, verbs.MODULES, n=1)
        fix = f"did you mean {near[0]}?" if near else "--help lists all"
        return f"error: {word} is no verb; {fix}"
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
