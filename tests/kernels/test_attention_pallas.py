"""Attention kernels against the XLA reference: values, gradients, degenerate rows, lowering."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from kernels_pallas.attention import attention
from kernels_pallas.attention.cases import CASES
from kernels_pallas.attention.gpu import attention_gpu
from kernels_pallas.attention.scores import ScoreSpec, block_bounds
from kernels_pallas.attention.tpu_blocks import choose_blocks, vmem_limit
from kernels_pallas.dispatch import target_platform
from tests.kernels.accelerators import lowering_for

SIZES = (1, 7, 13, 20, 129, 257)
DIMS = (24, 48, 64, 80, 96, 128)
SMALL = [case for case in CASES if case.size == "small"]


def _triton(*args, **options):
    return attention_gpu(*args, **options, interpret=True)


KERNELS = {
    "tpu": functools.partial(attention, return_lse=True, implementation="pallas_interpret"),
    "gpu": _triton,
}
REFERENCE = functools.partial(attention, return_lse=True, implementation="xla")


def _draw(seed, batch, queries, keys, heads, kv_heads, dim, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = [(batch, queries, heads, dim)] + [(batch, keys, kv_heads, dim)] * 2
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _run(function, arrays, bias=None, **options):
    """Output, log-sum-exp and the gradients of a fixed random projection of both."""
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.normal(size=arrays[0].shape), jnp.float32)
    batch, queries, heads, _ = arrays[0].shape
    lse_weight = jnp.asarray(rng.normal(size=(batch, heads, queries)), jnp.float32)

    @jax.jit
    def run(arrays, bias):
        def scalar(arrays, bias):
            named = {} if bias is None else {"bias": bias}
            out, lse = function(*arrays, **named, **options)
            finite = jnp.where(jnp.isfinite(lse), lse, jnp.zeros_like(lse))
            value = jnp.sum(out.astype(jnp.float32) * weight) + jnp.sum(finite * lse_weight)
            return value, (out, lse)

        (_, out), grads = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(arrays, bias)
        return out, grads

    (out, lse), (grads, dbias) = run(arrays, bias)
    return [out, lse, *grads] + ([] if bias is None else [dbias])


def _assert_close(got, expected, dtype):
    scale = 1e-5 if dtype == "float32" else 2.5e-2
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        largest = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
        np.testing.assert_allclose(a, b, rtol=scale, atol=scale * largest)


@st.composite
def _problems(draw):
    heads, kv_heads = draw(st.sampled_from(((1, 1), (2, 2), (9, 3), (8, 1))))
    shape = (
        draw(st.sampled_from((1, 2))),
        draw(st.sampled_from(SIZES)),
        draw(st.sampled_from(SIZES)),
        heads,
        kv_heads,
        draw(st.sampled_from(DIMS)),
    )
    options = draw(
        st.sampled_from(
            (
                {},
                {"causal": True},
                {"window": (5, 2)},
                {"causal": True, "window": (140, None)},
                {"logit_softcap": 2.0, "scale": 0.3},
            )
        )
    )
    extra = draw(st.sampled_from(("none", "segments", "mask", "mask row", "bias", "bias row")))
    return shape, options, extra, draw(st.sampled_from(("float32", "bfloat16")))


def _extras(extra, shape):
    batch, queries, keys, heads = shape[:4]
    rng = np.random.default_rng(1)
    if extra == "segments":
        ids = [np.sort(rng.integers(0, 4, (batch, n)), axis=1) for n in (queries, keys)]
        return {"q_segment_ids": jnp.asarray(ids[0]), "kv_segment_ids": jnp.asarray(ids[1])}
    if extra.startswith("mask"):
        rows = 1 if extra.endswith("row") else queries
        return {"mask": jnp.asarray(rng.random((batch, 1, rows, keys)) < 0.3)}
    if extra.startswith("bias"):
        rows = 1 if extra.endswith("row") else queries
        return {"bias": jnp.asarray(rng.normal(size=(1, heads, rows, keys)), jnp.float32)}
    return {}


def _compare(kernel, problem):
    shape, options, extra, dtype = problem
    arrays = _draw(0, *shape, dtype)
    options = {**options, **_extras(extra, shape)}
    _assert_close(
        _run(KERNELS[kernel], arrays, **options), _run(REFERENCE, arrays, **options), dtype
    )


@pytest.mark.parametrize("kernel", KERNELS)
@hypothesis.settings(max_examples=3)
@hypothesis.given(problem=_problems())
def test_kernel_equals_reference(kernel, problem):
    _compare(kernel, problem)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@hypothesis.settings(max_examples=120)
@hypothesis.given(problem=_problems())
def test_kernel_equals_reference_everywhere(kernel, problem):
    _compare(kernel, problem)


@pytest.mark.parametrize("kernel", KERNELS)
def test_several_blocks_each_way(kernel):
    """Lengths past a block: full blocks, edges of the band on both sides, skipped blocks."""
    arrays = _draw(0, 1, 700, 650, 2, 1, 24)
    options = {"window": (200, 30)}
    _assert_close(
        _run(KERNELS[kernel], arrays, **options), _run(REFERENCE, arrays, **options), "float32"
    )


def test_keys_in_several_stretches(monkeypatch):
    """When the keys don't fit VMEM at once, dq is made in parts and idle stretches are skipped."""
    from kernels_pallas.attention import tpu

    def small(*args, backward, **kwargs):
        blocks = choose_blocks(*args, backward=backward, **kwargs)
        return type(blocks)(128, 128, 256, 128)

    monkeypatch.setattr(tpu, "choose_blocks", small)
    arrays = _draw(0, 2, 300, 700, 2, 1, 24)
    ids = [np.sort(np.random.default_rng(0).integers(0, 5, (2, n)), axis=1) for n in (300, 700)]
    options = {
        "causal": True,
        "q_segment_ids": jnp.asarray(ids[0]),
        "kv_segment_ids": jnp.asarray(ids[1]),
    }
    _assert_close(
        _run(KERNELS["tpu"], arrays, **options), _run(REFERENCE, arrays, **options), "float32"
    )


