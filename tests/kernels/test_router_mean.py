"""router_mean: golden vectors, kernels against the reference, degenerate input, bad input."""

from __future__ import annotations

import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.router_mean import gpu, reference, router_mean
from kernels_pallas.router_mean.cases import CASES
from tests.kernels.accelerators import lowering_for

VECTORS = pathlib.Path(__file__).parents[1] / "vectors" / "router_mean.npz"
SIZES = (1, 7, 13, 20, 129, 257)
SMALL = [case for case in CASES if case.size == "small"]


def _plain(logits, mask, segment_ids=None, num_segments=None):
    """The formula as written, differentiated by JAX."""
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    square = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2
    w = mask.astype(jnp.float32)
    if segment_ids is None:
        member = w[..., None]
    else:
        ids = jnp.arange(1, num_segments + 1, dtype=segment_ids.dtype)
        member = w[..., None] * (segment_ids[..., None] == ids[None, None]).astype(jnp.float32)
    total = jnp.sum(member, axis=1)
    mean = jnp.sum(member[..., None] * p[:, :, None], axis=1)
    mean = mean / jnp.maximum(total, jnp.float32(1))[..., None]
    z = jnp.sum(member * square[..., None], axis=1)
    return (mean[:, 0], total[:, 0], z[:, 0]) if segment_ids is None else (mean, total, z)


def _draw(rng, rows, tokens, experts, segments, dtype):
    logits = jnp.asarray(rng.normal(size=(rows, tokens, experts)) * 3, dtype)
    mask = jnp.asarray(rng.random((rows, tokens)) < 0.7)
    if segments is None:
        return (logits, mask), {}
    ids = jnp.asarray(rng.integers(0, segments + 2, (rows, tokens)), jnp.int32)
    return (logits, mask), {"segment_ids": ids, "num_segments": segments}


def _run(function, logits, *args, **kwargs):
    """Values, and the gradient of a fixed random projection of mean and z-loss."""
    shapes = jax.eval_shape(lambda x: function(x, *args, **kwargs), logits)
    rng = np.random.default_rng(7)
    g = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes]

    @jax.jit
    def run(x):
        return jax.value_and_grad(scalar, has_aux=True)(x)

    def scalar(x):
        out = function(x, *args, **kwargs)
        return jnp.sum(g[0] * out[0]) + jnp.sum(g[2] * out[2]), tuple(out)

    (_, out), grad = run(logits)
    return [*out, grad.astype(jnp.float32)]


def _assert_close(got, expected, dtype):
    rtol, atol = (2e-5, 2e-6) if dtype == "float32" else (2e-2, 2e-2)
    for a, b in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got[3], expected[3], rtol=rtol, atol=atol)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_golden_sequence_means_and_z_loss(implementation):
    stored = np.load(VECTORS)
    cases = sorted({key.split("/")[0] for key in stored.files})
    assert len(cases) == 6
    for case in cases:
        logits, mask = stored[f"{case}/logits"], stored[f"{case}/mask"]
        run = jax.jit(router_mean, static_argnames="implementation")
        out = run(
            jnp.asarray(logits, jnp.float32),
            jnp.asarray(mask, jnp.float32),
            implementation=implementation,
        )
        np.testing.assert_allclose(out.mean, stored[f"{case}/seq_mean"], rtol=2e-5, atol=1e-7)
        z_loss = jnp.sum(out.z_loss_sum) / jnp.sum(out.weight)
        np.testing.assert_allclose(z_loss, stored[f"{case}/z_loss"], rtol=2e-5)


