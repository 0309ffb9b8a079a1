"""Masked and segment means: definition, empty input, NaN in the padding, both segment paths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.ops.masked import (
    divide_or_zero,
    masked_mean,
    masked_sum,
    segment_mean,
    segment_sum,
)

masked_mean = jax.jit(masked_mean, static_argnames="axis")
RNG = np.random.default_rng(0)


def test_masked_mean_is_the_mean_of_what_is_kept():
    x = RNG.normal(size=(3, 4, 2)).astype(np.float32)
    mask = RNG.random((3, 4)) < 0.6
    np.testing.assert_allclose(masked_mean(x, mask), x[mask].mean(), rtol=1e-6)
    expected = np.stack([row[keep].mean(0) for row, keep in zip(x, mask, strict=True)])
    np.testing.assert_allclose(masked_mean(x, mask, axis=1), expected, rtol=1e-6)
    np.testing.assert_allclose(masked_mean(x), x.mean(), rtol=1e-6)
    np.testing.assert_allclose(masked_sum(x, mask), x[mask].sum(), rtol=1e-5)


def test_weights_weigh():
    x, w = np.array([1.0, 3.0], np.float32), np.array([0.25, 0.75], np.float32)
    assert float(masked_mean(x, w)) == 2.5


def test_empty_is_zero_with_zero_gradient():
    x = jnp.ones((2, 3))
    value, grad = jax.jit(jax.value_and_grad(lambda x: masked_mean(x, jnp.zeros((2, 3), bool))))(x)
    assert value == 0
    assert not grad.any()
    assert divide_or_zero(jnp.ones(2), jnp.zeros(2)).tolist() == [0, 0]


def test_nan_in_the_padding_reaches_neither_value_nor_gradient():
    x = jnp.array([[1.0, jnp.nan], [2.0, jnp.inf]])
    mask = jnp.array([[True, False], [True, False]])
    value, grad = jax.jit(jax.value_and_grad(lambda x: masked_mean(x * x, mask)))(x)
    assert value == 2.5
    np.testing.assert_array_equal(grad[:, 0], [1, 2])
    sums, _ = segment_sum(x[..., None], jnp.array([[1, 0], [1, 0]]), 1)
    assert sums.ravel().tolist() == [1, 2]


@pytest.mark.parametrize("num_segments", [1, 4])
@pytest.mark.parametrize("layers", [(), (3,)])
def test_segment_mean_against_a_loop(num_segments, layers):
    ids = RNG.integers(0, num_segments + 2, (5, 7)).astype(np.int32)  # also ids above G: left out
    weights = RNG.random((5, 7)).astype(np.float32)
    x = RNG.normal(size=(*layers, 5, 7, 2)).astype(np.float32)
    means, valid = map(
        np.asarray, jax.jit(segment_mean, static_argnums=2)(x, ids, num_segments, weights)
    )
    assert means.shape == (*layers, 5, num_segments, 2)
    for row in range(5):
        for segment in range(num_segments):
            at = ids[row] == segment + 1
            assert valid[row, segment] == at.any()
            part = x[..., row, at, :] * weights[row, at, None]
            expected = part.sum(-2) / max(weights[row, at].sum(), 1e-9)
            np.testing.assert_allclose(means[..., row, segment, :], expected, rtol=2e-5)


def test_both_segment_paths_agree_in_value_and_gradient():
    x = RNG.normal(size=(2, 3, 5, 4)).astype(np.float32)
    ids = RNG.integers(0, 2, (3, 5)).astype(np.int32)

    def loss(num_segments):
        return jax.jit(
            jax.value_and_grad(lambda x: jnp.sum(jnp.sin(segment_mean(x, ids, num_segments)[0])))
        )

    fast, slow = loss(1)(x), loss(2)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), fast, slow)


def test_the_gradient_of_a_segment_mean_has_no_scatter():
    ids = jnp.ones((2, 3), jnp.int32)
    text = str(
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(segment_mean(x, ids, 4)[0] ** 2)))(
            jnp.ones((2, 3, 4))
        )
    )
    assert "dot_general" in text
    assert "scatter" not in text


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="mask has shape"):
        masked_mean(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match="segment_ids has shape"):
        segment_sum(jnp.ones((2, 3, 4)), jnp.ones((2, 4), jnp.int32), 1)
    with pytest.raises(ValueError, match="segment_ids has dtype"):
        segment_sum(jnp.ones((2, 3, 4)), jnp.ones((2, 3)), 1)
    with pytest.raises(ValueError, match="num_segments is 0"):
        segment_sum(jnp.ones((2, 3, 4)), jnp.ones((2, 3), jnp.int32), 0)
