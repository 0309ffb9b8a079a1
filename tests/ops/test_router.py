"""Router losses: conventions, padding, degenerate routers, and the messages of misuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.ops.router import (
    cv_squared_loss,
    expert_counts,
    load_balancing_loss,
    router_z_loss,
)

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 6, 8)).astype(np.float32)
MASK = RNG.random((4, 6)) < 0.7


def probabilities(logits):
    return jax.nn.softmax(jnp.asarray(logits), axis=-1)


def perfectly_balanced(num_experts, top_k):
    """Tokens that choose each expert equally often, with equal mean probabilities."""
    rows = [np.roll([2.0] * top_k + [0.0] * (num_experts - top_k), s) for s in range(num_experts)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2), (16, 4), (4, 4)])
def test_uniform_routing_gives_exactly_one_c8(num_experts, top_k):
    logits = perfectly_balanced(num_experts, top_k)
    assert float(load_balancing_loss(logits=logits, top_k=top_k)) == pytest.approx(1, rel=1e-6)
    uniform = np.full((7, num_experts), 1 / num_experts, np.float32)  # ties, one expert set
    assert float(load_balancing_loss(uniform, top_k)) == pytest.approx(1, rel=1e-6)


def test_collapse_gives_the_number_of_experts():
    logits = np.tile(np.array([50.0, 0, 0, 0], np.float32), (5, 1))
    assert float(load_balancing_loss(logits=logits, top_k=1)) == pytest.approx(4, rel=1e-6)


def test_against_the_definition():
    probs = np.asarray(probabilities(LOGITS))
    kept = probs[MASK]
    chosen = np.argsort(-kept, axis=-1)[:, :2]
    f = np.bincount(chosen.ravel(), minlength=8) * 8 / (2 * len(kept))
    expected = np.sum(f * kept.mean(0))
    assert float(load_balancing_loss(probs, 2, MASK)) == pytest.approx(expected, rel=1e-5)
    by_logits = load_balancing_loss(logits=LOGITS, top_k=2, mask=MASK)
    assert float(by_logits) == pytest.approx(expected, rel=1e-5)
    counts = expert_counts(LOGITS, 2, MASK)
    np.testing.assert_array_equal(counts, np.bincount(chosen.ravel(), minlength=8))
    shares = counts / counts.sum()
    given = load_balancing_loss(probs, mask=MASK, load_shares=shares)
    assert float(given) == pytest.approx(expected, rel=1e-5)
    z = np.log(np.exp(LOGITS[MASK]).sum(-1))
    assert float(router_z_loss(LOGITS, MASK)) == pytest.approx((z**2).mean(), rel=1e-5)


def test_load_carries_no_gradient():
    grad = jax.grad(lambda p: load_balancing_loss(p, 1))(jnp.array([[0.6, 0.4], [0.7, 0.3]]))
    np.testing.assert_allclose(grad, [[1, 0], [1, 0]], atol=1e-7)  # N share_i / tokens


LOSSES = {
    "load_balance": lambda z, m: load_balancing_loss(logits=z, top_k=2, mask=m),
    "load_balance_of_probs": lambda z, m: load_balancing_loss(jax.nn.softmax(z, axis=-1), 2, m),
    "z": router_z_loss,
    "cv": lambda z, m: cv_squared_loss(jax.nn.softmax(z, axis=-1), m),
}

GRADIENTS = {k: jax.jit(jax.value_and_grad(loss)) for k, loss in LOSSES.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_half_padding_equals_no_padding_c6(name):
    padded = np.concatenate([LOGITS, np.full_like(LOGITS, 7.0)], axis=1)
    mask = np.concatenate([np.ones((4, 6), bool), np.zeros((4, 6), bool)], axis=1)
    value, grad = GRADIENTS[name](LOGITS, None)
    padded_value, padded_grad = GRADIENTS[name](padded, mask)
    np.testing.assert_allclose(padded_value, value, rtol=1e-6)
    np.testing.assert_allclose(padded_grad[:, :6], grad, rtol=1e-5, atol=1e-8)
    assert not padded_grad[:, 6:].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "logits",
    [
        np.zeros((3, 4, 6)),  # zero-initialised router
        np.full((3, 4, 6), 2.0),
        np.eye(6)[np.zeros((3, 4), int)] * 1e4,  # all tokens to one expert
        np.eye(6)[RNG.integers(0, 6, (3, 4))] * 2e4 - 1e4,
        perfectly_balanced(6, 2)[:, None],
    ],
    ids=["zero", "uniform", "one_expert", "huge", "balanced"],
)
def test_finite_for_any_router_c2(name, logits):
    logits = jnp.asarray(logits, jnp.float32)
    for mask in (None, jnp.zeros(logits.shape[:-1], bool)):
        value, grad = GRADIENTS[name](logits, mask)
        assert np.isfinite(value)
        assert np.isfinite(grad).all()
    assert value == 0  # nothing valid
    assert not grad.any()


@pytest.mark.parametrize("name", ["load_balance", "z"])
def test_nan_in_the_padding_is_harmless(name):
    mask = jnp.ones((4, 6), bool).at[:, 4:].set(False)
    clean = GRADIENTS[name](jnp.asarray(LOGITS), mask)
    dirty = GRADIENTS[name](jnp.asarray(LOGITS).at[:, 4:].set(jnp.nan), mask)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_layers_are_averaged():
    stack = RNG.normal(size=(3, 4, 6, 8)).astype(np.float32)
    each = [load_balancing_loss(logits=z, top_k=2, mask=MASK) for z in stack]
    together = load_balancing_loss(logits=stack, top_k=2, mask=MASK)
    assert float(together) == pytest.approx(float(np.mean(each)), rel=1e-6)
    each = [router_z_loss(z, MASK) for z in stack]
    assert float(router_z_loss(stack, MASK)) == pytest.approx(float(np.mean(each)), rel=1e-6)
    assert expert_counts(stack, 2, MASK).shape == (3, 8)


def test_global_load_makes_micro_batches_add_up():
    whole = load_balancing_loss(logits=LOGITS, top_k=2, mask=MASK)
    counts = expert_counts(LOGITS, 2, MASK)
    parts = [
        load_balancing_loss(logits=z, mask=m, load_shares=counts / counts.sum()) * float(m.sum())
        for z, m in zip(np.split(LOGITS, 4), np.split(MASK, 4), strict=True)
    ]
    assert float(sum(parts)) / MASK.sum() == pytest.approx(float(whole), rel=1e-6)


def test_cv_loss_counts_variation():
    assert float(cv_squared_loss(np.full((4, 5), 0.2, np.float32))) == pytest.approx(0, abs=1e-12)
    assert float(cv_squared_loss(np.eye(5, dtype=np.float32)[[0, 0]])) == pytest.approx(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_balancing_loss(LOGITS, 2), "pass router logits as logits="),
        (lambda: load_balancing_loss(top_k=2), "exactly one of probs"),
        (lambda: load_balancing_loss(LOGITS, 2, logits=LOGITS), "exactly one of probs"),
        (lambda: load_balancing_loss(logits=LOGITS), "top_k is needed"),
        (lambda: load_balancing_loss(logits=LOGITS, top_k=9), r"top_k is 9.*1\.\.8"),
        (lambda: load_balancing_loss(logits=LOGITS, top_k=0), "top_k is 0"),
        (lambda: load_balancing_loss(logits=LOGITS, top_k=2, mask=MASK.T), "mask has shape"),
        (lambda: load_balancing_loss(logits=LOGITS, load_shares=np.ones(7)), "load_shares"),
        (lambda: router_z_loss(LOGITS, MASK[:2]), "mask has shape"),
        (lambda: router_z_loss(LOGITS[0, 0]), "logits has shape"),
        (lambda: cv_squared_loss(LOGITS, MASK[:2]), "mask has shape"),
    ],
)
def test_misuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()
