"""Chunked cross-entropy against all logits at once in float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxlib_papers.ops.cross_entropy import chunked_cross_entropy, token_log_probs


def draw(seed=0, batch=(2,), length=11, dim=5, vocab=17, dtype="float32"):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(*batch, length, dim)), dtype)
    kernel = jnp.asarray(rng.normal(size=(dim, vocab)), dtype)
    return hidden, kernel, rng.integers(0, vocab, (*batch, length)).astype(np.int32)


def whole(hidden, kernel, targets, mask, z_coef=0.0, softcap=None):
    """Float64 value, gradients of hidden and kernel, and log-probabilities, in NumPy."""
    hidden, kernel, mask = (np.asarray(a, np.float64) for a in (hidden, kernel, mask))
    logits = hidden @ kernel
    slope = np.ones_like(logits)
    if softcap is not None:
        slope = 1 - np.tanh(logits / softcap) ** 2
        logits = softcap * np.tanh(logits / softcap)
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    one_hot = np.eye(kernel.shape[1])[targets]
    log_probs = (logits * one_hot).sum(-1) - lse
    value = np.sum(mask * (z_coef * lse**2 - log_probs))
    probs = np.exp(logits - lse[..., None])
    dlogits = probs * (1 + 2 * z_coef * lse)[..., None] - one_hot
    dlogits = dlogits * mask[..., None] * slope
    dkernel = hidden.reshape(-1, hidden.shape[-1]).T @ dlogits.reshape(-1, kernel.shape[1])
    return value, dlogits @ kernel.T, dkernel, log_probs


@functools.partial(jax.jit, static_argnames=("z_coef", "softcap", "chunk"))
def chunked(hidden, kernel, targets, mask, **options):
    def loss(hidden, kernel):
        return chunked_cross_entropy(hidden, kernel, targets, mask, **options)

    (value, weight), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, kernel)
    return value, weight, grads


def compare(args, mask, tolerance=1e-5, **options):
    value, weight, grads = chunked(*args, mask, **options)
    options.pop("chunk", None)
    want, *want_grads, _ = whole(*args, mask, **options)
    np.testing.assert_allclose(value, want, rtol=tolerance)
    np.testing.assert_allclose(weight, np.asarray(mask, np.float64).sum(), rtol=1e-6)
    for got, expected in zip(grads, want_grads, strict=True):
        atol = tolerance * max(1.0, np.abs(expected).max())
        got = np.asarray(got).astype(np.float64)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=atol)
    return value, weight, grads


def random_mask(shape, seed=1):
    return np.random.default_rng(seed).random(shape) < 0.6


@pytest.mark.parametrize(
    "options",
    [{}, {"z_coef": 0.03}, {"softcap": 1.5}, {"z_coef": 0.03, "softcap": 1.5}],
    ids=["plain", "z", "cap", "both"],
)
@pytest.mark.parametrize("chunk", (None, 4))  # 4 does not divide 11
def test_value_and_gradients(options, chunk):
    args = draw()
    compare(args, random_mask((2, 11)), chunk=chunk, **options)


def test_float_weights_and_more_batch_axes():
    args = draw(2, batch=(2, 3))
    weights = np.random.default_rng(3).random((2, 3, 11)).astype(np.float32)
    compare(args, weights, chunk=5)


@pytest.mark.parametrize("chunk", (1, 11, 100))
def test_the_chunk_changes_nothing(chunk):
    args, mask = draw(4), random_mask((2, 11))
    for a, b in zip(*(jax.tree.leaves(chunked(*args, mask, chunk=c)) for c in (chunk, 4)),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_no_mask_counts_every_token():
    hidden, kernel, targets = draw(5)
    got = jax.jit(chunked_cross_entropy)(hidden, kernel, targets)
    want = whole(hidden, kernel, targets, np.ones((2, 11)))[0]
    np.testing.assert_allclose(got, (want, 22.0), rtol=1e-5)


def test_bfloat16():
    args = draw(6, dim=32, dtype="bfloat16")
    value, _, grads = compare(args, random_mask((2, 11)), tolerance=1e-2, chunk=4)
    assert value.dtype == jnp.float32
    assert {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}


def test_float64():
    with jax.enable_x64(True):
        args = draw(7, dtype="float64")
        value, _, grads = compare(args, random_mask((2, 11)), tolerance=1e-12, z_coef=0.1, chunk=4)
        assert {a.dtype for a in (value, *grads)} == {jnp.dtype(jnp.float64)}


def test_nothing_counts():
    value, weight, grads = chunked(*draw(8), np.zeros((2, 11), bool), z_coef=0.1, chunk=4)
    assert float(value) == float(weight) == 0
    assert not any(np.any(g) for g in grads)


@pytest.mark.parametrize("poison", (np.nan, np.inf))
def test_what_a_masked_token_holds_changes_nothing(poison):
    hidden, kernel, targets = draw(9)
    mask = random_mask((2, 11))
    poisoned = jnp.where(mask[..., None], hidden, poison)
    options = dict(z_coef=0.1, softcap=2.0, chunk=4)
    for a, b in zip(*(jax.tree.leaves(chunked(h, kernel, targets, mask, **options))
                      for h in (poisoned, hidden)), strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)


def test_extreme_logits():
    hidden, kernel, targets = draw(10)
    value, _, grads = chunked(hidden * 1e4, kernel, targets, np.ones((2, 11), bool), chunk=4)
    assert all(np.isfinite(a).all() for a in (value, *grads))


def test_a_cotangent_scales_the_gradients():
    args, mask = draw(11), random_mask((2, 11))

    def loss(hidden):
        total, weight = chunked_cross_entropy(hidden, *args[1:], mask, chunk=4)
        return 3 * total / weight

    got = jax.jit(jax.grad(loss))(args[0])
    np.testing.assert_allclose(got, whole(*args, mask)[1] * 3 / mask.sum(), rtol=1e-5, atol=1e-6)


def test_vmap_gives_each_its_own_sum():
    hidden, kernel, targets = draw(12, batch=(3, 2))
    mask = random_mask((3, 2, 11))
    sums, weights = jax.jit(jax.vmap(chunked_cross_entropy, in_axes=(0, None, 0, 0)))(
        hidden, kernel, targets, jnp.asarray(mask)
    )
    want = [whole(hidden[i], kernel, targets[i], mask[i])[0] for i in range(3)]
    np.testing.assert_allclose(sums, want, rtol=1e-5)
    np.testing.assert_array_equal(weights, mask.sum((1, 2)))


def largest_value(jaxpr):
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [math.prod(v.aval.shape) for v in equation.outvars]
        sizes += [largest_value(inner) for inner in jaxprs_in_params(equation.params)]
    return max(sizes)


def test_logits_of_one_chunk_at_a_time():
    hidden, kernel, targets = draw(13, length=640, vocab=512)
    mask = np.ones((2, 640), bool)
    jaxpr = chunked.trace(hidden, kernel, targets, mask, chunk=64).jaxpr.jaxpr
    assert largest_value(jaxpr) == 2 * 64 * 512

    def probs(hidden):
        return jnp.sum(token_log_probs(hidden, kernel, targets, chunk=64))

    assert largest_value(jax.make_jaxpr(jax.grad(probs))(hidden).jaxpr) == 2 * 64 * 512


@pytest.mark.parametrize("batch", ((0,), (2,)))
def test_no_token(batch):
    hidden, kernel, targets = draw(14, batch=batch, length=0)
    value, weight, grads = chunked(hidden, kernel, targets, np.zeros((*batch, 0), bool))
    assert float(value) == float(weight) == 0
    assert grads[0].shape == hidden.shape and not np.any(grads[1])
    assert token_log_probs(hidden, kernel, targets).shape == targets.shape


def test_an_empty_batch_of_long_rows():
    hidden, kernel, targets = draw(14, batch=(0,))
    assert float(chunked_cross_entropy(hidden, kernel, targets)[0]) == 0


# token_log_probs
@pytest.mark.parametrize("softcap", (None, 1.5))
def test_log_probs(softcap):
    hidden, kernel, targets = draw(15)
    mask = random_mask((2, 11)).astype(np.float32)

    @jax.jit
    def both(hidden, kernel):
        def loss(hidden, kernel):
            log_probs = token_log_probs(hidden, kernel, targets, softcap=softcap, chunk=4)
            return -jnp.sum(log_probs * mask), log_probs

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, kernel)

    grads, log_probs = both(hidden, kernel)
    _, *want_grads, want = whole(hidden, kernel, targets, mask, softcap=softcap)
    np.testing.assert_allclose(log_probs, want, rtol=1e-5, atol=1e-6)
    for got, expected in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_log_probs_are_those_of_the_loss():
    hidden, kernel, targets = draw(16, batch=())
    log_probs = token_log_probs(hidden, kernel, targets, chunk=3)
    assert log_probs.shape == targets.shape and log_probs.dtype == jnp.float32
    loss, _ = chunked_cross_entropy(hidden, kernel, targets, chunk=5)
    np.testing.assert_allclose(-jnp.sum(log_probs), loss, rtol=1e-6)


BAD = {
    "expected .*dim, vocab": lambda h, k, t: chunked_cross_entropy(h, k.T, t),
    "kernel is bfloat16": lambda h, k, t: chunked_cross_entropy(h, k.astype("bfloat16"), t),
    "targets has shape": lambda h, k, t: chunked_cross_entropy(h, k, t[0]),
    "targets has dtype": lambda h, k, t: chunked_cross_entropy(h, k, t.astype(np.float32)),
    "mask has shape": lambda h, k, t: chunked_cross_entropy(h, k, t, np.ones(3, bool)),
    "z_coef is -1": lambda h, k, t: chunked_cross_entropy(h, k, t, z_coef=-1.0),
    "softcap is 0": lambda h, k, t: token_log_probs(h, k, t, softcap=0.0),
    "chunk is 0": lambda h, k, t: chunked_cross_entropy(h, k, t, chunk=0),
    "chunk is -2": lambda h, k, t: token_log_probs(h, k, t, chunk=-2),
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        BAD[message](*draw())
