"""Which tokenizer made some tokens: a hash that a resumed run and prepared tokens are compared by."""

import hashlib
import json

from torchtitan.data.tokenizers.tokenizer import Tokenizer

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 1234567 times!\n\n\tdef f(x):\n        return x ** 2  # naïve\r\n"
    "Ünïcödé: Привет, мир. 你好,世界。 こんにちは 🙂👩‍🚀 don't <|end_of_text|> </s> https://example.org/?a=b&c=%20"
)


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of the tokenizer's file, and of what it does here: packages and the files beside it decide that, too."""
    sampled = range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // 512))
    facts = [
        tokenizer.file_sha256,
        tokenizer.vocab_size,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.encode(PROBE, bos=True, eos=True),
        [tokenizer.decode([token]) for token in sampled],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
