"""Random numbers that depend on a text alone, such as a seed and a place in the data."""

import hashlib
import random

import numpy as np
import torch


def seed_draws(key: str) -> None:
    """Seed what torch (on every device), numpy and Python draw from now on."""
    digest = hashlib.sha256(key.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    random.seed(digest[:8])
    np.random.seed(int.from_bytes(digest[8:12], "little"))
