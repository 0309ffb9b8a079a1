"""The XLA attention, which is every kernel's specification, against textbook attention in NumPy."""

from __future__ import annotations

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from kernels_pallas.attention import attention
from kernels_pallas.attention.reference import Masks, attention_xla
from kernels_pallas.attention.scores import make_spec


def textbook(q, k, v, do, dlse, *, bias=None, mask=None, causal=False, window=None, cap=None,
             scale=None, q_ids=None, kv_ids=None):  # fmt: skip
    """Float64 outputs, log-sum-exp and gradients, whole [Tq, Tk] matrices, K and V repeated."""
    q, k, v, do, dlse = (np.asarray(a, np.float64) for a in (q, k, v, do, dlse))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    slope = np.ones_like(s)
    if cap is not None:
        slope = 1 - np.tanh(s / cap) ** 2
        s = cap * np.tanh(s / cap)
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    seen = np.ones(s.shape, bool)
    distance = np.arange(k.shape[1]) - (np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    if causal:
        seen &= distance <= 0
    before, after = window or (None, None)
    if before is not None:
        seen &= distance >= -before
    if after is not None:
        seen &= distance <= after
    if q_ids is not None:
        seen &= (np.asarray(q_ids)[:, :, None] == np.asarray(kv_ids)[:, None, :])[:, None]
    if mask is not None:
        seen &= np.asarray(mask)
    weights = np.where(seen, np.exp(s - s.max(initial=-np.inf, where=seen & np.isfinite(s))), 0.0)
    total = weights.sum(-1, keepdims=True)
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + s.max(initial=-np.inf, where=seen & np.isfinite(s))
    lse = np.where(total[..., 0] > 0, lse, -np.inf)
    out = np.einsum("bhqk,bkhd->bqhd", p, v)

    dp = np.einsum("bqhd,bkhd->bhqk", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
    grads = {"bias": ds}
    if bias is not None:
        ones = tuple(axis for axis in range(4) if np.shape(bias)[axis] == 1)
        grads["bias"] = ds.sum(ones, keepdims=True)
    ds = ds * slope * scale
    grads["q"] = np.einsum("bhqk,bkhd->bqhd", ds, k)

    def shared(a):  # the gradient of repeating heads
        return a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(3)

    grads["k"] = shared(np.einsum("bhqk,bqhd->bkhd", ds, q))
    grads["v"] = shared(np.einsum("bhqk,bqhd->bkhd", p, do))
    return out, lse, grads


def draw(seed, batch=2, queries=13, keys=13, heads=4, kv_heads=2, dim=24, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = [(batch, queries, heads, dim), (batch, keys, kv_heads, dim)]
    shapes += [shapes[1], shapes[0], (batch, heads, queries)]
    return [jnp.asarray(rng.normal(size=s), dtype if len(s) == 4 else "float32") for s in shapes]


@functools.partial(jax.jit, static_argnames=("function", "static"))
def _run(named, options, do, dlse, function, static):
    def call(named):
        return function(**named, **options, **dict(static), return_lse=True)

    (out, lse), pullback = jax.vjp(call, named)
    return out, lse, pullback((do, jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), dlse)))[0]


def run(arrays, bias=None, function=attention, **options):
    """Outputs, log-sum-exp and gradients of ``function`` for the drawn cotangents."""
    q, k, v, do, dlse = arrays
    named = {"q": q, "k": k, "v": v} | ({} if bias is None else {"bias": bias})
    traced = {n: o for n, o in options.items() if isinstance(o, np.ndarray)}
    static = tuple((n, o) for n, o in options.items() if n not in traced)
    return _run(named, traced, do, dlse, function, static)


RENAMED = {"logit_softcap": "cap", "q_segment_ids": "q_ids", "kv_segment_ids": "kv_ids"}


def compare(arrays, bias=None, *, tolerance=2e-5, **options):
    out, lse, grads = run(arrays, bias, **options)
    expected = textbook(*arrays, bias=bias, **{RENAMED.get(n, n): o for n, o in options.items()})
    np.testing.assert_allclose(lse, expected[1], rtol=tolerance, atol=tolerance)
    pairs = [("out", out, expected[0])] + [(n, g, expected[2][n]) for n, g in grads.items()]
    for name, got, want in pairs:
        assert got.shape == want.shape, name
        largest = max(1.0, np.abs(want).max(initial=0.0))
        got = np.asarray(got).astype(np.float64)
        atol = tolerance * largest
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=atol, err_msg=name)
    return out, lse, grads


def ids(seed, batch, length, segments):
    return np.sort(np.random.default_rng(seed).integers(0, segments, (batch, length))).astype("i4")


