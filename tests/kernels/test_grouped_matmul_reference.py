"""The XLA grouped matmul, which is the kernels' specification, against loops and `ragged_dot`."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_matmul


def loops(x, w, sizes, dy, transpose_w=False):
    """Float64 result and gradients, one group after the other."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for group, size in enumerate(np.maximum(sizes, 0)):
        rows = slice(start, min(start + size, len(x)))
        matrix = w[group].T if transpose_w else w[group]
        y[rows] = x[rows] @ matrix
        dx[rows] = dy[rows] @ matrix.T
        part = x[rows].T @ dy[rows]
        dw[group] = part.T if transpose_w else part
        start = min(start + size, len(x))
    return y, dx, dw


def draw(seed, rows, inner, outer, groups, transpose_w=False, dtype="float32"):
    rng = np.random.default_rng(seed)
    w = (groups, outer, inner) if transpose_w else (groups, inner, outer)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in ((rows, inner), w, (rows, outer))]


@functools.partial(jax.jit, static_argnames=("transpose_w", "function"))
def value_and_grads(x, w, sizes, dy, transpose_w=False, function=grouped_matmul):
    options = {"transpose_w": True} if transpose_w else {}
    y, pullback = jax.vjp(lambda x, w: function(x, w, sizes, **options), x, w)
    return y, *pullback(dy)


def compare(arrays, sizes, transpose_w=False, tolerance=1e-5):
    x, w, dy = arrays
    sizes = np.asarray(sizes, np.int32)
    got = value_and_grads(x, w, sizes, dy, transpose_w=transpose_w)
    for name, a, b in zip(("y", "dx", "dw"), got, loops(x, w, sizes, dy, transpose_w), strict=True):
        scale = max(1.0, np.abs(b).max(initial=0.0))
        a = np.asarray(a.astype(jnp.float32))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale, err_msg=name)
    used = min(int(np.maximum(sizes, 0).sum()), len(x))
    assert not np.any(got[0][used:]) and not np.any(got[1][used:])
    assert not np.any(got[2][sizes <= 0])
    return got


C1_SIZES = np.array([7, 0, 12, 3, 9, 1] + [0] * 12, np.int32)


def test_c1_unused_experts_get_exactly_no_gradient():
    """18 groups, K = 64, N = 43, 32 tokens, all in groups 0-5; and as `ragged_dot` computes it."""
    x, w, dy = draw(0, 32, 64, 43, 18)
    assert C1_SIZES.sum() == 32
    got = compare((x, w, dy), C1_SIZES)
    assert (np.asarray(got[2])[6:] == 0.0).all() and (np.asarray(got[2])[1] == 0.0).all()
    for a, b in zip(got, value_and_grads(x, w, C1_SIZES, dy, function=jax.lax.ragged_dot),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert", (0, 9, 17))
def test_c1_all_tokens_to_one_group(expert):
    compare(draw(1, 32, 64, 43, 18), 32 * (np.arange(18) == expert))


def test_c1_nan_in_rows_of_no_group():
    x, w, dy = draw(2, 32, 64, 43, 18)
    sizes = C1_SIZES.copy()
    sizes[4] = 0
    clean = compare((x, w, dy), sizes)
    # Values and cotangents of rows past the groups: 0 * NaN must not reach a weight.
    for poison in (np.nan, np.inf):
        got = value_and_grads(x.at[23:].set(poison), w, sizes, dy.at[23:].set(poison))
        for a, b in zip(got, clean, strict=True):
            np.testing.assert_array_equal(a, b)


def test_groups_larger_than_one_block():
    arrays = draw(3, 2300, 3, 4, 3)
    compare(arrays, (2, 2290, 5), tolerance=1e-4)
    compare(arrays, (1024, 0, 1100), tolerance=1e-4)


# A few shapes, so that few are compiled; the sizes are free.
SHAPES = ((0, 3, 2, 2), (1, 1, 1, 1), (5, 4, 3, 3), (33, 4, 6, 4))


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.data())
def test_any_sizes(data):
    rows, inner, outer, groups = data.draw(st.sampled_from(SHAPES))
    transpose_w = data.draw(st.booleans())
    left, sizes = rows, []
    for _ in range(groups):
        sizes.append(data.draw(st.integers(0, left)))
        left -= sizes[-1]
    compare(draw(data.draw(st.integers(0, 9)), rows, inner, outer, groups, transpose_w), sizes,
            transpose_w)  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [(-3, 20, 10, 5), (50, 50, 50, 50), (0, -1, -(2**31), 33), (2**31 - 1, 5, 1, 2)]
)
def test_sizes_that_do_not_fit_are_clipped_under_jit(sizes):
    compare(draw(4, 33, 4, 6, 4), sizes)


