"""One sweep over all flows: inverse, log-determinant, finite numbers; and each one on its own."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_papers.nn.flows.autoregressive import ConditionalMAF
from jaxlib_papers.nn.flows.base import Chain, Flow, Permutation, StandardisedFlow
from jaxlib_papers.nn.flows.coupling import (
    ConditionalRealNVP,
    ConditionalSplineFlow,
    affine_coupling,
)
from jaxlib_papers.nn.flows.training import FitConfig, fit_flow, fit_module
from jaxlib_papers.nn.flows.trajectory import TrajectoryFlow

VECTORS = np.load(Path(__file__).parents[2] / "vectors" / "japan.npz")
KEY = jax.random.key(0)
# Compiles in a tenth of the default generator's time; which numbers come does not matter.
QUICK = jax.random.key(0, impl="unsafe_rbg")
SMALL = dict(hidden=8, key=QUICK)
TRANSFORMER = dict(blocks=2, width=8, heads=2, attention_layers=1, key=QUICK)


def perturbed(flow: Flow, scale: float = 0.3) -> Flow:
    """Every parameter moved, so that nothing is the identity by construction."""
    graphdef, params, rest = nnx.split(flow, nnx.Param, ...)
    rng = np.random.default_rng(7)
    moved = jax.tree.map(
        lambda p: p + jnp.asarray(scale * rng.standard_normal(p.shape), p.dtype), params
    )
    return nnx.merge(graphdef, moved, rest)


def chain() -> Chain:
    parts = [
        ConditionalRealNVP(3, 2, layers=2, **SMALL),
        Permutation((2, 0, 1)),
        ConditionalSplineFlow(3, 2, layers=2, bins=4, **SMALL),
    ]
    return Chain(parts)


MAKE = {
    "affine": lambda: ConditionalRealNVP(3, 2, layers=3, **SMALL),
    "affine unrolled": lambda: ConditionalRealNVP(2, 2, layers=2, unroll=True, **SMALL),
    "affine without context": lambda: ConditionalRealNVP(3, layers=3, **SMALL),
    "affine of one": lambda: ConditionalRealNVP(1, 2, layers=2, **SMALL),
    "spline": lambda: ConditionalSplineFlow(3, 2, layers=2, bins=5, tail_bound=3.0, **SMALL),
    "spline of one": lambda: ConditionalSplineFlow(1, 2, layers=2, bins=5, **SMALL),
    "masked": lambda: ConditionalMAF(3, 2, layers=3, **SMALL),
    "masked without context": lambda: ConditionalMAF(4, layers=2, **SMALL),
    "masked of one": lambda: ConditionalMAF(1, 2, layers=2, **SMALL),
    "trajectory": lambda: TrajectoryFlow(4, 2, features=3, steps=5, **TRANSFORMER),
    "trajectory of one channel": lambda: TrajectoryFlow(3, 1, context_dim=2, **TRANSFORMER),
    "trajectory of one step": lambda: TrajectoryFlow(1, 2, **TRANSFORMER),
    "chain": chain,
    "standardised": lambda: StandardisedFlow(
        ConditionalRealNVP(3, 2, layers=2, **SMALL),
        [1.0, -20.0, 0.0],
        [0.1, 30.0, 1.0],
        [5.0, 0.0],
        [2.0, 1.0],
    ),
}


@functools.cache
def built(name: str, moved: bool = True) -> Flow:
    """A flow by name; made inside one compiled function, since op by op it takes seconds."""
    flow = jax.jit(MAKE[name])()
    return perturbed(flow) if moved else flow


def inputs(flow: Flow, rows: int = 6, spread: float = 1.0) -> tuple[jax.Array, jax.Array | None]:
    keys = jax.random.split(jax.random.key(3), 2)
    y = spread * jax.random.normal(keys[0], (rows, *flow.event_shape))
    shape = flow.context_shape
    return y, None if shape is None else jax.random.normal(keys[1], (rows, *shape))


@jax.jit
def everything(flow: Flow, y, x):
    z, logdet = flow.forward(y, x)

    def single(y, x):
        z, logdet = flow.forward(y, x)
        return z, (z, logdet)

    axes = (0, None if x is None else 0)
    jacobian, one_by_one = jax.vmap(jax.jacrev(single, has_aux=True), in_axes=axes)(y, x)
    return z, logdet, flow.inverse(z, x), one_by_one, jacobian, flow.log_prob(y, x)


@pytest.mark.parametrize("name", MAKE)
def test_inverse_and_log_determinant(name):
    flow = built(name)
    y, x = inputs(flow)
    z, logdet, (back, inverse_logdet), single, jacobian, log_prob = everything(flow, y, x)
    assert z.shape == y.shape and logdet.shape == (6,)
    tolerance = 1e-4 * max(1.0, float(jnp.abs(y).max()))
    assert float(jnp.abs(back - y).max()) < tolerance
    np.testing.assert_allclose(inverse_logdet, -logdet, atol=2e-4)
    _, wanted = np.linalg.slogdet(np.asarray(jacobian, np.float64).reshape(6, flow.dim, flow.dim))
    np.testing.assert_allclose(logdet, wanted, atol=2e-4)
    # A batch is its examples one by one.
    np.testing.assert_allclose(single[0], z, atol=2e-5)
    np.testing.assert_allclose(single[1], logdet, atol=2e-5)
    flat = np.asarray(z).reshape(6, -1)
    density = -0.5 * (flat**2).sum(1) - 0.5 * flow.dim * np.log(2 * np.pi) + logdet
    np.testing.assert_allclose(log_prob, density, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, jnp.float32) for n in ("affine", "spline", "spline of one", "masked", "standardised")]
    # Every flow widens its input in one place.
    + [(n, jnp.bfloat16) for n in ("spline", "masked", "trajectory", "chain")],
)
def test_hostile_input_is_finite_with_finite_gradients(name, dtype):
    """At the ends of the splines, just beyond them, at +-1e6, and at 0."""
    flow = built(name)
    values = [0.0, 3.0, -3.0, 3.0 * (1 + 1e-6), -5.0, 5.0 * (1 + 1e-6), 1e6, -1e6]
    y = jnp.ones((len(values), *flow.event_shape)).astype(dtype)
    y = y * jnp.array(values, dtype).reshape(-1, *(1,) * len(flow.event_shape))
    _, x = inputs(flow, len(values))
    x = None if x is None else x.astype(dtype)
    graphdef, params, rest = nnx.split(flow, nnx.Param, ...)

    @jax.jit
    def gradients(params, y):
        def total(params, y):
            flow = nnx.merge(graphdef, params, rest)
            z, logdet = flow.forward(y, x)
            back, _ = flow.inverse(z, x)
            return jnp.sum(flow.log_prob(y, x)), (z, logdet, back)

        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, y)

    grads, (z, logdet, back) = gradients(params, y)
    for leaf in jax.tree.leaves((grads, z, logdet, back)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
    assert z.dtype == jnp.float32
    # Far out the map back is as exact as the numbers are large.
    wide = y.astype(jnp.float32)
    size = jnp.maximum(1, jnp.abs(wide))
    near = jnp.abs(wide) < 100
    assert float(jnp.max(jnp.where(near, jnp.abs(back - wide) / size, 0))) < 1e-4


@pytest.mark.parametrize("name", ["affine", "spline", "masked", "trajectory"])
def test_samples_follow_the_key_and_have_their_density(name):
    flow = built(name)
    _, x = inputs(flow, 3)

    @jax.jit
    def draw(key):
        y, log_prob = flow.sample_and_log_prob(key, x, 4)
        return y, log_prob, flow.log_prob(y, x), flow.sample(key, x, 4)

    y, log_prob, again, plain = draw(KEY)
    assert y.shape == (4, 3, *flow.event_shape)
    np.testing.assert_allclose(log_prob, again, atol=3e-4)
    np.testing.assert_array_equal(y, plain)
    assert not np.array_equal(y, draw(jax.random.key(1))[0])


@pytest.mark.parametrize("name", ["affine", "spline", "masked", "trajectory"])
def test_starts_as_the_identity_up_to_order(name):
    flow = built(name, False)
    y, x = inputs(flow)
    z, logdet = jax.jit(lambda y, x: flow.forward(y, x))(y, x)
    np.testing.assert_allclose(np.sort(z.reshape(6, -1)), np.sort(y.reshape(6, -1)), atol=1e-5)
    np.testing.assert_allclose(logdet, 0, atol=1e-5)


class TestEachOnItsOwn:
    @pytest.mark.parametrize("k", range(2))
    def test_affine_golden(self, k):
        """Four couplings with tanh nets, in float64, with the gradient."""
        with jax.enable_x64(True):
            case = {n[9:]: VECTORS[n] for n in VECTORS.files if n.startswith(f"affine/{k}/")}
            y, context = case["y"], case["context"]
            layers = sum(n.endswith("/W1") for n in case)

            def log_prob(y):
                total = jnp.zeros(len(y))
                for layer in range(layers):
                    w1, b1, w2, b2 = (case[f"layer{layer}/{n}"] for n in ("W1", "b1", "W2", "b2"))
                    keep = (np.arange(y.shape[1]) + layer) % 2 == 0
                    seen = jnp.concatenate([y * keep[None].astype(float), context], axis=1)
                    raw = jnp.tanh(seen @ w1 + b1[None]) @ w2 + b2[None]
                    y, logdet = affine_coupling(y, raw, keep)
                    total = total + logdet
                normal = -0.5 * jnp.sum(y**2, 1) - 0.5 * y.shape[1] * jnp.log(2 * jnp.pi)
                return jnp.sum(normal + total), (y, total, normal + total)

            gradient, (z, logdet, density) = jax.grad(log_prob, has_aux=True)(jnp.asarray(y))
            for ours, name in ((z, "z"), (logdet, "logdet"), (density, "log_prob")):
                np.testing.assert_allclose(ours, case[name], atol=1e-10)
            # The vectors hold the gradient of the sum of log-densities, up to sign.
            wanted = case["g_y"]
            assert min(np.abs(gradient - wanted).max(), np.abs(gradient + wanted).max()) < 1e-10

    def test_masked_jacobian_is_triangular(self):
        flow = perturbed(jax.jit(lambda: ConditionalMAF(4, 2, layers=1, **SMALL))())
        y, x = inputs(flow, 3)
        jacobian = jax.jit(jax.vmap(jax.jacrev(lambda y, x: flow.forward(y, x)[0])))(y, x)
        np.testing.assert_array_equal(np.triu(jacobian, 1), 0)
        assert (np.abs(np.tril(jacobian, -1)).max((1, 2)) > 1e-3).all()

    def test_trajectory_is_causal(self):
        """Without couplings and reversal step t of the code sees steps up to t."""
        options = dict(context_dim=2, alternate_order=False, **TRANSFORMER)
        flow = perturbed(jax.jit(lambda: TrajectoryFlow(4, 1, **options))())
        y, x = inputs(flow, 1)
        jacobian = jax.jit(jax.jacrev(lambda y: flow.forward(y, x[0])[0]))(y[0])[:, 0, :, 0]
        np.testing.assert_array_equal(np.triu(jacobian, 1), 0)
        assert np.abs(np.tril(jacobian, -1)).max() > 1e-3

    def test_float64(self):
        with jax.enable_x64(True):
            flow = perturbed(jax.jit(MAKE["spline"])())
            y, x = inputs(flow)
            assert y.dtype == jnp.float64
            z, back = jax.jit(lambda y: (z := flow.forward(y, x)[0], flow.inverse(z, x)[0]))(y)
            assert z.dtype == jnp.float64
            np.testing.assert_allclose(back, y, atol=1e-10)

    def test_standardising_changes_units(self):
        inner = perturbed(jax.jit(lambda: ConditionalRealNVP(2, layers=2, **SMALL))())
        flow = StandardisedFlow(inner, [1.0, 2.0], [10.0, 0.1])
        y, _ = inputs(inner)
        moved = y * jnp.array([[10.0, 0.1]]) + jnp.array([[1.0, 2.0]])
        np.testing.assert_allclose(flow.log_prob(moved), inner.log_prob(y), atol=1e-4)

    def test_one_context_for_many(self):
        flow = built("affine")
        y, x = inputs(flow)
        many = flow.log_prob(y, x[0])
        np.testing.assert_allclose(many, flow.log_prob(y, jnp.broadcast_to(x[:1], x.shape)), 1e-5)

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (lambda: ConditionalRealNVP(0, 1, key=KEY), "dim is 0"),
            (lambda: ConditionalSplineFlow(2, -1, key=KEY), "context_dim"),
            (lambda: ConditionalSplineFlow(2, 1, bins=1000, key=KEY), "bins"),
            (lambda: ConditionalSplineFlow(2, 1, tail_bound=0, key=KEY), "tail_bound"),
            (lambda: ConditionalMAF(9, 1, hidden=8, key=KEY), "hidden"),
            (lambda: TrajectoryFlow(3, 1, features=2, key=KEY), "needs both"),
            (lambda: TrajectoryFlow(3, 1, width=9, heads=2, key=KEY), "multiple of heads"),
            (lambda: Permutation((0, 0)), "permutation"),
            (lambda: Chain([]), "flows is empty"),
            (lambda: Chain([Permutation((0, 1)), Permutation((0,))]), "flows disagree"),
            (lambda: StandardisedFlow(Permutation((0, 1)), [0.0], [1.0, 1.0]), "loc has shape"),
            (lambda: built("affine").forward(jnp.ones((2, 4)), jnp.ones((2, 2))), "y has shape"),
            (lambda: built("affine").forward(jnp.ones((2, 3)), jnp.ones((2, 5))), "x has shape"),
            (lambda: built("affine").forward(jnp.ones((2, 3)), None), "x is None"),
            (lambda: built("affine").forward(jnp.ones((2, 3)), jnp.ones((4, 2))), "batch axes"),
            (lambda: built("affine").sample(KEY, jnp.ones((2, 2)), 0), "n is 0"),
            (lambda: affine_coupling(jnp.ones((2, 3)), jnp.ones((2, 4)), jnp.ones(3)), "raw has"),
        ],
    )
    def test_bad_input(self, call, match):
        with pytest.raises(ValueError, match=match):
            call()


class TestFitting:
    config = FitConfig(steps=150, batch_size=64, learning_rate=1e-2)

    def test_learns_a_conditional_gaussian_and_keeps_its_input(self):
        x = jax.random.normal(KEY, (800, 1))
        y = 2 * x + 0.5 * jax.random.normal(jax.random.key(1), (800, 2))
        flow = ConditionalRealNVP(2, 1, layers=2, hidden=16, key=KEY)
        before = [np.asarray(p) for p in jax.tree.leaves(flow)]
        fitted, history = fit_flow(flow, y, x, self.config, key=KEY)
        best = 2 * (0.5 * np.log(2 * np.pi * np.e) + np.log(0.5))
        assert -float(fitted.log_prob(y, x).mean()) < best + 0.15
        assert history.loss.shape == (150,) and int(history.skipped) == 0
        assert all(map(np.array_equal, before, jax.tree.leaves(flow)))
        again, _ = fit_flow(flow, y, x, self.config, key=KEY)
        assert all(map(np.array_equal, jax.tree.leaves(fitted), jax.tree.leaves(again)))

    def test_takes_the_best_validation_parameters(self):
        y = jax.random.normal(KEY, (40, 2))
        config = FitConfig(
            steps=103, batch_size=16, learning_rate=3e-2, validation_fraction=0.5, evaluations=10
        )
        flow = ConditionalRealNVP(2, layers=2, hidden=16, key=KEY)
        fitted, history = fit_flow(flow, y, None, config, key=KEY)
        assert history.loss.shape == (103,) and history.validation.shape == (11,)
        order = jax.random.permutation(jax.random.split(KEY)[0], 40)
        start = -float(flow.log_prob(y[order[:20]]).mean())
        best = min(start, float(history.validation.min()))
        assert -float(fitted.log_prob(y[order[:20]]).mean()) == pytest.approx(best, abs=1e-4)

    def test_steps_that_are_not_finite_change_nothing(self):
        flow = ConditionalRealNVP(2, layers=2, hidden=4, key=KEY)
        config = FitConfig(steps=5, batch_size=4, validation_fraction=0.0)
        data = (jnp.full((8, 2), jnp.nan), None)
        fitted, history = fit_module(
            flow, lambda m, batch, key: -m.log_prob(batch[0], None), data, config, key=KEY
        )
        assert int(history.skipped) == 5
        assert all(map(np.array_equal, jax.tree.leaves(fitted), jax.tree.leaves(flow)))

    def test_noise_and_epochs(self):
        flow = ConditionalRealNVP(1, layers=1, hidden=4, key=KEY)
        config = FitConfig(epochs=3, batch_size=8, noise=0.1, validation_fraction=0.0)
        _, history = fit_flow(flow, jnp.arange(20.0)[:, None], None, config, key=KEY)
        assert history.loss.shape == (9,)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            (dict(steps=-1), "steps"),
            (dict(batch_size=0), "batch_size"),
            (dict(validation_fraction=1.0), "validation_fraction"),
            (dict(learning_rate=0.0), "learning_rate"),
        ],
    )
    def test_bad_settings(self, options, match):
        with pytest.raises(ValueError, match=match):
            FitConfig(**options)

    def test_bad_rows(self):
        flow = ConditionalRealNVP(1, layers=1, hidden=4, key=KEY)
        with pytest.raises(ValueError, match="y holds NaN"):
            fit_flow(flow, jnp.array([[jnp.nan], [1.0]]), key=KEY)
        with pytest.raises(ValueError, match="rows of data"):
            fit_flow(flow, jnp.ones((1, 1)), key=KEY)
