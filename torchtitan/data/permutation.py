"""A seeded permutation of range(n) in constant memory: a Feistel network over the bits of the index.

If the network maps an index to n or above, the result goes through the network again (cycle walking).
"""

from collections.abc import Sequence

import numpy as np

from torchtitan.refusal import Refusal

NUM_ROUNDS = 6  # even, so that an odd number of bits, cut into two unequal halves, ends with both in place


def permute(n: int, seed: int | Sequence[int], indices: np.ndarray) -> np.ndarray:
    """The place of each of `indices`, which are in range(n), as int64."""
    if n < 1:
        raise Refusal(f"a permutation of {n} elements; give 1 or more")
    num_bits = max(2, (n - 1).bit_length())
    keys = np.random.SeedSequence(seed).generate_state(NUM_ROUNDS, np.uint64)
    values = _encrypt(indices.astype(np.uint64), num_bits, keys)
    # For n > 2 there are fewer than 2n values, and n of them are inside. So two passes are enough on average.
    while (outside := values >= np.uint64(n)).any():
        values[outside] = _encrypt(values[outside], num_bits, keys)
    return values.astype(np.int64)


def _encrypt(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    encrypted: np.ndarray = (left << np.uint64(right_bits)) | right
    return encrypted


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values = values ^ (values >> np.uint64(31))
    return values
