"""Routing tables are permutations, rows move by gathers, and what is dropped is defined."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxlib_papers.ops.expert_dispatch import (
    combine_rows,
    expert_capacity,
    plan_dispatch,
    route_top_k,
    sum_rows,
    take_rows,
)


def draw_indices(seed, tokens, top_k, experts, outside=0.0):
    """Distinct experts per token, a share of them replaced by numbers outside the range."""
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, experts))
    indices = np.argsort(scores, axis=1)[:, :top_k]
    wrong = rng.choice([-1, -7, experts, 2 * experts], indices.shape)
    return np.where(rng.random(indices.shape) < outside, wrong, indices).astype(np.int32)


def assignments(indices, experts, capacity=None):
    """By hand: for each expert its assignments in order of tokens, cut at the capacity."""
    flat = indices.reshape(-1)
    return [np.flatnonzero(flat == e)[:capacity] for e in range(experts)]


CASES = [(1, 1, 1, 0.0), (13, 2, 4, 0.0), (13, 4, 4, 0.0), (13, 2, 4, 0.4), (40, 3, 5, 0.2)]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "outside"), CASES)
def test_rows_are_sorted_and_every_assignment_has_one(tokens, top_k, experts, outside):
    indices = draw_indices(0, tokens, top_k, experts, outside)
    plan = jax.jit(plan_dispatch, static_argnums=1)(indices, experts)
    want = assignments(indices, experts)
    np.testing.assert_array_equal(plan.group_sizes, [len(w) for w in want])
    real = int(plan.group_sizes.sum())
    np.testing.assert_array_equal(plan.source[:real], np.concatenate(want))
    np.testing.assert_array_equal(np.sort(plan.source), np.arange(tokens * top_k))
    # `row` is the inverse of `source`.
    np.testing.assert_array_equal(np.asarray(plan.row).reshape(-1)[plan.source],
                                  np.arange(tokens * top_k))  # fmt: skip
    assert plan.kept is None and plan.filled is None


@pytest.mark.parametrize("capacity", (1, 3, 100))
@pytest.mark.parametrize(("tokens", "top_k", "experts", "outside"), CASES[1:4])
def test_capacity_drops_later_tokens_first(tokens, top_k, experts, outside, capacity):
    indices = draw_indices(1, tokens, top_k, experts, outside)
    plan = jax.jit(plan_dispatch, static_argnums=1, static_argnames="capacity")(
        indices, experts, capacity=capacity
    )
    want = assignments(indices, experts, capacity)
    np.testing.assert_array_equal(plan.group_sizes, [len(w) for w in want])
    kept = np.isin(np.arange(tokens * top_k), np.concatenate(want)).reshape(indices.shape)
    np.testing.assert_array_equal(plan.kept, kept)
    rows = np.full((experts, capacity), -1)
    for expert, w in enumerate(want):
        rows[expert, : len(w)] = w
    filled = rows.reshape(-1) >= 0
    np.testing.assert_array_equal(plan.filled, filled)
    np.testing.assert_array_equal(np.asarray(plan.source)[filled], rows.reshape(-1)[filled])
    assert (plan.source >= 0).all() and (plan.source < tokens * top_k).all()
    at = np.asarray(plan.row)[kept]
    np.testing.assert_array_equal(np.asarray(plan.source)[at], np.flatnonzero(kept))


def dense(x, indices, weights, matrices, capacity=None):
    """``sum_k w[t, k] (x_t @ matrices[indices[t, k]])`` with one-hot sums over all experts."""
    experts = matrices.shape[0]
    kept = np.zeros(indices.size, bool)
    kept[np.concatenate(assignments(indices, experts, capacity))] = True
    chosen = np.eye(experts, dtype=np.float32)[np.clip(indices, 0, experts - 1)]
    chosen = jnp.asarray(chosen * kept.reshape(*indices.shape, 1))
    return jnp.einsum("tke,tk,td,edo->to", chosen, weights, x, matrices)


def dispatched(x, indices, weights, matrices, capacity=None):
    """The same through `take_rows` and `combine_rows`; each row meets its own matrix."""
    experts = matrices.shape[0]
    plan = plan_dispatch(indices, experts, capacity=capacity)
    rows = take_rows(x, plan)
    if capacity is None:
        edges = jnp.cumsum(plan.group_sizes)
        row = jnp.arange(rows.shape[0])
        expert = jnp.sum(row[:, None] >= edges[None, :], axis=1)
    else:
        expert = jnp.repeat(jnp.arange(experts), capacity)
    # Rows of no group are not the experts' to fill: zeros, as `grouped_matmul` leaves them.
    member = jax.nn.one_hot(expert, experts, dtype=rows.dtype)
    return combine_rows(jnp.einsum("re,rd,edo->ro", member, rows, matrices), weights, plan)


@pytest.mark.parametrize("capacity", (None, 4))
@pytest.mark.parametrize("outside", (0.0, 0.4))
def test_values_and_gradients_of_moving_rows(capacity, outside):
    indices = draw_indices(2, 13, 2, 4, outside)
    rng = np.random.default_rng(3)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((13, 5), (13, 2), (4, 5, 3))]
    probe = jnp.asarray(rng.normal(size=(13, 3)), jnp.float32)

    def both(function):
        def loss(x, weights, matrices):
            y = function(x, indices, weights, matrices, capacity)
            return jnp.sum(y * probe), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)

    for a, b in zip(*(jax.tree.leaves(both(f)) for f in (dispatched, dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_finite_differences():
    indices = draw_indices(4, 7, 2, 3, 0.2)
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        x, weights = jnp.asarray(rng.normal(size=(7, 2))), jnp.asarray(rng.normal(size=(7, 2)))

        def call(x, weights):
            plan = plan_dispatch(jnp.asarray(indices), 3, capacity=3)
            return combine_rows(jnp.tanh(take_rows(x, plan)), weights, plan)

        check_grads(jax.jit(call), (x, weights), 1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_bfloat16_rows_are_summed_in_float32():
    """300 equal rows of one token's gradient: a bfloat16 sum would stop growing at 256."""
    tokens, top_k = 1, 300
    plan = plan_dispatch(jnp.arange(top_k, dtype=jnp.int32)[None], top_k)
    x = jnp.ones((tokens, 1), jnp.bfloat16)
    rows, pullback = jax.vjp(lambda x: take_rows(x, plan), x)
    assert rows.dtype == jnp.bfloat16
    assert float(pullback(jnp.ones_like(rows))[0][0, 0]) == 300
    y = combine_rows(rows, jnp.ones((tokens, top_k)), plan)
    assert y.dtype == jnp.bfloat16 and float(y[0, 0]) == 300


