"""Synthetic plants whose causal strengths are functions of operating parameters."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxlib_papers.ops.checks import check_choice, check_count, check_positive

__all__ = ["NOISES", "ParametricData", "random_plant", "reactor9", "reactor9_strengths"]

NOISES = ("laplace", "normal", "uniform")
SHAPES = ("polynomial", "smooth")
REACTOR_EDGES = (
    *((0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 5)),
    *((4, 5), (4, 6), (5, 8), (6, 8), (6, 7)),
)

_R3, _R5 = math.sqrt(3), math.sqrt(5)


class ParametricData(NamedTuple):
    """Observations with the parameters under which they were taken, and the truth.

    Attributes:
        X: [m, n] observations, neither centred nor scaled.
        xi: [m, d] parameters.
        adjacency: bool NumPy [n, n], True at [i, j] when j -> i.
        strengths: [m, n, n] the coefficient of edge j -> i at each row.
    """

    X: Float[Array, "m n"]
    xi: Float[Array, "m d"]
    adjacency: Bool[np.ndarray, "n n"]
    strengths: Float[Array, "m n n"]


def draw_noise(key: Array, shape: tuple[int, ...], kind: str) -> Float[Array, "..."]:
    """Noise of mean 0 and variance 1."""
    check_choice("noise", kind, NOISES)
    if kind == "laplace":
        return jax.random.laplace(key, shape) / jnp.sqrt(2.0).astype(jnp.result_type(float))
    if kind == "uniform":
        return jax.random.uniform(key, shape, minval=-_R3, maxval=_R3)
    return jax.random.normal(key, shape)


def reactor9_strengths(
    xi: Float[Array, "m 3"], shape: str = "polynomial"
) -> dict[tuple[int, int], Float[Array, " m"]]:
    """The eleven coefficient functions by (cause, effect).

    Args:
        xi: parameters in [-1, 1].
        shape: "polynomial"; "smooth" replaces p1 by 1.3 tanh(2 xi) and p2 by 1.5 cos(3 xi).

    Returns:
        Strengths at each row.

    Raises:
        ValueError: another shape, or not three parameters.

    Source: OpenReview 4bnCXOtHTm, a nine-variable reactor (reconstructed).
    """
    check_choice("shape", shape, SHAPES)
    if jnp.ndim(xi) != 2 or xi.shape[1] != 3:
        raise ValueError(f"xi has shape {jnp.shape(xi)}, expected [m, 3]")
    columns = xi.T
    if shape == "polynomial":
        p1, p2 = _R3 * columns, _R5 * (3 * columns**2 - 1) / 2
    else:
        p1, p2 = 1.3 * jnp.tanh(2 * columns), 1.5 * jnp.cos(3 * columns)
    return {
        (0, 1): 0.9 + 0.4 * p1[0],
        (0, 2): 0.8 * p1[1],
        (1, 3): 0.7 + 0.3 * p2[0],
        (2, 3): 0.8 * p1[0] + 0.2 * p2[0],
        (2, 4): 0.8 + 0.3 * p1[1] * p1[0],
        (3, 5): -0.7 + 0.35 * p1[1],
        (4, 5): 0.75 * p1[1],
        (4, 6): 0.7 + 0.3 * p2[1],
        (5, 8): 0.7 + 0.3 * p2[2],
        (6, 8): -0.8 * p1[2],
        (6, 7): 0.9 + 0.35 * p1[2],
    }


@partial(jax.jit, static_argnames=("m", "noise", "shape", "correlation"))
def _run_reactor(key, noise_scale, *, m: int, noise: str, shape: str, correlation: float):
    """(X, xi, strengths, permutation) of the reactor, its nodes being in causal order."""
    keys = jax.random.split(key, 3)
    if correlation:
        z = jax.random.normal(keys[0], (m, 4))
        z = math.sqrt(1 - correlation) * z[:, :3] + math.sqrt(correlation) * z[:, 3:]
        xi = 2 * jax.scipy.stats.norm.cdf(z) - 1
    else:
        xi = jax.random.uniform(keys[0], (m, 3), minval=-1.0, maxval=1.0)
    e = draw_noise(keys[1], (m, 9), noise)
    edges = reactor9_strengths(xi, shape)
    strengths = jnp.zeros((m, 9, 9), e.dtype)
    columns = [e[:, 0]]
    for i in range(1, 9):
        column = noise_scale * e[:, i]
        for (cause, effect), b in edges.items():
            if effect == i:
                column = column + b * columns[cause]
        columns.append(column)
    for (cause, effect), b in edges.items():
        strengths = strengths.at[:, effect, cause].set(b)
    return jnp.stack(columns, axis=1), xi, strengths, jax.random.permutation(keys[2], 9)


def reactor9(
    key: Array,
    m: int,
    noise: str = "laplace",
    *,
    shape: str = "polynomial",
    noise_scale: float = 1.0,
    correlation: float = 0.0,
    permute: bool = False,
) -> ParametricData:
    """Nine variables, eleven edges, three parameters uniform on [-1, 1].

    Four of the edges have mean zero over the parameters, so a test that ignores these cannot see
    them.

    Args:
        key: PRNG key.
        m: rows.
        noise: "laplace", "uniform" or "normal", with unit variance.
        shape: of the coefficient functions, as in `reactor9_strengths`.
        noise_scale: standard deviation of the noise of all nodes but the first (which is the
            signal): larger is harder.
        correlation: between each two parameters' Gaussian copula, in [0, 1).
        permute: whether the columns come in random order, so that their order says nothing.

    Returns:
        `ParametricData`.

    Raises:
        ValueError: m < 1, an unknown noise or shape, noise_scale <= 0, correlation outside [0, 1).

    Source: OpenReview 4bnCXOtHTm, a nine-variable reactor (reconstructed).
    """
    check_count("m", m, 1)
    check_positive("noise_scale", noise_scale)
    if not 0 <= correlation < 1:
        raise ValueError(f"correlation is {correlation}, expected a number in [0, 1)")
    check_choice("noise", noise, NOISES)
    check_choice("shape", shape, SHAPES)
    scale = jnp.asarray(noise_scale, jnp.result_type(float))
    X, xi, strengths, p = _run_reactor(
        key, scale, m=m, noise=noise, shape=shape, correlation=float(correlation)
    )
    adjacency = np.zeros((9, 9), bool)
    for cause, effect in REACTOR_EDGES:
        adjacency[effect, cause] = True
    if not permute:
        return ParametricData(X, xi, adjacency, strengths)
    p = np.asarray(p)
    return ParametricData(X[:, p], xi, adjacency[np.ix_(p, p)], strengths[:, p][:, :, p])


def random_plant(
    key: Array,
    m: int,
    n: int,
    noise: str = "laplace",
    *,
    degree: float = 2.4,
    parameters: int = 3,
    max_parents: int = 3,
) -> ParametricData:
    """A random sparse graph whose edges are linear or quadratic in a random parameter.

    Half of the edges have mean zero. Columns are in random order, and the expected number of
    neighbours does not grow with n.

    Args:
        key: PRNG key.
        m: rows.
        n: nodes, >= 2.
        noise: as in `reactor9`.
        degree: expected number of neighbours of a node.
        parameters: number d of parameters, uniform on [-1, 1].
        max_parents: most parents of a node.

    Returns:
        `ParametricData`.

    Raises:
        ValueError: a size below its least value, or an unknown noise.

    Source: larger plants in the manner of OpenReview 4bnCXOtHTm's reactor (reconstructed).
    """
    for name, value, low in (("m", m, 1), ("n", n, 2), ("parameters", parameters, 1)):
        check_count(name, value, low)
    check_positive("degree", degree)
    k_xi, k_noise, k_graph = jax.random.split(key, 3)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(k_graph)).astype(np.uint32).tolist())
    xi = np.asarray(jax.random.uniform(k_xi, (m, parameters), minval=-1.0, maxval=1.0))
    X = np.array(draw_noise(k_noise, (m, n), noise))
    adjacency, strengths = np.zeros((n, n), bool), np.zeros((m, n, n), X.dtype)
    order = rng.permutation(n)
    for place in range(1, n):
        earlier = order[max(0, place - 12) : place]
        chance = min(1.0, degree / 2 / len(earlier))
        chosen = rng.permutation(earlier[rng.random(len(earlier)) < chance])[:max_parents]
        for j in chosen:
            p = _R3 * xi[:, int(rng.integers(parameters))]
            if rng.random() < 0.3:
                p = _R5 * (p * p - 1) / 2
            sign = float(rng.choice([-1.0, 1.0]))
            b = 0.75 * p if rng.random() < 0.5 else 0.7 + 0.35 * p
            i = int(order[place])
            adjacency[i, j], strengths[:, i, j] = True, sign * b
            X[:, i] += strengths[:, i, j] * X[:, j]
    return ParametricData(jnp.asarray(X), jnp.asarray(xi), adjacency, jnp.asarray(strengths))