def test_size_dtypes_do_not_wrap_round():
    x, w, dy = draw(5, 260, 2, 2, 2)
    y = jax.jit(grouped_matmul)(x, w, jnp.array([130, 130], jnp.uint8))
    np.testing.assert_allclose(y, loops(x, w, (130, 130), dy)[0], rtol=1e-5, atol=1e-5)


def test_bfloat16_accumulates_in_float32():
    x, w, dy = draw(6, 40, 512, 3, 2, dtype="bfloat16")
    y, dx, dw = compare((x, w, dy), (30, 10), tolerance=8e-3)
    assert {a.dtype for a in (y, dx, dw)} == {jnp.dtype(jnp.bfloat16)}
    # No worse than rounding the exact result once: half a unit of 8 significant bits.
    exact = loops(x, w, (30, 10), dy)[0]
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-3)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        arrays = draw(7, 13, 5, 4, 3, dtype="float64")
        got = value_and_grads(*arrays[:2], jnp.array([4, 0, 9]), arrays[2])
        for a, b in zip(got, loops(*arrays[:2], (4, 0, 9), arrays[2]), strict=True):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_vmap_over_everything():
    stacks = [jnp.stack(a) for a in zip(*(draw(s, 13, 3, 4, 3) for s in (0, 1)), strict=True)]
    x, w, dy = stacks
    sizes = jnp.array([[4, 0, 9], [1, 2, 3]], jnp.int32)
    mapped = jax.vmap(value_and_grads)(x, w, sizes, dy)
    for i in (0, 1):
        one = loops(x[i], w[i], np.asarray(sizes[i]), dy[i])
        for a, b in zip(mapped, one, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_no_group_and_no_column():
    assert not np.any(grouped_matmul(jnp.ones((3, 2)), jnp.ones((0, 2, 4)), jnp.zeros(0, "i4")))
    assert grouped_matmul(jnp.ones((3, 0)), jnp.ones((1, 0, 4)), jnp.array([3])).shape == (3, 4)
    assert grouped_matmul(jnp.ones((3, 2)), jnp.ones((1, 2, 0)), jnp.array([3])).shape == (3, 0)


def test_bitwise_repeatable():
    x, w, dy = draw(8, 32, 64, 43, 18)
    first, second = (value_and_grads(x, w, C1_SIZES, dy) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


X, W, SIZES = jnp.ones((6, 3)), jnp.ones((2, 3, 4)), jnp.array([2, 4])
BAD = {
    "expected x": (X[0], W, SIZES),
    "x must be floating": (X.astype(int), W, SIZES),
    "x is bfloat16 and w is float32": (X.astype(jnp.bfloat16), W, SIZES),
    "group_sizes must be integer": (X, W, SIZES.astype(float)),
    "group_sizes has 1 groups, w has 2": (X, W, SIZES[:1]),
    "x has 2 columns, w contracts over 3": (X[:, :2], W, SIZES),
    "negative entry: -1": (X, W, jnp.array([2, -1])),
    "sums to 7, x has only 6 rows": (X, W, jnp.array([3, 4])),
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(*BAD[message])


def test_implementations_that_are_not_here():
    with pytest.raises(NotImplementedError, match="platform 'cpu'"):
        grouped_matmul(X, W, SIZES, implementation="pallas")
