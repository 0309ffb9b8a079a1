"""The step: additive losses, accumulation, skipping, randomness, evaluation, subsets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlib_papers.train.mesh import make_mesh
from jaxlib_papers.train.optimizer import OptimizerConfig, global_norm, make_optimizer
from jaxlib_papers.train.state import (
    TrainState,
    abstract_model,
    init_state,
    merge_model,
    split_model,
)
from jaxlib_papers.train.step import Objective, make_eval_step, make_train_step
from tests.train.toy import (
    ENTROPY_OBJECTIVE,
    OBJECTIVE,
    ToyLM,
    batch,
    model_fn,
    token_nll,
)

SPEC = abstract_model(model_fn)
ADAM = make_optimizer(
    OptimizerConfig(learning_rate=1e-2, warmup_steps=1, total_steps=50), SPEC.axes
)
# With plain gradient descent at rate 1 the change of a parameter is its gradient.
SGD = optax.sgd(1.0)


PARAMS = jax.tree.map(np.asarray, split_model(model_fn(jax.random.key(0)))[1])


def start(optimizer):
    return TrainState.create(jax.tree.map(jnp.array, PARAMS), optimizer)


def one_step(objective=OBJECTIVE, rows=8, data=None, **options):
    """Returns (gradient, metrics) of one step."""
    state = start(SGD)
    before = jax.tree.map(np.asarray, state.params)
    step = make_train_step(SPEC.graphdef, objective, SGD, **options)
    state, metrics = step(state, batch(rows) if data is None else data)
    return jax.tree.map(lambda b, a: b - np.asarray(a), before, state.params), metrics


def assert_trees_close(got, want, rtol=1e-6, atol=2e-7):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=atol), got, want)


def test_loss_and_gradient_are_those_of_the_whole_batch():
    data = batch()
    state = start(SGD)

    def loss(params):
        nll = token_nll(merge_model(SPEC.graphdef, params)(data["tokens"]), data)
        return jnp.sum(nll) / jnp.sum(data["loss_mask"], dtype=jnp.float32)

    value, want = jax.value_and_grad(loss)(state.params)
    got, metrics = one_step()
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(global_norm(want)), rel=1e-5)
    assert_trees_close(got, want)


@pytest.mark.parametrize("accum_steps", [4, 8])
def test_accumulation_changes_neither_loss_nor_gradient_nor_logged_values(accum_steps):
    # Rows have from 1 to all of their tokens in the loss: a mean of micro-batch means is far off.
    want, want_metrics = one_step()
    got, metrics = one_step(accum_steps=accum_steps)
    assert_trees_close(got, want)
    for name in ("loss", "nll", "logit", "grad_norm"):
        np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-6, err_msg=name)


def test_micro_batches_are_interleaved_rows():
    seen = Objective(
        lambda part: {"rows": part["row"]},
        lambda model, part, key, totals, statistics: (
            jnp.sum(part["row"]) * 0.0,
            {"rows": totals["rows"], "square": jnp.square(jnp.sum(part["row"]))},
        ),
    )
    data = batch(6) | {"row": np.arange(6, dtype=np.float32)}
    _, metrics = one_step(seen, data=data, accum_steps=3)
    # Micro-batch a holds rows a and a + 3. Each of the three sees the same totals.
    np.testing.assert_array_equal(metrics["rows"], 3 * np.array([0 + 1 + 2, 3 + 4 + 5]))
    assert float(metrics["square"]) == 3**2 + 5**2 + 7**2


def test_statistics_make_a_loss_of_batch_wide_means_exact():
    want, want_metrics = one_step(ENTROPY_OBJECTIVE)
    got, metrics = one_step(ENTROPY_OBJECTIVE, accum_steps=4, exact_statistics=True)
    assert_trees_close(got, want)
    assert float(metrics["loss"]) == pytest.approx(float(want_metrics["loss"]), rel=1e-6)
    same, _ = one_step(ENTROPY_OBJECTIVE, exact_statistics=True)
    assert_trees_close(same, want)
    # Without the first pass it is the mean of the micro-batches' own values: another number.
    _, local = one_step(ENTROPY_OBJECTIVE, accum_steps=4)
    assert abs(float(local["loss"]) - float(metrics["loss"])) > 1e-4


def test_a_bad_step_is_skipped_and_counted():
    def loss(model, part, key, totals, statistics):
        value, metrics = OBJECTIVE.loss(model, part, key, totals, statistics)
        return value * jnp.sum(part["scale"]), metrics

    def data(seed, scale):
        return batch(seed=seed) | {"scale": np.full(8, scale / 8, np.float32)}

    step = make_train_step(SPEC.graphdef, Objective(OBJECTIVE.count, loss), ADAM)
    state, _ = step(start(ADAM), data(0, 1.0))
    good = jax.tree.map(np.asarray, state)
    for count, scale in enumerate((np.nan, np.inf), start=1):
        state, metrics = step(state, data(1, scale))
        assert int(state.step) == 1 + count
        assert int(metrics["skipped"]) == int(state.skipped_in_a_row) == count
        assert not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, good.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.mu, good.opt_state.mu)
    state, metrics = step(state, data(1, 1.0))
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (2, 0)
    assert np.any(state.params["up"] != good.params["up"])
    assert float(metrics["learning_rate"]) > 0


def test_a_gradient_that_is_not_finite_is_skipped_although_the_loss_is():
    def loss(model, part, key, totals, statistics):
        # sqrt at 0: value 0, derivative infinite.
        return jnp.sum(jnp.sqrt(model.bias[...])), {}

    gradient, metrics = one_step(Objective(OBJECTIVE.count, loss))
    assert float(metrics["loss"]) == 0.0 and int(metrics["skipped"]) == 1
    assert not any(np.any(g) for g in jax.tree.leaves(gradient))


def test_randomness_comes_from_seed_step_and_micro_batch_only():
    def dropout_model(key):
        return ToyLM(key=key, dropout=0.5)

    spec = abstract_model(dropout_model)

    first_seed, other_seed = (
        make_train_step(spec.graphdef, OBJECTIVE, ADAM, seed=seed) for seed in (0, 1)
    )

    def losses(step, steps, state=None):
        state = start(ADAM) if state is None else state
        out = []
        for _ in range(steps):
            state, metrics = step(state, batch())
            out.append(float(metrics["loss"]))
        return out, state

    whole, _ = losses(first_seed, 4)
    first, state = losses(first_seed, 2)
    # A state that went through the host, as a checkpoint does.
    state = jax.tree.map(jnp.array, jax.tree.map(np.asarray, state))
    second, _ = losses(first_seed, 2, state)
    assert first + second == whole
    assert losses(other_seed, 1)[0] != whole[:1]

    # Frozen parameters: only the dropout mask changes from step to step.
    frozen = dataclasses.replace(start(ADAM), step=jnp.int32(7))
    _, at_seven = first_seed(frozen, batch())
    assert float(at_seven["loss"]) != whole[0]

    # Two micro-batches with the same rows get two masks.
    twice = {name: np.repeat(x, 2, axis=0) for name, x in batch(4).items()}
    masked = Objective(
        OBJECTIVE.count,
        lambda model, part, key, totals, statistics: (
            jnp.zeros(()) * jnp.sum(model.bias[...]),
            {"draw": jax.random.uniform(key) ** 2, "sum": jax.random.uniform(key)},
        ),
    )
    step = make_train_step(spec.graphdef, masked, ADAM, accum_steps=2)
    _, metrics = step(start(ADAM), twice)
    # With equal draws u: sum of squares = (sum)^2 / 2.
    assert float(metrics["draw"]) != pytest.approx(float(metrics["sum"]) ** 2 / 2, rel=1e-3)


def test_a_subset_trains_and_the_rest_stays():
    def chosen(path, _):
        return path[0] in ("up", "down")

    spec = abstract_model(model_fn, chosen)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0, weight_decay=0.0), spec.axes)
    state = init_state(model_fn, optimizer, jax.random.key(0), trainable=chosen)
    before = jax.tree.map(np.asarray, state)
    step = make_train_step(spec.graphdef, OBJECTIVE, optimizer, accum_steps=2)
    state, first = step(state, batch())
    state, second = step(state, batch())
    assert float(second["loss"]) < float(first["loss"])
    assert sorted(state.opt_state.mu) == ["down", "up"]
    jax.tree.map(np.testing.assert_array_equal, state.rest, before.rest)
    assert np.any(state.params["up"] != before.params["up"])


def test_evaluation_is_the_loss_without_dropout_and_weighs_right_over_batches():
    model = ToyLM(key=jax.random.key(0), dropout=0.5)
    spec = abstract_model(lambda key: ToyLM(key=key, dropout=0.5))
    state = start(ADAM)
    evaluate = make_eval_step(spec.graphdef, OBJECTIVE)
    batches = [batch(8, seed=1), batch(4, seed=2)]
    total = tokens = 0.0
    for data in batches:
        metrics, totals = evaluate(state, data)
        total += float(metrics["nll"] * totals["tokens"])
        tokens += float(totals["tokens"])
    nll = [jnp.sum(token_nll(model(data["tokens"]), data)) for data in batches]
    assert tokens == sum(data["loss_mask"].sum() for data in batches)
    assert total / tokens == pytest.approx(float(sum(nll)) / tokens, rel=1e-5)


def test_a_mesh_of_one_device_changes_nothing():
    want, want_metrics = one_step()
    mesh = make_mesh("auto", jax.devices()[:1])
    step = make_train_step(SPEC.graphdef, OBJECTIVE, SGD, mesh=mesh)
    state = init_state(model_fn, SGD, jax.random.key(0), mesh=mesh)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, batch())
    assert_trees_close(jax.tree.map(lambda b, a: b - np.asarray(a), before, state.params), want)
    assert float(metrics["loss"]) == pytest.approx(float(want_metrics["loss"]), rel=1e-6)


def test_the_state_is_donated_and_the_step_traced_once():
    traces = []

    def count(part):
        traces.append(1)
        return OBJECTIVE.count(part)

    step = make_train_step(SPEC.graphdef, Objective(count, OBJECTIVE.loss), ADAM)
    state = start(ADAM)
    old = state.params["up"]
    for seed in range(3):
        state, _ = step(state, batch(seed=seed))
    assert old.is_deleted()
    assert len(traces) == 1


def test_the_optimizer_keeps_no_second_copy_of_the_state():
    lowered = make_train_step(SPEC.graphdef, OBJECTIVE, ADAM).lower(start(ADAM), batch())
    memory = lowered.compile().memory_analysis()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(start(ADAM)))
    assert memory.alias_size_in_bytes >= 0.99 * state_bytes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"accum_steps": 0}, "accum_steps=0"),
        ({"exact_statistics": True}, "statistics=None"),
    ],
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        make_train_step(SPEC.graphdef, OBJECTIVE, ADAM, **options)


def test_rows_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"has 8 rows, which accum_steps=3 does not divide"):
        one_step(accum_steps=3)