@pytest.mark.parametrize(
    "kernel,how",
    [("tpu", "mask"), ("tpu", "causal"), ("tpu", "segments"), ("tpu", "bias"), ("gpu", "mask")],
)
def test_row_that_sees_no_key_is_zero(kernel, how):
    """C10: such a row is 0 with log-sum-exp -inf, and poisons no gradient."""
    arrays = _draw(0, 2, 20, 13, 2, 1, 24)
    options = {}
    empty = np.zeros((2, 20), bool)
    if how == "mask":
        mask = np.random.default_rng(0).random((2, 1, 20, 13)) < 0.5
        mask[:, :, 4] = False
        options["mask"] = jnp.asarray(mask)
        empty = ~mask.any(axis=(1, 3))
    elif how == "causal":
        options["causal"] = True
        empty[:, :7] = True
    elif how == "segments":
        options["q_segment_ids"] = jnp.asarray(np.repeat([[1] * 10 + [9] * 10], 2, axis=0))
        options["kv_segment_ids"] = jnp.ones((2, 13), jnp.int32)
        empty[:, 10:] = True
    else:
        bias = np.zeros((2, 1, 20, 13), np.float32)
        bias[:, :, 3] = -np.inf
        options["bias"] = jnp.asarray(bias)
        empty[:, 3] = True
    out, lse, dq, *rest = _run(KERNELS[kernel], arrays, **options)
    assert np.all(np.asarray(out)[empty] == 0.0)
    assert np.all(np.asarray(lse).transpose(0, 2, 1)[empty] == -np.inf)
    assert np.all(np.asarray(dq)[empty] == 0.0)
    assert np.all(np.isfinite(np.asarray(lse).transpose(0, 2, 1)[~empty]))
    assert all(np.all(np.isfinite(x)) for x in (out, dq, *rest))
    _assert_close([out, lse, dq, *rest], _run(REFERENCE, arrays, **options), "float32")


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_no_keys(implementation):
    arrays = [jnp.ones((2, 3, 2, 8)), jnp.ones((2, 0, 1, 8)), jnp.ones((2, 0, 1, 8))]
    out, lse = attention(*arrays, return_lse=True, implementation=implementation)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 2, 8)))
    np.testing.assert_array_equal(lse, np.full((2, 2, 3), -np.inf))