def test_sum_of_rows_is_the_transpose_of_taking_them():
    indices = draw_indices(9, 11, 3, 4, 0.2)
    rng = np.random.default_rng(10)
    for capacity in (None, 3):
        plan = plan_dispatch(jnp.asarray(indices), 4, capacity=capacity)
        x = jnp.asarray(rng.normal(size=(11, 2)), jnp.float32)
        rows, pullback = jax.vjp(lambda x, plan=plan: take_rows(x, plan), x)
        some = jnp.asarray(rng.normal(size=rows.shape), jnp.float32)
        y, sum_pullback = jax.vjp(lambda rows, plan=plan: sum_rows(rows, plan), some)
        np.testing.assert_allclose(y, pullback(some)[0], rtol=1e-6)
        np.testing.assert_allclose(sum_pullback(x)[0], rows, rtol=1e-6)
        ones = jnp.ones((11, 3), jnp.float32)
        np.testing.assert_allclose(y, combine_rows(some, ones, plan), rtol=1e-6)


def test_no_scatter_in_either_direction():
    def loss(x, weights, indices, capacity):
        plan = plan_dispatch(indices, 4, capacity=capacity)
        return jnp.sum(combine_rows(take_rows(x, plan), weights, plan) ** 2)

    indices = draw_indices(6, 13, 2, 4)
    for capacity in (None, 3):
        step = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)), static_argnums=3)
        assert "scatter" not in str(step(jnp.ones((13, 5)), jnp.ones((13, 2)), indices, capacity))


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.lists(st.integers(-2, 5), min_size=6, max_size=6), st.integers(1, 3))
def test_any_indices(flat, capacity):
    """Also an expert that one token names twice."""
    indices = np.asarray(flat, np.int32).reshape(3, 2)
    want = assignments(indices, 4, capacity)
    plan = jax.jit(plan_dispatch, static_argnums=1, static_argnames="capacity")(
        indices, 4, capacity=capacity
    )
    np.testing.assert_array_equal(plan.group_sizes, [len(w) for w in want])
    assert int(plan.kept.sum()) == int(plan.filled.sum()) == sum(len(w) for w in want)


