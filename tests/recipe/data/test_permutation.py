"""The seeded permutation, against what a permutation is."""

import numpy as np
import pytest

from torchtitan.data.permutation import permute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 64, 1000, 1025, 65536, 100_003])
def test_the_permutation_is_a_bijection(n):
    assert np.array_equal(np.sort(permute(n, 3, np.arange(n))), np.arange(n))


def test_seeds_and_epochs_give_different_orders_and_the_same_seed_the_same():
    orders = [permute(1000, seed, np.arange(1000)).tolist() for seed in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]]
    assert len({tuple(order) for order in orders}) == 4
    assert permute(1000, (1, 0, 0), np.arange(1000)).tolist() == orders[0]


def test_a_block_of_indices_goes_where_the_whole_range_sends_it():
    whole = permute(12_345, 9, np.arange(12_345))
    assert np.array_equal(permute(12_345, 9, np.arange(500, 700)), whole[500:700])


def test_neighbours_are_scattered_like_a_random_permutation():
    n = 100_000
    order = permute(n, 5, np.arange(n))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.abs(np.diff(order)).mean() / n - 1 / 3) < 0.01
    assert np.bincount(order[: n // 10] // (n // 10), minlength=10).std() < 200


def test_a_billion_of_billions_needs_no_memory():
    n = 10**18
    assert 0 <= int(permute(n, 1, np.array([n - 1]))[0]) < n


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="permutation of 0 elements"):
        permute(0, 1, np.arange(0))
