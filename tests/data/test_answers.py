"""Batches of prompts and answers."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlib_papers.data.answers import answer_batch

PAIRS = [([5, 6, 7], [8, 9]), (np.array([4], np.int64), np.array([3], np.int32))]


def test_loss_lies_on_the_answers():
    batch = answer_batch(PAIRS, length=5, pad_id=1)
    want = {
        "tokens": [[5, 6, 7, 8, 1], [4, 1, 1, 1, 1]],
        "targets": [[1, 1, 8, 9, 1], [3, 1, 1, 1, 1]],
        "loss_mask": [[0, 0, 1, 1, 0], [1, 0, 0, 0, 0]],
        "segment_ids": [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]],
        "positions": [[0, 1, 2, 3, 0], [0, 0, 0, 0, 0]],
    }
    assert {name: array.astype(int).tolist() for name, array in batch.items()} == want
    kinds = {name: array.dtype.name for name, array in batch.items()}
    assert kinds == dict.fromkeys(want, "int32") | {"loss_mask": "bool"}
    shorter = answer_batch(PAIRS, pad_id=1)
    for name, array in shorter.items():
        np.testing.assert_array_equal(array, batch[name][:, :4])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "pairs is empty"),
        ([([1], [2]), ([], [1])], r"prompt of pairs\[1\]"),
        ([([1], [])], r"answer of pairs\[0\]"),
        ([([1], [[2]])], r"shape \(1, 1\)"),
        ([([0.5], [2])], "dtype float64"),
        ([([1], [2]), ([1, 2, 3], [2, 3])], r"pairs\[1\] takes 4 tokens, more than length=3"),
    ],
)
def test_refusals(pairs, message):
    with pytest.raises(ValueError, match=message):
        answer_batch(pairs, length=3)