def test_no_token():
    for capacity in (None, 2):
        plan = plan_dispatch(jnp.zeros((0, 2), jnp.int32), 4, capacity=capacity)
        assert not np.any(plan.group_sizes)
        rows = take_rows(jnp.zeros((0, 3)), plan)
        assert not np.any(rows)
        assert combine_rows(rows, jnp.zeros((0, 2)), plan).shape == (0, 3)


# route_top_k
def test_routing_by_hand():
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.25, 0.25]], np.float32))
    routing = route_top_k(jnp.asarray(logits), 2)
    np.testing.assert_array_equal(routing.indices, [[3, 2], [0, 2]])  # a tie: the lower index
    np.testing.assert_allclose(routing.weights, [[4 / 7, 3 / 7], [0.4 / 0.65, 0.25 / 0.65]], 1e-6)
    np.testing.assert_allclose(routing.probs, np.exp(logits), 1e-6)
    plain = route_top_k(jnp.asarray(logits), 2, renormalize=False)
    np.testing.assert_allclose(plain.weights, [[0.4, 0.3], [0.4, 0.25]], 1e-6)


@pytest.mark.parametrize("renormalize", (False, True))
def test_gradient_of_the_weights(renormalize):
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(5, 4)))
    with jax.enable_x64(True):
        logits = jnp.asarray(np.asarray(logits), jnp.float64)

        def weights(logits):
            return route_top_k(logits, 2, renormalize=renormalize).weights

        assert weights(logits).dtype == jnp.float64
        check_grads(jax.jit(weights), (logits,), 1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_extreme_logits_and_all_experts():
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e30, -1e30, -1e30]])
    for top_k in (1, 3):
        value, grads = jax.value_and_grad(lambda x, k=top_k: jnp.sum(route_top_k(x, k).weights))(
            logits
        )
        np.testing.assert_allclose(value, 2.0, rtol=1e-6)
        assert np.isfinite(grads).all()


def test_bfloat16_logits_are_routed_in_float32():
    routing = route_top_k(jnp.ones((2, 3), jnp.bfloat16), 1)
    assert routing.probs.dtype == routing.weights.dtype == jnp.float32


def test_capacity():
    assert expert_capacity(16, 4, 2, 1.0) == 8
    assert expert_capacity(16, 4, 2, 1.01) == 9
    assert expert_capacity(1, 64, 1, 1.0) == 1
    with pytest.raises(ValueError, match="capacity_factor"):
        expert_capacity(16, 4, 2, 0.0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="top_k is 5"):
        route_top_k(jnp.zeros((2, 4)), 5)
    with pytest.raises(ValueError, match="logits has shape"):
        route_top_k(jnp.zeros(4), 1)
    with pytest.raises(ValueError, match="indices has shape"):
        plan_dispatch(jnp.zeros(4, jnp.int32), 2)
    with pytest.raises(ValueError, match="num_experts is 0"):
        plan_dispatch(jnp.zeros((4, 1), jnp.int32), 0)
    with pytest.raises(ValueError, match="capacity is 0"):
        plan_dispatch(jnp.zeros((4, 1), jnp.int32), 2, capacity=0)
