"""Where the documents of packed sequences begin: what keeps them apart in attention."""

import numpy as np

# Rounded up, so that a batch with a few documents more has the same shape, and nothing is compiled again for it.
_TOKENS_A_DOCUMENT, _FEWEST = 128, 16


def document_starts(document_ids: np.ndarray) -> np.ndarray:
    """The first position of each document, int32 [B, N], of numbers that count from 0 in each sequence [B, S].

    The rest of a row, which is one entry or more, is S.
    """
    num_rows, seq_len = document_ids.shape
    size = max(_FEWEST, seq_len // _TOKENS_A_DOCUMENT)
    while size <= document_ids[:, -1].max() + 1:
        size *= 2
    starts = np.full((num_rows, size), seq_len, np.int32)
    starts[:, 0] = 0
    rows, places = np.nonzero(np.diff(document_ids))
    starts[rows, document_ids[rows, places + 1]] = places + 1
    return starts