def test_gradient_matches_finite_differences():
    arrays = _draw(0, 1, 5, 7, 2, 1, 8)
    run = functools.partial(
        attention, causal=True, logit_softcap=3.0, implementation="pallas_interpret"
    )
    check_grads(run, arrays, order=1, modes=("rev",), atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeats_bit_by_bit(kernel):
    arrays = _draw(0, 2, 129, 140, 4, 2, 24)
    function = jax.jit(
        jax.grad(lambda *a: jnp.sum(KERNELS[kernel](*a, causal=True)[0] ** 2), argnums=(0, 1, 2))
    )
    for a, b in zip(function(*arrays), function(*arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def test_vmap_and_shard_map_of_one_device():
    arrays = _draw(0, 2, 20, 13, 2, 1, 24)
    run = functools.partial(attention, causal=True, implementation="pallas_interpret")
    expected = run(*arrays)
    stacked = jax.vmap(run)(*(x[:, None] for x in arrays))
    np.testing.assert_allclose(stacked[:, 0], expected, rtol=1e-6, atol=1e-6)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    np.testing.assert_allclose(jax.jit(sharded)(*arrays), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platform,lowering", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_lowers_for_accelerators_on_a_cpu(case, platform, lowering):
    """C12: what interpret mode accepts, the real lowering may not."""
    with lowering_for(platform):
        args = (*case.args, case.cotangents())
        traced = jax.jit(case.vjp("pallas")).trace(*args)
        text = traced.lower(lowering_platforms=(lowering,)).as_text()
    names = ["attention_forward"]
    names += ["attention_backward"] if platform == "tpu" else ["attention_dq", "attention_dkv"]
    if len(case.differentiable) == 4:
        names.append("attention_bias_gradient")
    assert all(name in text for name in names)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dim,itemsize", [(64, 2), (128, 2), (128, 4), (256, 2), (512, 4)])
@pytest.mark.parametrize("length", [1, 129, 4096, 16384, 131072])
def test_blocks_fit_vmem(backward, dim, itemsize, length):
    spec = ScoreSpec(1.0, None, None, 0, 0, length, length)
    for dense in (0, 5):
        blocks = choose_blocks(spec, dim, itemsize, backward=backward, dense_bytes=dense)
        assert blocks.queries % 128 == 0 and blocks.keys % 128 == 0
        assert blocks.key_stretch % blocks.keys == 0
        assert blocks.query_stretch % blocks.queries == 0
        lanes = -(-dim // 128) * 128
        held = blocks.key_stretch * lanes * itemsize * 4
        if backward:
            held = blocks.key_stretch * lanes * (itemsize * 6 + 8)
            held += blocks.query_stretch * lanes * (itemsize * 8 + 4)
        held += 2 * dense * blocks.query_stretch * blocks.key_stretch
        assert held <= vmem_limit() - (8 << 20)


@hypothesis.given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    sides=st.tuples(st.none() | st.integers(0, 12), st.none() | st.integers(0, 12)),
    segments=st.booleans(),
    swap=st.booleans(),
)
def test_block_bounds_hold_every_pair(rows, cols, blocks, sides, segments, swap):
    """Blocks outside the bounds hold no pair that counts; full ones hold no pair that doesn't."""
    spec = ScoreSpec(1.0, None, *sides, cols - rows, rows, cols)
    rng = np.random.default_rng(rows * 41 + cols)
    q_seg, k_seg = (np.sort(rng.integers(0, 3, (2, n)), axis=1) for n in (rows, cols))
    distance = np.arange(cols)[None] - np.arange(rows)[:, None] - spec.offset
    allowed = np.ones((2, rows, cols), bool)
    if sides[0] is not None:
        allowed &= distance >= -sides[0]
    if sides[1] is not None:
        allowed &= distance <= sides[1]
    if segments:
        allowed &= q_seg[:, :, None] == k_seg[:, None, :]
    named = {}
    if segments:
        pair = (k_seg, q_seg) if swap else (q_seg, k_seg)
        named = {"row_segments": jnp.asarray(pair[0]), "col_segments": jnp.asarray(pair[1])}
    if swap:
        allowed = allowed.transpose(0, 2, 1)
    bounds = block_bounds(spec, *blocks, rows_are_queries=not swap, **named)
    for b in range(2):
        for i, row in enumerate(np.asarray(bounds)[b if segments else 0]):
            first, first_full, end_full, end = row
            assert 0 <= first <= first_full <= end_full <= end
            band = allowed[b, i * blocks[0] : (i + 1) * blocks[0]]
            for j in range(-(-allowed.shape[2] // blocks[1])):
                tile = band[:, j * blocks[1] : (j + 1) * blocks[1]]
                if not first <= j < end:
                    assert not tile.any()
                if first_full <= j < end_full:
                    assert tile.all() and tile.shape[1] == blocks[1]


def test_named_implementation_says_why_it_cannot():
    q = jnp.zeros((1, 4, 1, 1024), jnp.float32)
    with pytest.raises(NotImplementedError, match="head_dim 1024"):
        attention(q, q, q, implementation="pallas_interpret")
    q = jnp.zeros((1, 4, 1, 8), jnp.float16)
    with pytest.raises(NotImplementedError, match="float16"):
        attention(q, q, q, implementation="pallas_interpret")
    with target_platform("gpu"), pytest.raises(NotImplementedError, match="head_dim 1024"):
        wide = jnp.zeros((1, 4, 1, 1024), jnp.float32)
        attention(wide, wide, wide, implementation="pallas")
    assert attention(q, q, q).dtype == jnp.float16