SHAPES = {
    "one": dict(batch=1, queries=1, keys=1, heads=1, kv_heads=1, dim=24),
    "more_keys": dict(queries=7, keys=13, dim=48),
    "more_queries": dict(queries=13, keys=7, dim=80),
    "blocks": dict(batch=1, queries=129, keys=129, heads=2, kv_heads=1, dim=96),
    "many_blocks": dict(batch=1, queries=257, keys=257, heads=3, kv_heads=1, dim=24),
    "decode": dict(queries=1, keys=257, heads=2, kv_heads=2),
    "tall": dict(batch=1, queries=257, keys=20, heads=2, kv_heads=2, dim=8),
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_causal_shapes(shape):
    """C11: odd sizes, more keys than queries and the reverse (whose first queries see nothing)."""
    compare(draw(0, **SHAPES[shape]), causal=True)


@pytest.mark.parametrize("shape", ("more_keys", "blocks"))
def test_full_shapes(shape):
    compare(draw(0, **SHAPES[shape]))


@pytest.mark.parametrize(
    ("window", "causal"),
    [((3, None), True), ((0, 0), False), ((40, 9), False)],
)
def test_window(window, causal):
    compare(
        draw(1, batch=1, queries=150, keys=140, heads=2, kv_heads=1, dim=8),
        window=window,
        causal=causal,
    )


def test_one_number_is_a_window_on_both_sides():
    q, k, v = draw(2, dim=8)[:3]
    one, both = (str(jax.make_jaxpr(lambda w=w: attention(q, k, v, window=w))()) for w in
                 (2, (2, 2)))  # fmt: skip
    assert one == both != str(jax.make_jaxpr(lambda: attention(q, k, v, window=(2, 1)))())


def test_segments():
    """Packed rows, a row with ids in no order, and queries whose segment has no key."""
    arrays = draw(3, batch=3, queries=140, keys=140, heads=2, kv_heads=1, dim=8)
    q_ids = ids(0, 3, 140, 4)
    q_ids[1] = np.random.default_rng(1).permutation(q_ids[1])
    kv_ids = q_ids.copy()
    kv_ids[2] = 1 + kv_ids[2]
    out, lse, _ = compare(arrays, causal=True, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    lonely = ~np.isin(q_ids[2], kv_ids[2])
    assert lonely.any() and np.isneginf(lse[2][:, lonely]).all()
    assert not np.any(out[2, lonely])


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 70, 90), (1, 1, 1, 1), (2, 1, 1, 90), (1, 4, 70, 1)],
)
def test_bias_of_every_broadcast_shape(shape):
    bias = jnp.asarray(np.random.default_rng(4).normal(size=shape), jnp.float32)
    compare(draw(4, queries=70, keys=90, dim=8), bias, causal=True)


@pytest.mark.parametrize("shape", [(2, 4, 70, 90), (2, 1, 1, 90)])
def test_mask_of_broadcast_shapes(shape):
    mask = np.random.default_rng(5).random(shape) < 0.5
    compare(draw(5, queries=70, keys=90, dim=8), mask=mask)


def test_everything_at_once():
    shape = dict(batch=2, queries=133, keys=140, heads=4, kv_heads=2, dim=16)
    rng = np.random.default_rng(6)
    kv_ids = ids(2, 2, 140, 3)
    compare(
        draw(6, **shape),
        jnp.asarray(rng.normal(size=(1, 4, 133, 140)), jnp.float32),
        mask=rng.random((2, 1, 133, 140)) < 0.7,
        causal=True,
        window=(50, None),
        q_segment_ids=kv_ids[:, 7:],
        kv_segment_ids=kv_ids,
        logit_softcap=1.5,
        scale=0.7,
    )


