"""Rational-quadratic splines: golden vectors, inverse, derivative, and hostile input."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxlib_papers.ops.splines import MIN_BIN, identity_slope, rational_quadratic_spline

VECTORS = np.load(Path(__file__).parents[1] / "vectors" / "japan.npz")
NAMES = ("x", "widths", "heights", "derivs")


def parameters(seed: int, size: int, bins: int, scale: float = 1.0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((size, bins), (size, bins), (size, bins - 1))
    return [scale * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(("k", "tolerance"), [(0, 1e-10), (1, 2e-4)])
def test_golden(k, tolerance):
    with jax.enable_x64(k == 0):
        case = {n: VECTORS[f"rqs/{k}/{n}"] for n in (*NAMES, "y", "logdet", "inv_x", "inv_logdet")}
        grads = [VECTORS[f"rqs/{k}/g_{n}"] for n in "xwhd"]
        bound = float(VECTORS[f"rqs/{k}/tail_bound"])
        args = [case[n] for n in NAMES]
        assert float(args[0][0]) == bound and float(args[0][1]) == -bound

        def total(*args):
            y, logdet = rational_quadratic_spline(*args, tail_bound=bound)
            return jnp.sum(y**2) + jnp.sum(logdet), (y, logdet)

        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))
        ours, (y, logdet) = compiled(*args)
        assert y.dtype == case["y"].dtype
        close = dict(rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(y, case["y"], **close)
        np.testing.assert_allclose(logdet, case["logdet"], **close)
        for got, wanted in zip(ours, grads, strict=True):
            np.testing.assert_allclose(got, wanted, **close)
        back, inverse_logdet = rational_quadratic_spline(
            case["y"], *args[1:], inverse=True, tail_bound=bound
        )
        np.testing.assert_allclose(back, case["inv_x"], **close)
        np.testing.assert_allclose(inverse_logdet, case["inv_logdet"], **close)


@pytest.mark.parametrize(("bins", "bound"), [(1, 2.0), (2, 0.5), (8, 5.0)])
def test_inverse_and_derivative(bins, bound):
    x = jnp.linspace(-1.5 * bound, 1.5 * bound, 200)

    @jax.jit
    def everything(w, h, d):
        def spline(x, **options):
            return rational_quadratic_spline(x, w, h, d, tail_bound=bound, **options)

        y, logdet = spline(x)
        slope = jax.grad(lambda x: jnp.sum(spline(x)[0]))(x)
        return y, logdet, *spline(y, inverse=True), slope

    for seed, scale in enumerate((0.0, 0.5, 1.0, 2.0, 3.0)):
        y, logdet, back, inverse_logdet, slope = everything(*parameters(seed, 200, bins, scale))
        # What rounding of y does to x is as large as the inverse is steep.
        slack = 1e-5 * bound * np.maximum(1, np.exp(-np.asarray(logdet)))
        assert (np.abs(back - x) <= slack).all()
        np.testing.assert_allclose(inverse_logdet, -logdet, atol=0.03 * np.exp(scale))
        np.testing.assert_allclose(np.log(slope), logdet, atol=1e-3)
        outside = jnp.abs(x) > bound
        np.testing.assert_array_equal(y[outside], x[outside])
        assert not logdet[outside].any()


@pytest.mark.parametrize("inverse", [False, True])
def test_written_out_derivative_in_both_modes_and_twice(inverse):
    """Against finite differences in float64, and under `vmap`."""
    with jax.enable_x64(True):
        x = jnp.array([-2.5, -1.0, 0.3, 1.9, 4.0])
        args = [p.astype(jnp.float64) for p in parameters(2, 5, 4)]

        @jax.jit
        def spline(*args):
            return rational_quadratic_spline(*args, inverse=inverse, tail_bound=3.0)

        check_grads(spline, (x, *args), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
        one_by_one = jax.vmap(jax.jacrev(spline, argnums=1))(x, *args)
        together = jax.jacfwd(spline, argnums=1)(x, *args)
        for single, whole in zip(one_by_one, together, strict=True):
            np.testing.assert_allclose(single, whole[np.arange(5), np.arange(5)], atol=1e-12)


def test_identity():
    x = jnp.linspace(-7, 7, 101)
    zero = jnp.zeros((101, 8))
    y, logdet = rational_quadratic_spline(x, zero, zero, jnp.full((101, 7), identity_slope()))
    np.testing.assert_allclose(y, x, atol=2e-6)
    np.testing.assert_allclose(logdet, 0, atol=2e-6)


def knots_of(w: jax.Array, bound: float) -> jax.Array:
    share = MIN_BIN + (1 - w.shape[-1] * MIN_BIN) * jax.nn.softmax(w, axis=-1)
    return 2 * bound * jnp.cumsum(share, axis=-1) - bound


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("inverse", [False, True])
def test_finite_at_knots_bounds_and_far_away(dtype, scale, inverse):
    bound = 3.0
    w, h, d = [p[0] for p in parameters(5, 1, 6, scale)]
    special = [0.0, bound, -bound, 1e6, -1e6, 1e-30, bound * (1 + 1e-6), -bound * (1 + 1e-6)]
    special += [bound * (1 - 1e-6), -bound * (1 - 1e-6)]
    x = jnp.concatenate([jnp.array(special), *(knots_of(v, bound) for v in (w, h))]).astype(dtype)
    args = [jnp.broadcast_to(p, (len(x), len(p))).astype(dtype) for p in (w, h, d)]

    def total(x, *args):
        y, logdet = rational_quadratic_spline(x, *args, inverse=inverse, tail_bound=bound)
        return jnp.sum(jnp.tanh(y)) + jnp.sum(logdet), (y, logdet)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))
    grads, (y, logdet) = compiled(x, *args)
    for array in (y, logdet, *grads):
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert y.dtype == jnp.float32 and all(g.dtype == dtype for g in grads)
    assert float(y[3]) == float(x[3]) and float(logdet[3]) == 0.0


def test_nan_is_not_hidden():
    w, h, d = parameters(0, 1, 4)
    y, _ = rational_quadratic_spline(jnp.array([jnp.nan]), w, h, d)
    assert np.isnan(y[0])


@pytest.mark.parametrize(
    ("shapes", "bound", "match"),
    [
        (((3,), (3, 1000), (3, 1000), (3, 999)), 5.0, "1000 bins"),
        (((3,), (3, 8), (3, 8), (3, 8)), 5.0, "d has shape"),
        (((3,), (3, 8), (3, 7), (3, 7)), 5.0, "h has shape"),
        (((3,), (2, 8), (2, 8), (2, 7)), 5.0, "w has shape"),
        (((3,), (3, 8), (3, 8), (3, 7)), 0.0, "tail_bound"),
    ],
)
def test_bad_input(shapes, bound, match):
    with pytest.raises(ValueError, match=match):
        rational_quadratic_spline(*map(jnp.zeros, shapes), tail_bound=bound)
