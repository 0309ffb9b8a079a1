"""The grouped-matmul kernels: interpret mode against a loop over groups, and lowering on a CPU."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.cases import CASES
from kernels_pallas.grouped_matmul.gpu import grouped_matmul_gpu
from kernels_pallas.grouped_matmul.tpu import grouped_matmul_tpu
from kernels_pallas.grouped_matmul.tpu_blocks import forward_blocks, weight_blocks
from kernels_pallas.grouped_matmul.visits import (
    halves_of_rows,
    output_visits,
    split_visits,
    weight_visits,
)
from tests.kernels.accelerators import lowering_for

SIZES = (1, 7, 13, 20, 129, 257)
SMALL = [case for case in CASES if case.size == "small"]


def _tpu(x, w, sizes, transpose_w=False):
    return grouped_matmul_tpu(x, w, sizes, transpose_w=transpose_w, interpret=True)


def _gpu(x, w, sizes, transpose_w=False):
    return grouped_matmul_gpu(x, w, sizes, transpose_w=transpose_w, interpret=True)


def _expected(x, w, sizes, dy, transpose_w):
    """Values and gradients by a loop over groups in float64."""
    x, w, dy = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    first = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(first, first + int(size))
        matrix = w[group].T if transpose_w else w[group]
        y[rows] = x[rows] @ matrix
        dx[rows] = dy[rows] @ matrix.T
        dw[group] = dy[rows].T @ x[rows] if transpose_w else x[rows].T @ dy[rows]
        first += int(size)
    return y, dx, dw


@functools.cache
def _jitted(function, transpose_w):
    @jax.jit
    def run(x, w, sizes, dy):
        y, pullback = jax.vjp(lambda x, w: function(x, w, sizes, transpose_w), x, w)
        return y, *pullback(dy)

    return run


def _run(function, x, w, sizes, dy, transpose_w):
    return _jitted(function, transpose_w)(x, w, sizes, dy)


def _assert_close(got, expected, dtype):
    tolerance = 1e-5 if dtype == "float32" else 8e-3
    for a, b in zip(got, expected, strict=True):
        a = np.asarray(a.astype(jnp.float32))
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), 1))


def _group_sizes(rng, rows, groups, kind):
    if kind == "one":
        return np.where(np.arange(groups) == rng.integers(groups), rows, 0)
    if kind == "none":
        return np.zeros(groups)
    used = rows if kind == "all" else rng.integers(0, rows + 1)
    return rng.multinomial(used, rng.dirichlet(np.full(groups, 0.5)))


@hypothesis.settings(max_examples=6, derandomize=True, deadline=None)
@hypothesis.given(
    rows=st.sampled_from((*SIZES, 1030)),
    inner=st.sampled_from((1, 24, 80, 129)),
    outer=st.sampled_from((1, 13, 48, 128)),
    groups=st.sampled_from((1, 2, 7, 18)),
    kind=st.sampled_from(("one", "none", "all", "short")),
    dtype=st.sampled_from(("float32", "bfloat16")),
    transpose_w=st.booleans(),
    function=st.sampled_from((_tpu, _gpu)),
)
def test_kernels_equal_a_loop_over_groups(
    rows, inner, outer, groups, kind, dtype, transpose_w, function
):
    rng = np.random.default_rng(rows + inner)
    sizes = _group_sizes(rng, rows, groups, kind)
    x = jnp.asarray(rng.normal(size=(rows, inner)), dtype)
    w_shape = (groups, outer, inner) if transpose_w else (groups, inner, outer)
    w = jnp.asarray(rng.normal(size=w_shape), dtype)
    dy = jnp.asarray(rng.normal(size=(rows, outer)), dtype)
    given_sizes = jnp.asarray(sizes, jnp.int32)
    expected = _expected(x, w, sizes, dy, transpose_w)
    # Rows that belong to no group may hold anything.
    used = jnp.arange(rows)[:, None] < int(sizes.sum())
    x, dy_dirty = (jnp.where(used, a, jnp.full_like(a, jnp.nan)) for a in (x, dy))
    got = _run(function, x, w, given_sizes, dy_dirty, transpose_w)
    _assert_close(got, expected, dtype)
    empty = np.asarray(sizes) == 0
    assert not np.asarray(got[2].astype(jnp.float32))[empty].any()


@pytest.mark.parametrize("function", [_tpu, _gpu])
def test_blocks_in_all_three_dimensions(function, monkeypatch):
    """Tiles that are cut by groups, ragged blocks, and the inner dimension in several steps."""
    from kernels_pallas.grouped_matmul import gpu, tpu_blocks

    monkeypatch.setattr(tpu_blocks, "_PIPELINE_BUDGET", 3 << 18)
    monkeypatch.setattr(tpu_blocks, "_PARTS_BUDGET", 0)
    blocks = forward_blocks(700, 300, 200, 3, 4, 4, 4)
    assert blocks.rows < 700 and blocks.inner < 300
    assert weight_blocks(700, 300, 200, 3, 4, 4, 4).inner < 300
    assert gpu._blocks("grouped_matmul", 700, 300, 200, 3, 4)["inner"] < 300
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in ((700, 300), (3, 300, 200), (700, 200))
    )
    for sizes in ([200, 0, 450], [1, 698, 1], [128, 256, 128]):
        got = _run(function, x, w, jnp.asarray(sizes, jnp.int32), dy, False)
        _assert_close(got, _expected(x, w, sizes, dy, False), "float32")


@pytest.mark.parametrize(
    "dtype,budget,transpose_w", [("float32", 720_000, True), ("bfloat16", 450_000, False)]
)
def test_operands_that_move_in_parts(dtype, budget, transpose_w, monkeypatch):
    """One matrix in VMEM at a time, and the weights' gradient through a small buffer."""
    from kernels_pallas.grouped_matmul import tpu_blocks

    monkeypatch.setattr(tpu_blocks, "_COPY", 128)
    monkeypatch.setattr(tpu_blocks, "_PIPELINE_BUDGET", budget)
    rows, inner, outer, groups = 700, 256, 512, 3
    widths = [jnp.dtype(dtype).itemsize] * 3
    for k, n in ((inner, outer), (outer, inner)):
        assert forward_blocks(rows, k, n, groups, *widths).copy == 128
        assert weight_blocks(rows, k, n, groups, *widths).copy == 128
    rng = np.random.default_rng(0)
    w_shape = (groups, outer, inner) if transpose_w else (groups, inner, outer)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((rows, inner), w_shape, (rows, outer))
    )

    @jax.jit
    def run(x, w, sizes, dy):
        y, pullback = jax.vjp(lambda x, w: _tpu(x, w, sizes, transpose_w), x, w)
        return y, *pullback(dy)

    for sizes in ([200, 0, 450], [0, 0, 0], [0, 700, 0], [1, 698, 1], [384, 0, 316], [0, 3, 0]):
        # Rows past the groups are NaN, and so is what interpret mode has past the last tile.
        used = jnp.arange(rows)[:, None] < sum(sizes)
        x_given, dy_given = (jnp.where(used, a, jnp.full_like(a, jnp.nan)) for a in (x, dy))
        got = run(x_given, w, jnp.asarray(sizes, jnp.int32), dy_given)
        _assert_close(got, _expected(x, w, sizes, dy, transpose_w), dtype)
        empty = np.asarray(sizes) == 0
        assert not np.asarray(got[2].astype(jnp.float32))[empty].any()
        again = run(x_given, w, jnp.asarray(sizes, jnp.int32), dy_given)
        for a, b in zip(got, again, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function", [_tpu, _gpu])
def test_complaint_c1_empty_groups_get_exact_zeros(function):
    """18 groups, K=64, N=43, M=32, all rows in groups 0-5 (tokamax issue 887)."""
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((32, 64), (18, 64, 43), (32, 43))
    )
    sizes = jnp.asarray([3, 9, 1, 7, 10, 2] + [0] * 12, jnp.int32)
    y, dx, dw = _run(function, x, w, sizes, dy, False)
    np.testing.assert_array_equal(dw[6:], np.zeros((12, 64, 43)))
    reference, pullback = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
    for a, b in zip((y, dx, dw), (reference, *pullback(dy)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [_tpu, _gpu])
def test_sizes_under_jit_are_clipped(function):
    x, w = jnp.ones((10, 4)), jnp.ones((3, 4, 5)) * jnp.arange(1.0, 4.0)[:, None, None]
    y = jax.jit(function)(x, w, jnp.asarray([4, -2, 100], jnp.int32))
    np.testing.assert_allclose(y[:, 0], [4] * 4 + [12] * 6)


def test_mixed_dtypes_promote():
    x, w = jnp.ones((10, 4), jnp.bfloat16), jnp.ones((2, 4, 5), jnp.float32)
    sizes = jnp.asarray([4, 5], jnp.int32)
    y, dx, dw = _run(_tpu, x, w, sizes, jnp.ones((10, 5)), False)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(y[:, 0], [4] * 9 + [0])


@pytest.mark.parametrize("height", [1, 8, 128])
def test_visits_cover_every_row_once(height):
    rng = np.random.default_rng(height)
    rows, groups = {1: (13, 3), 8: (300, 6), 128: (257, 5)}[height]
    tables = jax.jit(lambda s: (output_visits(s, rows, height), weight_visits(s, rows, height)))
    for _ in range(20):
        sizes = rng.multinomial(rng.integers(0, rows + 1), rng.dirichlet(np.full(groups, 0.5)))
        visits, order = jax.tree.map(np.asarray, tables(jnp.asarray(sizes)))
        owner = np.full(rows, -1)
        ends = np.cumsum(sizes)
        assert (np.diff(visits[0]) >= 0).all()
        for tile, group, start, end in zip(*visits, strict=True):
            low, high = max(start, tile * height), min(end, (tile + 1) * height, rows)
            if low < high:
                assert (owner[low:high] == -1).all()
                assert ends[group] - sizes[group] <= low and high <= ends[group]
                owner[low:high] = group
        np.testing.assert_array_equal(owner[: ends[-1]], np.repeat(np.arange(groups), sizes))
        assert (owner[ends[-1] :] == -1).all()
        assert set(order.group) == set(range(groups)) and (np.diff(order.group) >= 0).all()


def test_big_blocks_fit_and_read_little():
    for case in CASES:
        if case.size == "small":
            continue
        x, w = case.args[:2]
        groups, inner, outer = w.shape
        width = x.dtype.itemsize
        blocks = forward_blocks(x.shape[0], inner, outer, groups, width, width, width)
        assert blocks.bytes_accessed <= 1.25 * case.min_bytes, case.name
        moved = forward_blocks(x.shape[0], outer, inner, groups, width, width, width).bytes_accessed
        moved += weight_blocks(x.shape[0], inner, outer, groups, width, width, width).bytes_accessed
        assert moved <= 1.25 * case.vjp_min_bytes, case.name


def test_public_function_runs_the_kernel_and_names_what_it_cannot_take():
    x, w, sizes = jnp.ones((6, 3)), jnp.ones((2, 3, 4)), jnp.asarray([2, 3], jnp.int32)
    y = grouped_matmul(x, w, sizes, implementation="pallas_interpret")
    np.testing.assert_allclose(y, grouped_matmul(x, w, sizes, implementation="xla"))
    with pytest.raises(NotImplementedError, match="grouped_matmul"):
        grouped_matmul(x, w, sizes, implementation="pallas")
    with pytest.raises(NotImplementedError, match="empty"):
        grouped_matmul(x[:0], w, sizes * 0, implementation="pallas_interpret")


@pytest.mark.parametrize("case", SMALL[2:4], ids=lambda case: case.name)
def test_two_runs_agree_bit_for_bit(case):
    args = [jnp.asarray(a) for a in case.draw(np.random.default_rng(0))]
    run = jax.jit(case.vjp("pallas_interpret"))
    g = jnp.ones((args[0].shape[0], case.cotangents().shape[1]), args[0].dtype)
    for a, b in zip(run(*args, g), run(*args, g), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", [[5, 0, 9, 2], [0, 0, 0, 16], [16, 0, 0, 0], [1] * 4, [0] * 4])
@pytest.mark.parametrize("rows", [16, 17, 24, 40])
def test_visits_of_two_halves_cover_every_row_once(sizes, rows):
    """Each row is multiplied by its group's matrix once; the halves share no tile of 8 rows."""
    parts = halves_of_rows(rows, 8)
    visits = jax.device_get(split_visits(jnp.asarray(sizes, jnp.int32), rows, 8, parts))
    turns = len(visits.tile) // len(parts)
    assert len(parts) == 2 and parts[0][1] == parts[1][0] and parts[1][1] == rows
    seen = np.full(rows, -1)
    for number, (tile, group, start, end) in enumerate(zip(*visits, strict=True)):
        first, past = parts[number // turns]
        assert first // 8 <= tile < -(-past // 8)
        own = range(max(start, tile * 8), min(end, tile * 8 + 8))
        assert all(seen[row] == -1 for row in own)
        seen[list(own)] = group
    expected = np.repeat(np.arange(4), sizes)
    np.testing.assert_array_equal(seen[: len(expected)], expected)
    assert (seen[len(expected) :] == -1).all()


@pytest.mark.parametrize("platform,lowering", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_lowers_for_accelerators_on_a_cpu(case, platform, lowering):
    with lowering_for(platform):
        traced = jax.jit(case.vjp("pallas")).trace(*case.args, case.cotangents())
        text = traced.lower(lowering_platforms=(lowering,)).as_text()
        assert "grouped_matmul_weights" in text
        traced = jax.jit(case.forward("pallas")).trace(*case.args)
        text = traced.lower(lowering_platforms=(lowering,)).as_text()
        assert "grouped_matmul_" in text
