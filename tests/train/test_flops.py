"""Counts against the arrays of real models and against sums done by hand."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.train.flops import (
    count_parameters,
    flops_per_token,
    forward_flops_per_token,
)
from jaxlib_papers.train.state import abstract_model

DENSE = DecoderConfig(
    vocab_size=100,
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=40,
)
SPARSE = dataclasses.replace(
    DENSE,
    mlp_dim=0,
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=20, shared_expert_dim=12),
)


def counts(config):
    spec = abstract_model(lambda key: DecoderLM(config, key=key))
    top_k = None if config.moe is None else config.moe.top_k
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(spec.params))
    return count_parameters(spec.params, spec.axes, top_k=top_k), total


def test_dense_counts():
    got, arrays = counts(DENSE)
    attention = 16 * 4 * 6 * 2 + 16 * 2 * 6 * 2
    want = 3 * (attention + 3 * 16 * 40 + 2 * 16) + 16 + 2 * 100 * 16
    assert got.total == got.active == arrays == want
    assert got.embedding == 100 * 16


def test_sparse_counts():
    got, arrays = counts(SPARSE)
    assert got.total == arrays
    assert got.total - got.active == 3 * (8 - 2) * 3 * 16 * 20


def test_dense_flops_by_hand():
    length = 32
    projections = 2 * (16 * 24 + 2 * 16 * 12 + 24 * 16)
    scores = 2 * (2 * 24 * length) / 2
    layer = projections + scores + 2 * 3 * 16 * 40
    want = 3 * layer + 2 * 16 * 100
    assert forward_flops_per_token(DENSE, length) == want
    assert flops_per_token(DENSE, length) == 3 * want
    tied = dataclasses.replace(DENSE, tie_embeddings=True)
    assert flops_per_token(tied, length) == 3 * want


def test_sparse_flops_count_the_chosen_experts_the_shared_one_and_the_router():
    difference = forward_flops_per_token(SPARSE, 32) - forward_flops_per_token(DENSE, 32)
    per_layer = 2 * 16 * (3 * (2 * 20 + 12) + 8) - 2 * 3 * 16 * 40
    assert difference == pytest.approx(3 * per_layer)


@pytest.mark.parametrize("window", [1, 5, 32, 100])
def test_windows_count_what_is_attended(window):
    length = 32
    config = dataclasses.replace(DENSE, sliding_window=window)
    matmuls = forward_flops_per_token(DENSE, 1) - 2 * 3 * 2 * 24 * 0.5
    attended = (forward_flops_per_token(config, length) - matmuls) / (2 * 3 * 2 * 24)
    # Exact mean of min(t + 1, W); the convention drops half a key per token.
    exact = sum(min(t + 1, window) for t in range(length)) / length
    assert attended == pytest.approx(exact, abs=0.51)


def test_bad_lengths_are_refused():
    with pytest.raises(ValueError, match="seq_len=0"):
        flops_per_token(DENSE, 0)
