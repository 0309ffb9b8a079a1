"""The conditional independence test: does Cov(X_a, X_b | X_Z, xi) vanish for almost all xi?"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlib_papers.causal._features import (
    gram_blocks,
    interaction_features,
    solve_refined,
    solve_spd,
    subset_system,
)
from jaxlib_papers.ops.checks import as_float, check_nonnegative, is_concrete

__all__ = ["CITest", "PCTIndependence", "pct_ci_test", "rows_needed"]


class CITest(NamedTuple):
    """Result of `pct_ci_test`.

    Attributes:
        stat: T, asymptotically chi-squared under independence.
        df: degrees of freedom, the number P of basis functions.
        pvalue: upper tail of the chi-squared distribution at T.
        coef: [P] coefficients of the conditional covariance as a function of xi; the sum of their
            squares is the effect ||C||^2.
    """

    stat: Float[Array, ""]
    df: int
    pvalue: Float[Array, ""]
    coef: Float[Array, " P"]


def rows_needed(basis: int, conditioned: int) -> int:
    """Fewest rows with which a test on `conditioned` variables and `basis` functions can be run."""
    return basis * (conditioned + 1) + 1


def _check_rows(m: int, basis: int, conditioned: int) -> None:
    if m < rows_needed(basis, conditioned):
        raise ValueError(
            f"m is {m} rows for {basis * (conditioned + 1)} features ({basis} basis functions "
            f"times {conditioned} conditioning variables and the constant); bring at least "
            f"{rows_needed(basis, conditioned)} rows (the level of the test needs several times "
            "that), or lower the degree, q or the number of conditioning variables"
        )


def _statistic(C, second, m: int, reg: float):
    """T = m C' S_reg^-1 C from the mean and the second moment of v; 0 where v does not vary."""
    P = C.shape[-1]
    S = (second - C[..., :, None] * C[..., None, :]) * (m / (m - 1))
    trace = jnp.trace(S, axis1=-2, axis2=-1)
    varies = trace > 0
    safe = jnp.where(varies, trace, P)[..., None, None]
    eye = jnp.broadcast_to(jnp.eye(P, dtype=C.dtype), S.shape)
    # Division by the trace first: T does not depend on the scale of v, which may be tiny.
    S = jnp.where(varies[..., None, None], S * (P / safe), eye) + reg * eye
    scaled = C * jnp.sqrt(P / safe[..., 0])
    solved, _ = solve_spd(S, scaled[..., None])
    return jnp.where(varies, m * jnp.sum(scaled * solved[..., 0], axis=-1), 0)


def _clean(residual, x):
    """The residual, exactly 0 where the conditioning variables explain x to rounding."""
    eps = jnp.finfo(x.dtype).eps
    floor = jnp.maximum(jnp.asarray(1e-12, x.dtype), (16 * eps) ** 2)
    kept = jnp.sum(residual**2, axis=-1) > floor * jnp.sum(x**2, axis=-1)
    return jnp.where(kept[..., None], residual, 0)