@hypothesis.settings(max_examples=6)
@hypothesis.given(st.data())
def test_any_blocks(data):
    """Blocks of a few queries and keys in any relation to the lengths and the band."""
    integers = st.integers
    queries, keys = data.draw(integers(1, 12)), data.draw(integers(1, 12))
    kv_heads = data.draw(integers(1, 2))
    shape = dict(queries=queries, keys=keys, heads=2, kv_heads=kv_heads, dim=4)
    side = st.none() | integers(0, 5)
    window, causal = (data.draw(side), data.draw(side)), data.draw(st.booleans())
    blocks = data.draw(integers(1, 5)), data.draw(integers(1, 5))
    arrays = draw(data.draw(integers(0, 9)), **shape)
    options = {"causal": causal, "window": window}
    masks = Masks()
    if data.draw(st.booleans()):
        q_ids, kv_ids = ids(0, 2, queries, 2), ids(1, 2, keys, 2)
        options |= {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
        masks = Masks(jnp.asarray(q_ids), jnp.asarray(kv_ids))
    bias = None
    if data.draw(st.booleans()):
        bias = jnp.linspace(-1, 1, queries * keys).reshape(1, 1, queries, keys)
    spec = make_spec(arrays[0].shape, arrays[1].shape, causal, window, None, None)

    def blocked(q, k, v, bias=None, **_):
        return attention_xla(q, k, v, bias, masks, spec, blocks)

    compare_with = run(arrays, bias, function=blocked)
    out, lse, grads = textbook(
        *arrays, bias=bias, **{RENAMED.get(n, n): o for n, o in options.items()}
    )
    np.testing.assert_allclose(compare_with[0], out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(compare_with[1], lse, rtol=2e-5, atol=2e-5)
    for name, got in compare_with[2].items():
        np.testing.assert_allclose(got, grads[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_float64_to_its_precision_and_by_finite_differences():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(a), jnp.float64) for a in draw(7, queries=7, keys=9)]
        bias = jnp.linspace(-1.0, 1.0, 63).reshape(1, 1, 7, 9)
        options = dict(causal=True, logit_softcap=2.0)
        out, lse, _ = compare(arrays, bias, tolerance=1e-12, **options)
        assert out.dtype == lse.dtype == jnp.float64

        def call(q, k, v, bias):
            return attention(q, k, v, bias=bias, return_lse=True, **options)

        check_grads(call, (*arrays[:3], bias), 1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_bfloat16():
    arrays = draw(8, queries=70, keys=70, dim=32, dtype="bfloat16")
    out, lse, grads = compare(arrays, causal=True, tolerance=2e-2)
    assert lse.dtype == jnp.float32
    assert {a.dtype for a in (out, *grads.values())} == {jnp.dtype(jnp.bfloat16)}


# C10 and its kind: what no key is seen by.
def fully_masked(how):
    arrays = draw(9, queries=70, keys=70, dim=8)
    rows = np.array([0, 3, 65, 69])
    mask = np.ones((2, 1, 70, 70), bool)
    mask[1, :, rows] = False
    if how == "mask":
        return arrays, rows, None, {"mask": mask}
    if how == "bias":
        bias = jnp.asarray(np.where(mask, 0, -np.inf), jnp.float32)
        return arrays, rows, bias, {}
    segments = np.ones((2, 70), np.int32)
    segments[1, rows] = 5
    ones = np.ones_like(segments)
    return arrays, rows, None, {"q_segment_ids": segments, "kv_segment_ids": ones}


@pytest.mark.parametrize("how", ("mask", "bias", "segments"))
def test_fully_masked_rows_give_zero_and_no_gradient(how):
    arrays, rows, bias, options = fully_masked(how)
    out, lse, grads = compare(arrays, bias, **options)
    assert not np.any(out[1, rows])
    assert np.isneginf(lse[1][:, rows]).all()
    assert np.isfinite(lse[0]).all()
    assert not np.any(grads["q"][1, rows])
    assert all(np.isfinite(g).all() for g in grads.values())


def test_masked_rows_do_not_reach_keys_and_values():
    """Their cotangent, however large, changes no gradient."""
    arrays, rows, _, options = fully_masked("mask")
    plain = run(arrays, **options)[2]
    loud = list(arrays)
    loud[3] = arrays[3].at[1, rows].set(1e30)
    for name, got in run(loud, **options)[2].items():
        np.testing.assert_array_equal(got, plain[name], err_msg=name)


def test_nothing_seen_at_all():
    arrays = draw(10, dim=8)
    mask = np.zeros((1, 1, 1, 1), bool)
    out, lse, grads = run(arrays, mask=mask)
    assert not np.any(out) and np.isneginf(lse).all()
    assert not any(np.any(g) for g in grads.values())


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_empty_sides(queries, keys):
    q, k, v = draw(11, queries=queries, keys=keys)[:3]
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and not np.any(out)
    assert lse.shape == (2, 4, queries) and np.isneginf(lse).all()
    grad = jax.grad(lambda q: jnp.sum(attention(q, k, v)))(q)
    assert grad.shape == q.shape and not np.any(grad)


def test_empty_sides_keep_float64():
    with jax.enable_x64(True):
        q = jnp.zeros((1, 2, 1, 4), jnp.float64)
        out, lse = attention(q, q[:, :0], q[:, :0], return_lse=True)
        assert out.dtype == lse.dtype == jnp.float64


def test_logits_of_any_size_stay_finite():
    arrays = draw(12, queries=70, keys=70, dim=8)
    arrays[0] = arrays[0] * 1e4
    out, lse, grads = run(arrays, causal=True)
    assert all(np.isfinite(a).all() for a in (out, lse, *grads.values()))


def test_bitwise_repeatable_and_the_same_under_jit():
    q, k, v = draw(13, queries=129, keys=129, dim=8)[:3]
    call = jax.jit(lambda *a: attention(*a, causal=True))
    np.testing.assert_array_equal(call(q, k, v), call(q, k, v))
    eager = attention(q, k, v, causal=True)
    np.testing.assert_allclose(eager, call(q, k, v), rtol=1e-6, atol=1e-6)


def test_vmap_with_segments_of_their_own():
    """Each mapped call visits other blocks, so the loops' bounds are mapped too."""
    stack = [jnp.stack(a) for a in zip(*(draw(s, queries=140, keys=140, dim=8)[:3] for s in (0, 1)),
                                       strict=True)]  # fmt: skip
    segments = jnp.stack([jnp.asarray(ids(0, 2, 140, 5)), jnp.ones((2, 140), jnp.int32)])

    def call(q, k, v, s):
        def loss(q, k, v):
            out = attention(q, k, v, causal=True, q_segment_ids=s, kv_segment_ids=s)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    mapped = jax.jit(jax.vmap(call))(*stack, segments)
    single = jax.jit(call)
    for i in (0, 1):
        one = single(*(a[i] for a in stack), segments[i])
        for got, want in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5)


def loss_and_grads(length, *, causal):
    """The jitted gradient of attention over packed rows with a bias per key, and its arguments."""
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    segment = jax.ShapeDtypeStruct((1, length), jnp.int32)
    bias = jax.ShapeDtypeStruct((1, 2, 1, length), jnp.float32)

    def loss(q, k, v, bias, s):
        out, lse = attention(
            q, k, v, causal=causal, bias=bias, q_segment_ids=s, kv_segment_ids=s, return_lse=True
        )
        return jnp.sum(out**2) + jnp.sum(lse)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), (x, x, x, bias, segment)


def largest_value(jaxpr):
    """Elements of the largest array that any equation makes, inner jaxprs included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [math.prod(v.aval.shape) for v in equation.outvars]
        sizes += [largest_value(inner) for inner in jaxprs_in_params(equation.params)]
    return max(sizes)


@pytest.mark.parametrize("causal", (False, True))
def test_no_array_of_queries_by_keys(causal):
    length = 2048
    function, args = loss_and_grads(length, causal=causal)
    largest = largest_value(function.trace(*args).jaxpr.jaxpr)
    assert length * 16 <= largest <= length * 32


def test_memory_is_linear_in_length():
    def memory(length):
        function, args = loss_and_grads(length, causal=True)
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    short, long = memory(1024), memory(4096)
    assert long < 4.4 * short
    assert long < 4 * 4096 * 4096 / 8  # an eighth of one float32 [T, T]


def test_implementations_that_are_not_here():
    q, k, v = draw(14)[:3]
    with pytest.raises(NotImplementedError, match="platform 'cpu'"):
        attention(q, k, v, implementation="pallas")
    with pytest.raises(ValueError, match="implementation"):
        attention(q, k, v, implementation="flash")


Q, K = (2, 5, 4, 8), (2, 6, 2, 8)
BAD = {
    "q must be": dict(q=(5, 4, 8)),
    "k has shape": dict(v=(2, 7, 2, 8)),
    "batch and head dim": dict(k=(2, 6, 2, 4), v=(2, 6, 2, 4)),
    "no multiple": dict(k=(2, 6, 3, 8), v=(2, 6, 3, 8)),
    "bias must broadcast": dict(bias=jnp.zeros((2, 4, 5, 5))),
    "mask must broadcast": dict(mask=jnp.ones((5, 6), bool)),
    "mask must be bool": dict(mask=jnp.ones((1, 1, 5, 6))),
    "not be negative": dict(window=(-1, None)),
    "give both": dict(q_segment_ids=jnp.zeros((2, 5), jnp.int32)),
    "kv_segment_ids must be": dict(
        q_segment_ids=jnp.zeros((2, 5), jnp.int32), kv_segment_ids=jnp.zeros((2, 5), jnp.int32)
    ),
    "must be integer": dict(q_segment_ids=jnp.zeros((2, 5)), kv_segment_ids=jnp.zeros((2, 6))),
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_arguments(message):
    call = {"q": Q, "k": K, "v": K} | BAD[message]
    call = {n: jnp.zeros(a) if isinstance(a, tuple) and n in "qkv" else a for n, a in call.items()}
    with pytest.raises(ValueError, match=message):
        attention(**call)


def test_dtypes_must_agree_and_be_floating():
    q, k = jnp.zeros(Q), jnp.zeros(K)
    with pytest.raises(ValueError, match="k is bfloat16, q is float32"):
        attention(q, k.astype(jnp.bfloat16), k)
    with pytest.raises(ValueError, match="floating"):
        attention(q.astype(jnp.int32), k, k)
