"""Text of others, made inert: what a terminal or a page would obey becomes visible, and nothing else changes."""

import re

# Colors and moves of the cursor, titles of windows, and two-character sequences.
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[PX^_][^\x1b]{0,4096}\x1b\\"
    r"|[ -/]*[0-OQ-WYZ\\`-~])"
)
# Characters that reorder or hide what a person reads.
_HIDDEN = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF}


def inert(data: bytes) -> str:
    """Escape sequences go, a bar that is drawn over itself becomes lines, other control characters become pictures."""
    text = _ESCAPES.sub("", data.decode("utf-8", errors="replace"))
    return "".join(one if _is_plain(one) else _picture(ord(one)) for one in re.sub("\r+\n?", "\n", text))


def _is_plain(one: str) -> bool:
    code = ord(one)
    return one in "\n\t" or (code >= 0x20 and not 0x7F <= code < 0xA0 and code not in _HIDDEN)


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def whole_characters(data: bytes) -> bytes:
    """Without a character that the piece cuts at its end, and without an escape that it may cut."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:  # the first byte of a long character
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            data = data[:-back] if length > back else data
            break
        if byte < 0x80:
            break
    escape = data.rfind(b"\x1b", -64)
    if escape > 0 and not _ESCAPES.match(data[escape:].decode("latin-1")):
        data = data[:escape]
    return data