def pct_ci_test(
    x_a: Float[Array, " m"],
    x_b: Float[Array, " m"],
    Z: Float[Array, "m k"] | None,
    Psi: Float[Array, "m P"],
    *,
    constant: bool = True,
    ridge: float = 1e-8,
    reg: float = 1e-6,
) -> CITest:
    """Tests whether x_a and x_b are independent given Z, for almost every value of the parameters.

    Both variables are regressed on {X_k Psi_alpha} (and {Psi_alpha}); the product of the residuals
    is projected on the basis, and the squared length of that projection, in units of its own
    covariance, is compared with a chi-squared distribution with P degrees of freedom. The
    covariance is estimated without assuming constant noise, so with P = 1 this is a
    heteroscedasticity-robust test of the partial correlation.

    Args:
        x_a: one variable, centred.
        x_b: the other.
        Z: conditioning variables; None or [m, 0] for none.
        Psi: basis functions; the first is the constant. Do not centre them.
        constant: whether the means may move with xi (reconstructed default).
        ridge: times m, added to the normal equations (reconstructed).
        reg: relative regularisation of the covariance; 0 makes T exactly invariant to the choice
            of an orthonormal basis.

    Returns:
        `CITest`. A variable that the conditioning set explains entirely has T = 0 and p = 1.

    Raises:
        ValueError: rows that differ, NaN in values that are at hand, or m <= P (k + 1), with the
            number of rows needed.

    Source: OpenReview 4bnCXOtHTm, stage 1; ridge, constant block and reg (reconstructed).
    """
    x_a, x_b, Psi = as_float(x_a, x_b, Psi)
    m = Psi.shape[0]
    Z = jnp.zeros((m, 0), Psi.dtype) if Z is None else jnp.asarray(Z)
    Z = Z[:, None] if Z.ndim == 1 else Z
    for name, value, shape in (
        ("x_a", x_a, (m,)),
        ("x_b", x_b, (m,)),
        ("Z", Z, (m, Z.shape[-1])),
        ("Psi", Psi, (m, Psi.shape[-1])),
    ):
        if value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}, expected {shape} for {m} rows")
        if is_concrete(value) and not bool(jnp.isfinite(value).all()):
            raise ValueError(f"{name} has values that are not finite; drop or impute those rows")
    check_nonnegative("ridge", ridge)
    check_nonnegative("reg", reg)
    P, k = Psi.shape[1], Z.shape[1]
    _check_rows(m, P, k)
    options = {"constant": constant, "ridge": ridge, "reg": reg}
    stat, pvalue, coef = _single_test(x_a, x_b, Z.astype(Psi.dtype), Psi, **options)
    return CITest(stat, P, pvalue, coef)


@partial(jax.jit, static_argnames=("constant", "ridge", "reg"))
def _single_test(x_a, x_b, Z, Psi, *, constant, ridge, reg):
    m, P, k = *Psi.shape, Z.shape[1]
    both = jnp.stack([x_a, x_b], axis=1)
    F = interaction_features(Z, Psi, range(k), constant)
    residuals = both
    if F.shape[1]:
        system = F.T @ F + ridge * m * jnp.eye(F.shape[1], dtype=F.dtype)
        residuals = both - F @ solve_refined(system, F.T @ both)[0]
    r_a, r_b = _clean(residuals.T, both.T)
    product = r_a * r_b
    coef = product @ Psi / m
    weighted = Psi * product[:, None]
    stat = _statistic(coef, weighted.T @ weighted / m, m, reg)
    half = jnp.asarray(P / 2, stat.dtype)
    return stat, jax.scipy.special.gammaincc(half, stat / 2), coef


@partial(jax.jit, static_argnames=("ridge", "constant"))
def _residual_batch(columns, Psi, blocks, targets, z, *, ridge, constant):
    """[S, m] residuals of `targets` [S], each regressed on its own (padded) set z [S, k]."""
    m, P = Psi.shape
    n = columns.shape[0] - 2
    first = jnp.full((z.shape[0], 1), n if constant else n + 1, z.dtype)
    given = jnp.concatenate([first, z], axis=1)

    def coefficients(chosen, target):
        system, rhs, _, _ = subset_system(blocks, chosen, target[None])
        system = system + ridge * m * jnp.eye(system.shape[0], dtype=system.dtype)
        return solve_refined(system, rhs)[0].reshape(-1, P)

    beta = jax.vmap(coefficients)(given, targets)  # [S, K, P]
    strength = (beta.reshape(-1, P) @ Psi.T).reshape(*given.shape, m)
    x = columns[targets]
    return _clean(x - jnp.sum(strength * columns[given], axis=1), x)


@partial(jax.jit, static_argnames="reg")
def _test_batch(residuals, Psi, pairs, a, b, *, reg):
    """T and coefficients of tests, whose residuals are rows a and b of the blocks given."""
    m, P = Psi.shape
    rows, cols = np.triu_indices(P)
    residuals = jnp.concatenate(residuals)
    product = residuals[a] * residuals[b]
    coef = product @ Psi / m
    upper = (product * product) @ pairs / m
    place = np.zeros((P, P), np.int32)  # of each entry of the symmetric matrix among the pairs
    place[rows, cols] = place[cols, rows] = np.arange(len(rows))
    second = upper[:, place.ravel()].reshape(-1, P, P)
    return _statistic(coef, second, m, reg), coef


