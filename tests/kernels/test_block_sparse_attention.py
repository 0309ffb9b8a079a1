"""Block-sparse attention: golden vectors, kernels against dense attention, patterns, lowering."""

from __future__ import annotations

import functools
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas.block_sparse_attention import BlockPattern, block_sparse_attention
from kernels_pallas.block_sparse_attention.cases import CASES
from kernels_pallas.block_sparse_attention.gpu import block_sparse_gpu
from tests.kernels.accelerators import lowering_for

VECTORS = pathlib.Path(__file__).parents[1] / "vectors" / "quantsparse_kernels.npz"
SIZES = (1, 7, 13, 20, 129, 257)
DIMS = (24, 48, 64, 80, 96, 128)
SMALL = [case for case in CASES if case.size == "small"]


def _triton(q, k, v, pattern, qk_bits=16):
    return block_sparse_gpu(q, k, v, pattern, qk_bits, interpret=True)


XLA = functools.partial(block_sparse_attention, return_lse=True, implementation="xla")
KERNELS = {
    "tpu": functools.partial(
        block_sparse_attention, return_lse=True, implementation="pallas_interpret"
    ),
    "gpu": _triton,
}
EVERY = {"xla": XLA, **KERNELS}


def _dense(q, k, v, mask):
    """The definition, in float32, differentiated by JAX."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    mask = jnp.broadcast_to(mask, (*q.shape[:3], q.shape[2]))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    s = jnp.where(mask, s, -1e30)
    top = jax.lax.stop_gradient(s.max(axis=-1, keepdims=True))
    weight = jnp.where(mask, jnp.exp(s - top), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out = jnp.einsum("bhqk,bhkd->bhqd", weight / total, v, precision="highest")
    return out, jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0]


def _draw(seed, batch, heads, length, dim, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(batch, heads, length, dim)), dtype) for _ in range(3)]


def _run(function, arrays, *args, **options):
    """Output, log-sum-exp and the gradients of a fixed random projection of both."""
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.normal(size=arrays[0].shape), jnp.float32)
    lse_weight = jnp.asarray(rng.normal(size=arrays[0].shape[:3]), jnp.float32)

    @jax.jit
    def run(arrays):
        def scalar(arrays):
            out, lse = function(*arrays, *args, **options)
            finite = jnp.where(jnp.isfinite(lse), lse, jnp.zeros_like(lse))
            value = jnp.sum(out.astype(jnp.float32) * weight) + jnp.sum(finite * lse_weight)
            return value, (out, lse)

        (_, out), grads = jax.value_and_grad(scalar, has_aux=True)(arrays)
        return [*out, *grads]

    return run(arrays)


def _assert_close(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        largest = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def _mask(kind, heads, length):
    rng = np.random.default_rng(length)
    if kind == "full":
        return np.ones((length, length), bool)
    if kind == "per head":
        return rng.random((heads, length, length)) < 0.02
    mask = rng.random((length, length)) < 0.02
    if kind == "empty":
        mask[:, length // 2 :] = False
        mask[length // 3 :] = False
    return mask


PROBLEMS = st.tuples(
    st.sampled_from((1, 2)),
    st.sampled_from((1, 3)),
    st.sampled_from(SIZES),
    st.sampled_from(DIMS),
    st.sampled_from(("full", "sparse", "empty", "per head")),
    st.sampled_from(("float32", "bfloat16")),
)


def _compare(name, problem):
    batch, heads, length, dim, kind, dtype = problem
    arrays = _draw(0, batch, heads, length, dim, dtype)
    mask = _mask(kind, heads, length)
    pattern = BlockPattern.from_mask(mask, 128)
    expected = _run(_dense, arrays, jnp.asarray(mask))
    _assert_close(
        _run(EVERY[name], arrays, pattern), expected, 1e-5 if dtype == "float32" else 2.5e-2
    )


@pytest.mark.parametrize("name", EVERY)
@hypothesis.settings(max_examples=3)
@hypothesis.given(problem=PROBLEMS)
def test_equals_dense_attention(name, problem):
    _compare(name, problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@hypothesis.settings(max_examples=80)
@hypothesis.given(problem=PROBLEMS)
def test_equals_dense_attention_everywhere(name, problem):
    _compare(name, problem)


@pytest.mark.parametrize("name", EVERY)
def test_golden_masked_and_full_attention(name):
    stored = np.load(VECTORS)
    arrays = [jnp.asarray(stored[f"a/{x}"], jnp.float32)[None] for x in "QKV"]
    mask = np.unpackbits(stored["a/M"], axis=-1).astype(bool)[..., : stored["a/Q"].shape[1]]
    run = jax.jit(lambda *a: EVERY[name](*a)[0])
    for chosen, expected in ((mask, "a/sparse"), (np.ones_like(mask), "a/full")):
        out = run(*arrays, BlockPattern.from_mask(chosen, 128))
        np.testing.assert_allclose(out[0], stored[expected], rtol=1e-5, atol=1e-5)


def test_golden_in_float64():
    stored = np.load(VECTORS)
    mask = np.unpackbits(stored["a/M"], axis=-1).astype(bool)[..., : stored["a/Q"].shape[1]]
    with jax.enable_x64(True):
        arrays = [jnp.asarray(stored[f"a/{x}"])[None] for x in "QKV"]
        for block in (5, 8, 128):
            out, lse = XLA(*arrays, BlockPattern.from_mask(mask, block))
            assert out.dtype == lse.dtype == jnp.float64
            np.testing.assert_allclose(out[0], stored["a/sparse"], rtol=1e-6, atol=1e-9)


def test_golden_bands():
    """The Wan band with its sink and the Hunyuan band with its text, element by element."""
    stored = np.load(VECTORS)
    frames, per_frame, _ = (int(x) for x in stored["svg/args_wan"])
    for n in range(2):
        width = float(stored["svg/width_wan"][n])
        half = int(np.ceil(width * per_frame / 128) * 128)
        for block in (128, 96):
            pattern = BlockPattern.band(frames * per_frame, half, sink=per_frame, block=block)
            mask = np.unpackbits(stored[f"svg/wan_band{n}"], axis=1).astype(bool)
            np.testing.assert_array_equal(pattern.to_mask()[0], mask)
            assert pattern.density() == pytest.approx(float(stored[f"svg/wan_band{n}_density"]))
    context, prompt = int(stored["svg/ctx_hy"]), int(stored["svg/hy_prompt_len"])
    half = int(np.floor(float(stored["svg/width_hy"][0]) * per_frame / 128) * 128)
    length = frames * per_frame + context
    pattern = BlockPattern.band(length, half - 1, context=context, prompt=prompt)
    mask = np.unpackbits(stored["svg/hy_band0"], axis=1).astype(bool)[:, :length]
    np.testing.assert_array_equal(pattern.to_mask()[0], mask)


def test_worked_example():
    q = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]
    v = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])[None, None]
    mask = np.asarray([[1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    out = block_sparse_attention(q, q, v, BlockPattern.from_mask(mask))
    expected = [[1.0, 0.0], [0.330238, 0.669762], [0.0, 0.0]]
    np.testing.assert_allclose(out[0, 0], expected, atol=1e-6)


INT8_PROBLEM = (_draw(0, 1, 2, 257, 64), BlockPattern.band(257, 50, sink=9))


@functools.cache
def _int8_references():
    arrays, pattern = INT8_PROBLEM
    return _run(XLA, arrays, pattern), XLA(*arrays, pattern, qk_bits=8)


@pytest.mark.parametrize("name", EVERY)
def test_int8_codes(name):
    """Near the 16-bit output, with the 16-bit gradient, and alike on every backend."""
    arrays, pattern = INT8_PROBLEM
    exact, same = _int8_references()
    coded = _run(EVERY[name], arrays, pattern, qk_bits=8)
    assert 1e-5 < float(jnp.abs(coded[0] - exact[0]).max()) < 3e-2
    np.testing.assert_allclose(coded[1], exact[1], atol=3e-2)
    for a, b in zip(coded[2:], exact[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # The mean of the keys is summed in another order: a code may fall to the other side.
    for a, b in zip(coded[:2], same, strict=True):
        assert np.abs(np.asarray(a - b)).max() < 2e-3
        assert np.quantile(np.abs(np.asarray(a - b)), 0.9) < 1e-5


def test_int8_is_blind_to_a_shift_of_the_keys():
    q, k, v = _draw(0, 1, 2, 40, 24)
    pattern = BlockPattern.band(40, 9)
    shift = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 1, 24)), jnp.float32)
    for bits in (8, 16):
        plain = XLA(q, k, v, pattern, qk_bits=bits)[0]
        moved = XLA(q, k + 4 * shift, v, pattern, qk_bits=bits)[0]
        # Codes at the edge between two integers may fall either way.
        np.testing.assert_allclose(moved, plain, atol=2e-5 if bits == 16 else 2e-2)


@pytest.mark.parametrize("name", KERNELS)
def test_keys_in_several_stretches_and_tiles_from_main_memory(name, monkeypatch):
    """Many different tiles, and on TPU more keys than VMEM takes."""
    from kernels_pallas.block_sparse_attention import tpu, tpu_backward, tpu_lists

    monkeypatch.setattr(tpu_lists, "TILE_BYTES", 1 << 14)
    monkeypatch.setattr(tpu, "_stretch_blocks", lambda *_: 2)
    monkeypatch.setattr(tpu_backward, "_LIST_BYTES", 1)
    rng = np.random.default_rng(0)
    mask = rng.random((1200, 1200)) < 0.004
    mask[:, 256:640] = False
    mask[130:300] = False
    mask[:128, :128] = True
    arrays = _draw(0, 1, 1, 1200, 24)
    pattern = BlockPattern.from_mask(mask)
    got = _run(EVERY[name], arrays, pattern)
    _assert_close(got, _run(_dense, arrays, jnp.asarray(mask)), 1e-5)
    # The codes then come from XLA, as those of the reference do.
    for a, b in zip(
        EVERY[name](*arrays, pattern, qk_bits=8), XLA(*arrays, pattern, qk_bits=8), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length,keys", [(1200, 16), (2500, 16)])
def test_gradients_of_keys_leave_in_slices(length, keys, monkeypatch):
    """One stretch longer than the sequence, and two of which the second is mostly empty."""
    from kernels_pallas.block_sparse_attention import tpu_backward

    monkeypatch.setattr(tpu_backward, "_QUERIES", 512)
    monkeypatch.setattr(tpu_backward, "_SLICE", 512)
    monkeypatch.setattr(tpu_backward, "vmem_limit", lambda: 10 << 20)
    pattern = BlockPattern.band(length, 90, sink=30)
    assert tpu_backward._sizes(pattern, 24, 4) == (keys, 4, 4)
    arrays = _draw(0, 1, 2, length, 24)
    run = functools.partial(_run, KERNELS["tpu"], arrays, pattern)
    got = run()
    _assert_close(got, _run(XLA, arrays, pattern), 1e-5)
    for a, b in zip(got, run(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", KERNELS)
def test_repeats_bit_by_bit(name):
    arrays = _draw(0, 2, 2, 257, 24)
    pattern = BlockPattern.band(257, 30, sink=5)
    run = jax.jit(
        jax.grad(lambda *a: jnp.sum(KERNELS[name](*a, pattern)[0] ** 2), argnums=(0, 1, 2))
    )
    for a, b in zip(run(*arrays), run(*arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def test_permuting_tokens_permutes_the_output():
    arrays = _draw(0, 1, 2, 33, 8)
    mask = np.random.default_rng(0).random((33, 33)) < 0.3
    order = np.random.default_rng(1).permutation(33)
    plain = XLA(*arrays, BlockPattern.from_mask(mask, 16))[0]
    moved = XLA(
        *(x[:, :, order] for x in arrays), BlockPattern.from_mask(mask[order][:, order], 16)
    )[0]
    np.testing.assert_allclose(moved, plain[:, :, order], rtol=1e-5, atol=1e-5)


def test_pattern_goes_through_jit_vmap_and_shard_map():
    arrays = _draw(0, 2, 2, 40, 8)
    pattern = BlockPattern.band(40, 6, block=16)
    expected = XLA(*arrays, pattern)[0]
    run = jax.jit(functools.partial(block_sparse_attention, implementation="xla"))
    np.testing.assert_allclose(run(*arrays, pattern), expected, rtol=1e-6, atol=1e-6)
    stacked = jax.vmap(lambda *a: run(*a, pattern))(*(x[:, None] for x in arrays))
    np.testing.assert_allclose(stacked[:, 0], expected, rtol=1e-6, atol=1e-6)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        lambda *a: run(*a, pattern), mesh=mesh, in_specs=P("data"), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(sharded)(*arrays), expected, rtol=1e-6, atol=1e-6)


@hypothesis.given(
    length=st.integers(1, 60),
    block=st.integers(1, 20),
    maps=st.sampled_from((None, 1, 3)),
    share=st.sampled_from((0.0, 0.02, 0.5, 1.0)),
)
def test_pattern_stands_for_its_mask(length, block, maps, share):
    rng = np.random.default_rng(length * 61 + block)
    mask = rng.random((length, length) if maps is None else (maps, length, length)) < share
    pattern = BlockPattern.from_mask(mask, block)
    full = mask.reshape(-1, length, length)
    np.testing.assert_array_equal(pattern.to_mask(), full)
    assert pattern.density() == pytest.approx(full.mean())
    assert pattern.kv_count.sum() == pattern.q_count.sum()
    for h, j in np.ndindex(*pattern.q_count.shape):
        for i in pattern.q_index[h, j, : pattern.q_count[h, j]]:
            assert j in pattern.kv_index[h, i, : pattern.kv_count[h, i]]


@hypothesis.given(
    length=st.integers(1, 70),
    half=st.integers(-1, 30),
    sink=st.integers(0, 20),
    context=st.integers(0, 12),
    padding=st.integers(0, 5),
    block=st.sampled_from((1, 7, 16, 32)),
)
def test_band_equals_its_mask(length, half, sink, context, padding, block):
    context, sink = min(context, length), min(sink, length)
    prompt = max(0, context - padding)
    pattern = BlockPattern.band(
        length, half, sink=sink, context=context, prompt=prompt, block=block
    )
    body, real = length - context, length - context + prompt
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    seen = (q < body) & (k < body) & (np.abs(q - k) <= half)
    seen |= ((q >= body) | (k >= body)) & (q < real) & (k < real)
    seen |= (q >= real) & (k >= real) | (k < sink) & (q < real)
    np.testing.assert_array_equal(pattern.to_mask()[0], seen)


@pytest.mark.parametrize("platform,lowering", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_lowers_for_accelerators_on_a_cpu(case, platform, lowering):
    """C12: what interpret mode accepts, the real lowering may not."""
    with lowering_for(platform):
        args = (*case.args, case.cotangents())
        traced = jax.jit(case.vjp("pallas")).trace(*args)
        text = traced.lower(lowering_platforms=(lowering,)).as_text()
        assert "block_sparse_forward" in text
        backward = ["block_sparse_backward"]
        if platform == "gpu":
            backward = ["block_sparse_dq", "block_sparse_dkv"]
        assert all(name in text for name in backward)
        text = jax.jit(case.forward("pallas")).trace(*case.args)
        assert "block_sparse_forward" in text.lower(lowering_platforms=(lowering,)).as_text()


def test_bad_input_names_the_argument():
    q = jnp.zeros((1, 2, 40, 8))
    pattern = BlockPattern.band(40, 3)
    with pytest.raises(ValueError, match="^q:"):
        block_sparse_attention(q[0], q, q, pattern)
    with pytest.raises(ValueError, match="^q:.*int32"):
        block_sparse_attention(q.astype(jnp.int32), q, q, pattern)
    with pytest.raises(ValueError, match="^k:"):
        block_sparse_attention(q, q[:, :1], q, pattern)
    with pytest.raises(ValueError, match="^v:"):
        block_sparse_attention(q, q, q.astype(jnp.bfloat16), pattern)
    with pytest.raises(ValueError, match="^pattern:.*40.*24"):
        block_sparse_attention(q[:, :, :24], q[:, :, :24], q[:, :, :24], pattern)
    with pytest.raises(ValueError, match="^pattern:.*maps"):
        three = BlockPattern.from_mask(np.ones((3, 40, 40), bool))
        block_sparse_attention(q, q, q, three)
    with pytest.raises(ValueError, match="^pattern:.*ndarray"):
        block_sparse_attention(q, q, q, np.ones((40, 40), bool))
    with pytest.raises(ValueError, match="^qk_bits:.*4"):
        block_sparse_attention(q, q, q, pattern, qk_bits=4)
    with pytest.raises(ValueError, match="^mask:.*float"):
        BlockPattern.from_mask(np.ones((4, 4)))
    with pytest.raises(ValueError, match="^mask:.*square|^mask:.*expected"):
        BlockPattern.from_mask(np.ones((4, 5), bool))
    with pytest.raises(ValueError, match="^mask:.*traced"):
        jax.jit(lambda m: BlockPattern.from_mask(m).kv_index)(np.ones((4, 4), bool))
    with pytest.raises(ValueError, match="^block:"):
        BlockPattern.from_mask(np.ones((4, 4), bool), 0)
    with pytest.raises(ValueError, match="^length:"):
        BlockPattern.band(0, 3)
    with pytest.raises(ValueError, match="prompt"):
        BlockPattern.band(10, 3, context=2, prompt=3)
    with pytest.raises(NotImplementedError, match="pattern block 16"):
        block_sparse_attention(
            q, q, q, BlockPattern.band(40, 3, block=16), implementation="pallas_interpret"
        )


def test_empty_batch():
    q = jnp.zeros((0, 2, 40, 8))
    out, lse = block_sparse_attention(q, q, q, BlockPattern.band(40, 3), return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 2, 40)
