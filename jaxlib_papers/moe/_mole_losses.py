"""Losses on the routing of LoRA experts: balance, sparsity and ReMoE's penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxlib_papers.moe._mole_routing import lambda_interval
from jaxlib_papers.ops.checks import as_float, check_count, check_shape
from jaxlib_papers.ops.masked import divide_or_zero

__all__ = [
    "dynamic_load_balance",
    "lambda_penalty",
    "relu_l1_penalty",
    "remoe_coefficient_update",
    "router_sparsity",
    "sparsity_loss",
]


def _token_weights(shape: tuple[int, ...], mask: ArrayLike | None, dtype) -> tuple[Array, int]:
    """Weights of tokens, and how many of the last axes of `shape` they lie on.

    A mask lies on the last axes; without one, arrays of three axes or more are stacks of modules of
    [batch, seq] tokens, and others are tokens only.
    """
    if mask is None:
        axes = 2 if len(shape) > 2 else len(shape)
        return jnp.ones(shape[len(shape) - axes :], dtype), axes
    mask = jnp.asarray(mask)
    check_shape("mask", mask, shape[len(shape) - mask.ndim :], "one entry a token")
    return mask.astype(dtype), mask.ndim


def _module_rows(
    p: Float[ArrayLike, "*modules_tokens E"], mask: ArrayLike | None
) -> tuple[Array, Array]:
    """Returns p as [modules, tokens, E] with what is masked out at 0, and the weights [tokens]."""
    p = as_float(p)
    if p.ndim < 1 or p.shape[-1] < 1:
        raise ValueError(f"p has shape {p.shape}, expected at least one expert on the last axis")
    weights, axes = _token_weights(p.shape[:-1], mask, p.dtype)
    weights = weights.reshape(-1)
    rows = p.reshape(*p.shape[: p.ndim - 1 - axes], weights.size, p.shape[-1])
    rows = rows.reshape(-1, weights.size, p.shape[-1])
    return jnp.where(weights[None, :, None] != 0, rows, 0), weights


def _token_mean(values: Array, mask: ArrayLike | None) -> Array:
    weights, axes = _token_weights(values.shape, mask, values.dtype)
    rows = values.reshape(-1, weights.size)
    del axes
    weights = weights.reshape(1, -1)
    rows = jnp.where(weights != 0, rows, 0)
    modules = max(rows.shape[0], 1)
    return divide_or_zero(jnp.sum(rows * weights), jnp.sum(weights) * modules)


def dynamic_load_balance(
    p: Float[ArrayLike, "*modules_tokens E"], mask: ArrayLike | None = None
) -> Float[Array, ""]:
    """Load balance for a varying number of active experts: E sum_i f_i P_i, 1 at balance.

    f_i is the share of expert i in all activations (p > 0) of the module, which has no gradient;
    P_i is its mean weight. Uniform dense weights give 1, collapse onto one expert gives E.

    Args:
        p: expert weights, [T, E], [B, S, E] or stacked modules [M, B, S, E] (with a mask, all axes
            before its own are modules).
        mask: bool or 0/1, one entry a token; padding counts nowhere. None counts all.

    Returns:
        A scalar, the mean over modules; 0 where nothing is active or no token is valid.

    Raises:
        ValueError: the mask doesn't fit.

    Source: arXiv 2509.25684, L_lb.
    """
    rows, weights = _module_rows(p, mask)
    active = (rows > 0).astype(rows.dtype) * weights[None, :, None]
    counts = jnp.sum(active, axis=1)
    share = divide_or_zero(counts, jnp.sum(counts, axis=-1, keepdims=True))
    mean = divide_or_zero(
        jnp.sum(rows * weights[None, :, None], axis=1), jnp.sum(weights)[None, None]
    )
    return rows.shape[-1] * jnp.mean(jnp.sum(lax.stop_gradient(share) * mean, axis=-1))


def sparsity_loss(
    lam: Float[ArrayLike, "*tokens"],
    u: Float[ArrayLike, "*tokens E"],
    k: int,
    mask: ArrayLike | None = None,
) -> Float[Array, ""]:
    """Mean over tokens of relu(lower(k) - lam): 0 iff at most k experts are active everywhere.

    Only the lambda head learns from it: the logits are behind a stop-gradient. For a token with
    more than k active experts d/dlam is -1 / number of tokens.

    Args:
        lam: lambda of each token; axes before those of the mask are modules.
        u: the gate logits that it was used with.
        k: largest number of active experts, 1..E - 1, static.
        mask: bool or 0/1 on the last axes of lam; None counts all, as the authors' code does.

    Returns:
        A scalar, the mean over modules; 0 when no token is valid.

    Raises:
        ValueError: k not in 1..E - 1, shapes that disagree.

    Source: arXiv 2509.25684, L_sparse (proposition 2); the mask (reconstructed).
    """
    lam, u = as_float(lam, u)
    check_shape("lam", lam, u.shape[:-1], "one entry a token of u")
    check_count("k", k, 1, u.shape[-1] - 1)
    lower, _ = lambda_interval(lax.stop_gradient(u), k)
    return _token_mean(jax.nn.relu(lower - lam), mask)


def lambda_penalty(
    lam: Float[ArrayLike, "*tokens"], mask: ArrayLike | None = None
) -> Float[Array, ""]:
    """Mean over tokens and modules of 1 - lam, the second penalty of the authors' code.

    Args:
        lam: lambda of each token; axes before those of the mask are modules.
        mask: bool or 0/1 on the last axes of lam; None counts all.

    Returns:
        A positive scalar, 0 when no token is valid.

    Raises:
        ValueError: the mask doesn't fit.

    Source: arXiv 2509.25684, code (lambda sparsity term); the mask (reconstructed).
    """
    return _token_mean(1 - as_float(lam), mask)


def relu_l1_penalty(
    p: Float[ArrayLike, "*modules_tokens E"], k: int, mask: ArrayLike | None = None
) -> Float[Array, ""]:
    """ReMoE's balanced L1 penalty: mean over modules and tokens of sum_e f_e p_e.

    f_e = E / (k T) times the number of tokens that activate expert e (no gradient), so that busy
    experts are pushed down more.

    Args:
        p: weights of the "relu" router, shapes as in `dynamic_load_balance`.
        k: experts that should be active per token on average.
        mask: bool or 0/1, one entry a token.

    Returns:
        A scalar, to be weighted by the coefficient of `remoe_coefficient_update`; 0 for no token.

    Raises:
        ValueError: k not in 1..E, the mask doesn't fit.

    Source: ReMoE's router as the baseline of arXiv 2509.25684 (reconstructed).
    """
    rows, weights = _module_rows(p, mask)
    check_count("k", k, 1, rows.shape[-1])
    tokens = jnp.sum(weights)
    counts = jnp.sum((rows > 0).astype(rows.dtype) * weights[None, :, None], axis=1)
    load = rows.shape[-1] / k * divide_or_zero(counts, tokens[None, None])
    sums = jnp.sum(rows * weights[None, :, None], axis=1)
    return divide_or_zero(jnp.mean(jnp.sum(lax.stop_gradient(load) * sums, axis=-1)), tokens)


def router_sparsity(
    p: Float[ArrayLike, "*modules_tokens E"], mask: ArrayLike | None = None
) -> Float[Array, ""]:
    """Share of expert weights that are 0, over valid tokens and modules; no gradient.

    Args:
        p: expert weights, shapes as in `dynamic_load_balance`.
        mask: bool or 0/1, one entry a token.

    Returns:
        A scalar in [0, 1]; 0 when no token is valid.

    Raises:
        ValueError: the mask doesn't fit.

    Source: arXiv 2509.25684, sparsity in ReMoE's coefficient update (reconstructed).
    """
    rows, weights = _module_rows(p, mask)
    zero = (rows == 0).astype(rows.dtype) * weights[None, :, None]
    cells = jnp.sum(weights) * rows.shape[0] * rows.shape[-1]
    return lax.stop_gradient(divide_or_zero(jnp.sum(zero), cells))


def remoe_coefficient_update(
    coef: Float[ArrayLike, ""], sparsity: Float[ArrayLike, ""], k: int, E: int, a: float = 1.2
) -> Float[Array, ""]:
    """Next coefficient of ReMoE's penalty: coef * a^sign((1 - k / E) - sparsity).

    It grows while fewer than 1 - k / E of the weights are 0, and shrinks above; start at 1e-8.

    Args:
        coef: present coefficient, >= 0.
        sparsity: share of weights that are 0 (`router_sparsity`).
        k: experts that should be active per token on average.
        E: experts.
        a: factor of one step, > 1.

    Returns:
        The next coefficient, float32 (float64 for float64 input).

    Raises:
        ValueError: k not in 1..E, or a not above 1.

    Source: ReMoE's rule as the baseline of arXiv 2509.25684 (reconstructed).
    """
    check_count("E", E, 1)
    check_count("k", k, 1, E)
    if not a > 1:
        raise ValueError(f"a is {a}, expected a factor above 1")
    coef, sparsity = as_float(coef, sparsity)
    return jnp.multiply(
        coef, jnp.power(jnp.asarray(a, coef.dtype), jnp.sign((1 - k / E) - sparsity))
    )
