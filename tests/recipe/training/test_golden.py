"""Losses and gradient norms of ten steps, as the code had them before it was taken apart into families and rooms."""

from pathlib import Path

import pytest

from tests.tiny_runs import tiny_config, train_here

# Steps 1, 4, 7 and 10. Another CPU adds in another order and may differ in the last digits.
GOLDEN = {
    "tiny": (
        [8.1521577835083, 7.653176784515381, 7.0133748054504395, 6.9578070640563965],
        [0.51799476146698, 0.5001263618469238, 0.67533278465271, 0.5926221013069153],
    ),
    "tiny-tied": (
        [8.57984447479248, 7.14154052734375, 6.745733737945557, 6.861554145812988],
        [1.0878145694732666, 0.7186099886894226, 0.4821184575557709, 0.4762389659881592],
    ),
}


@pytest.mark.parametrize("flavor", GOLDEN)
def test_ten_steps_have_the_losses_they_always_had(flavor: str, tmp_path: Path) -> None:
    records = train_here(tiny_config(tmp_path, model__flavor=flavor))[::3]
    losses, norms = GOLDEN[flavor]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-6)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-5)