@jax.jit
def _prepare(X, Psi):
    """Columns with the constant and the padding below them; products of basis functions."""
    m = X.shape[0]
    ends = jnp.stack([jnp.ones(m, X.dtype), jnp.zeros(m, X.dtype)])
    rows, cols = np.triu_indices(Psi.shape[1])
    return jnp.concatenate([X.T, ends]), Psi[:, rows] * Psi[:, cols]


class PCTIndependence:
    """`pct_ci_test` on one data set, for `pc_skeleton`: single tests and batches of them.

    A batch gathers its normal equations from one Gram matrix, computes each residual once however
    many tests share it, and turns the covariances of all its tests into one matrix product with the
    m x P(P+1)/2 matrix of products of basis functions.

    Args:
        X: [m, n] observations, centred.
        Psi: [m, P] basis functions.
        constant: as in `pct_ci_test`.
        ridge: as in `pct_ci_test`.
        reg: as in `pct_ci_test`.
    """

    BUDGET = 1 << 22  # numbers in the largest intermediate array

    def __init__(self, X, Psi, *, constant: bool = True, ridge: float = 1e-8, reg: float = 1e-6):
        X, Psi = as_float(X, Psi)
        self.basis = Psi.shape[1]
        self._psi = Psi
        self._columns, self._pairs = _prepare(X, Psi)
        self._blocks = gram_blocks(X, Psi)
        self._regression = {"constant": constant, "ridge": ridge}
        self._reg = reg
        self.tests = 0

    def __call__(self, a: int, b: int, z: tuple[int, ...] = ()) -> float:
        """P-value of one test."""
        return float(self.batch(np.array([a]), np.array([b]), np.array([z], np.int64))[0])

    def statistics(self, a, b, z) -> tuple[np.ndarray, np.ndarray]:
        """T [tests] and coefficients [tests, P]."""
        a, b = (np.asarray(v, np.int32) for v in (a, b))
        z = np.asarray(z, np.int32).reshape(len(a), -1)
        m, n = self._psi.shape[0], self._columns.shape[0] - 2
        _check_rows(m, self.basis, z.shape[1])
        z = np.where(z < 0, n + 1, z).astype(np.int32)
        size = max(8, min(256, 1 << int(np.log2(self.BUDGET / (2 * m * (z.shape[1] + 1)) + 1))))
        # Tests with the same z side by side: they share residuals.
        order = np.lexsort(z.T) if z.shape[1] else np.arange(len(a))
        stats, coefs = np.empty(len(a)), np.empty((len(a), self.basis))
        for start in range(0, len(a), size):
            part = order[start : start + size]
            count = len(part)
            wanted = np.concatenate([np.column_stack([v[part], z[part]]) for v in (a, b)])
            unique, place = np.unique(wanted, axis=0, return_inverse=True)
            rows = np.pad(place.reshape(2, count).astype(np.int32), ((0, 0), (0, size - count)))
            residuals = self._residuals(unique, size // 2)
            stat, coef = _test_batch(residuals, self._psi, self._pairs, *rows, reg=self._reg)
            stats[part], coefs[part] = np.asarray(stat)[:count], np.asarray(coef)[:count]
        self.tests += len(a)
        return stats, coefs

    def _residuals(self, unique: np.ndarray, size: int) -> list[Array]:
        """Four blocks of `size` residuals of (target, z) pairs; what is not needed is 0."""
        blocks = []
        for start in range(0, len(unique), size):
            part = unique[start : start + size]
            part = np.concatenate([part, np.repeat(part[:1], size - len(part), axis=0)])
            data = (self._columns, self._psi, self._blocks)
            blocks.append(_residual_batch(*data, part[:, 0], part[:, 1:], **self._regression))
        return blocks + [jnp.zeros_like(blocks[0])] * (4 - len(blocks))

    def batch(
        self, a: Int[np.ndarray, " T"], b: Int[np.ndarray, " T"], z: Int[np.ndarray, "T k"]
    ) -> Float[np.ndarray, " T"]:
        """P-values of many tests; -1 in z is an empty slot."""
        from scipy.special import chdtrc

        return chdtrc(self.basis, self.statistics(a, b, z)[0])