def test_golden_in_float64_with_gradient():
    stored = np.load(VECTORS)
    with jax.enable_x64(True):
        for case in sorted({key.split("/")[0] for key in stored.files}):
            logits, mask = (jnp.asarray(stored[f"{case}/{k}"]) for k in ("logits", "mask"))

            def z_loss(x, mask=mask):
                out = router_mean(x, mask, implementation="xla")
                return jnp.sum(out.z_loss_sum) / jnp.sum(out.weight), out.mean

            (value, mean), grad = jax.jit(jax.value_and_grad(z_loss, has_aux=True))(logits)
            assert mean.dtype == jnp.float64
            np.testing.assert_allclose(mean, stored[f"{case}/seq_mean"], rtol=1e-9, atol=1e-14)
            np.testing.assert_allclose(value, stored[f"{case}/z_loss"], rtol=1e-9)
            np.testing.assert_allclose(
                grad, stored[f"{case}/z_loss_dlogits"], rtol=1e-9, atol=1e-14
            )


@hypothesis.settings(max_examples=8, derandomize=True, deadline=None)
@hypothesis.given(
    rows=st.sampled_from((1, 2, 3)),
    tokens=st.sampled_from(SIZES),
    experts=st.sampled_from((1, 2, 7, 8, 13, 64, 129)),
    segments=st.sampled_from((None, 1, 3, 20)),
    dtype=st.sampled_from(("float32", "bfloat16")),
)
def test_kernels_equal_the_formula(rows, tokens, experts, segments, dtype):
    rng = np.random.default_rng(rows * 1000 + tokens + experts)
    args, kwargs = _draw(rng, rows, tokens, experts, segments, dtype)
    expected = _run(_plain, *args, **kwargs)
    for implementation in ("xla", "pallas_interpret"):
        got = _run(router_mean, *args, implementation=implementation, **kwargs)
        _assert_close(got, expected, dtype)


@pytest.mark.parametrize("tokens,experts,groups", [(1, 1, 1), (257, 13, 1), (1300, 8, 4)])
def test_triton_kernel_interpreted_equals_reference(tokens, experts, groups):
    rng = np.random.default_rng(tokens)
    logits = jnp.asarray(rng.normal(size=(2, tokens, experts)), jnp.float32)
    weight = jnp.asarray(rng.random((2, tokens)) < 0.7, jnp.float32)
    logits = jnp.where(weight[..., None] > 0, logits, jnp.nan)
    segment = None
    if groups > 1:
        segment = jnp.asarray(rng.integers(0, groups, (2, tokens)), jnp.int32)
    expected = reference.router_sums(logits, weight, segment, groups)
    got = gpu.router_sums(logits, weight, segment, groups, interpret=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    cotangents = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in expected]
    np.testing.assert_allclose(
        gpu.router_sums_vjp(logits, weight, segment, *cotangents, interpret=True),
        reference.router_sums_vjp(logits, weight, segment, *cotangents),
        rtol=2e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_uncounted_tokens_and_empty_rows(implementation):
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(3, 20, 8)), jnp.float32)
    mask = jnp.ones((3, 20), bool).at[1].set(False).at[2, 5:].set(False)
    dirty = jnp.where(mask[..., None], logits, jnp.nan)
    clean = _run(router_mean, logits, mask, implementation=implementation)
    poisoned = _run(router_mean, dirty, mask, implementation=implementation)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
    mean, weight, z_loss, grad = poisoned
    np.testing.assert_array_equal(weight, [20, 0, 5])
    np.testing.assert_array_equal(mean[1], np.zeros(8))
    assert z_loss[1] == 0
    np.testing.assert_array_equal(grad[1], np.zeros((20, 8)))
    np.testing.assert_array_equal(grad[2, 5:], np.zeros((15, 8)))
    # A shorter row without padding has the same mean: padding tokens have no weight.
    short = router_mean(logits[2:, :5], implementation=implementation)
    np.testing.assert_allclose(mean[2:], short.mean, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_extreme_logits_and_masked_experts(implementation):
    logits = jnp.asarray([[[1e4, -1e4, 0.0], [-jnp.inf, 2.0, 2.0]]], jnp.float32)
    mean, _, z_loss, grad = _run(router_mean, logits, implementation=implementation)
    np.testing.assert_allclose(mean, [[0.5, 0.25, 0.25]], atol=1e-6)
    np.testing.assert_allclose(z_loss, 1e8 + (2 + np.log(2)) ** 2, rtol=1e-6)
    assert np.isfinite(grad).all()
    assert grad[0, 1, 0] == 0


def test_mask_of_the_last_dimensions_serves_all_layers():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(2, 3, 13, 4)), jnp.float32)
    mask = jnp.asarray(rng.random((3, 13)) < 0.5)
    ids = jnp.asarray(rng.integers(0, 3, (3, 13)), jnp.int32)
    stacked = router_mean(logits, mask, segment_ids=ids, num_segments=2)
    assert stacked.mean.shape == (2, 3, 2, 4) and stacked.weight.shape == (2, 3, 2)
    for layer in range(2):
        single = router_mean(logits[layer], mask, segment_ids=ids, num_segments=2)
        for a, b in zip(stacked, single, strict=True):
            np.testing.assert_allclose(a[layer], b, rtol=1e-6)
    mapped = jax.vmap(lambda x: router_mean(x, mask, implementation="pallas_interpret").mean)
    np.testing.assert_allclose(mapped(logits), router_mean(logits, mask).mean, rtol=2e-5)


