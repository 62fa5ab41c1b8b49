"""Says what a file probably is that is not a tokenizer."""

import json
import re


def describe(data: bytes) -> str:
    """A guess at what a file is that is not a tokenizer."""
    head = data[:400].lstrip()
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer instead of the file itself; run `git lfs pull` in the clone it came from"
    if re.match(rb"(<!--.*?-->\s*)?<(!doctype|html|\?xml)", head, re.IGNORECASE | re.DOTALL):
        return "an HTML page, often a login or error page saved in its place; accept the model's licence and log in"
    if head.startswith(b"{"):
        return f"JSON without a 'model' key (its keys: {', '.join(list(json.loads(data))[:8]) or 'none'})"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < 1 << 32:
        return "a safetensors file (weights)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, such as a PyTorch checkpoint"
    if re.fullmatch(rb"[\t\n\r\x20-\x7e]+", head):
        return f"text that begins with {head[:60].decode()!r}"
    return f"a binary file that begins with {head[:8].hex(' ')}"