def test_weights_are_honoured_and_carry_no_gradient():
    rng = np.random.default_rng(6)
    logits = jnp.asarray(rng.normal(size=(2, 7, 4)), jnp.float32)
    weight = jnp.asarray(rng.random((2, 7)), jnp.float32)
    out = router_mean(logits, weight, implementation="pallas_interpret")
    p = jax.nn.softmax(logits, axis=-1)
    expected = jnp.einsum("st,stn->sn", weight, p) / jnp.sum(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(out.mean, expected, rtol=2e-5)
    grad = jax.grad(lambda w: jnp.sum(router_mean(logits, w).z_loss_sum))(weight)
    np.testing.assert_array_equal(grad, np.zeros_like(weight))


@pytest.mark.parametrize("case", SMALL[1:3], ids=lambda case: case.name)
def test_two_runs_agree_bit_for_bit(case):
    args = case.draw(np.random.default_rng(0))
    run = jax.jit(case.forward("pallas_interpret"))
    for a, b in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(run(*args)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platform,lowering", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_lowers_for_accelerators_on_a_cpu(case, platform, lowering):
    with lowering_for(platform):
        args = (*case.args, case.cotangents())
        text = jax.jit(case.vjp("pallas")).trace(*args).lower(lowering_platforms=(lowering,))
        assert "router_mean_backward" in text.as_text()
        text = jax.jit(case.forward("pallas")).trace(*case.args)
        assert "router_mean_forward" in text.lower(lowering_platforms=(lowering,)).as_text()


def test_empty_batch_and_no_tokens():
    assert router_mean(jnp.zeros((0, 4, 3))).mean.shape == (0, 3)
    out = router_mean(jnp.zeros((2, 0, 3)), segment_ids=jnp.zeros((2, 0), int), num_segments=2)
    np.testing.assert_array_equal(out.mean, np.zeros((2, 2, 3)))


def test_bad_input_names_the_argument():
    logits = jnp.zeros((2, 5, 3))
    ids = jnp.zeros((2, 5), jnp.int32)
    with pytest.raises(ValueError, match="logits"):
        router_mean(jnp.zeros(3))
    with pytest.raises(ValueError, match="logits"):
        router_mean(jnp.zeros((2, 5, 3), jnp.int32))
    with pytest.raises(ValueError, match="mask"):
        router_mean(logits, jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="num_segments"):
        router_mean(logits, segment_ids=ids)
    with pytest.raises(ValueError, match="num_segments"):
        router_mean(logits, segment_ids=ids, num_segments=0)
    with pytest.raises(ValueError, match="segment_ids"):
        router_mean(logits, segment_ids=jnp.zeros((2, 5)), num_segments=1)
    with pytest.raises(ValueError, match="implementation"):
        router_mean(logits, implementation="triton")
    with pytest.raises(NotImplementedError, match="router_mean"):
        router_mean(logits, implementation="pallas")
    with pytest.raises(NotImplementedError, match="float16"):
        router_mean(logits.astype(jnp.float16), implementation="pallas_interpret")
