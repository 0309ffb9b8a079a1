"""Routing of LD-MoLE: Sparsegen, its intervals, the lambda head and the other routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import (
    as_float,
    check_choice,
    check_count,
    check_shape,
    is_concrete,
)
from kernels_pallas.sparsegen import sparsegen as _sparsegen

__all__ = [
    "HEAD_LEAVES",
    "ROUTERS",
    "Router",
    "check_eps",
    "fields_of",
    "gate_and_head",
    "lambda_head",
    "lambda_interval",
    "product_in_full",
    "route",
    "sparsegen",
    "sparsegen_threshold",
    "sparsemax",
]

ROUTERS = ("sparsegen", "topk", "relu", "softmax", "fixed_sparsegen")
HEAD_LEAVES = ("W1", "b1", "W2", "b2")
_NOWHERE = -1e30
"""Logit of an expert that a layer doesn't have: finite, so that intervals stay free of NaN."""


@dataclass(frozen=True)
class Router:
    """How gate logits become expert weights.

    Attributes:
        kind: "sparsegen" (LD-MoLE: lambda from the head), "fixed_sparsegen" (one lambda for all
            tokens), "topk" (MoLA: softmax over the selected logits), "relu" (ReMoE: unnormalised,
            may be all zero) or "softmax" (dense).
        top_k: experts per token of "topk".
        lam: lambda of "fixed_sparsegen", below 1; 0 is sparsemax.
    """

    kind: str = "sparsegen"
    top_k: int = 2
    lam: float = 0.0

    def __post_init__(self) -> None:
        check_choice("router", self.kind, ROUTERS)
        check_count("Router.top_k", self.top_k, 1)
        if not self.lam < 1:
            raise ValueError(f"Router.lam is {self.lam}, expected a number below 1")

    @classmethod
    def of(cls, router: Router | str) -> Router:
        """A router from its name, or the router itself."""
        return router if isinstance(router, Router) else cls(router)

    @property
    def uses_head(self) -> bool:
        """Whether a lambda head is part of it."""
        return self.kind == "sparsegen"


def sparsegen(
    u: Float[ArrayLike, "*batch E"],
    lam: Float[ArrayLike, "*batch"] | float,
    axis: int = -1,
    denom_floor: float | None = None,
) -> Float[Array, "*batch E"]:
    """Sparse distribution p = max(u - tau, 0) / (1 - lam): the simplex projection of u / (1 - lam).

    lam = 0 is sparsemax, lam -> 1 puts all weight on the largest logit, lam -> -inf is uniform. The
    computation is float32 (float64 for float64 input) and is cast back; the VJP is a closed form
    that gives 0 where p is 0. Degenerate input: E = 1 gives 1, equal logits get equal weight, a
    traced lam >= 1 gives the limit with zero gradients.

    Args:
        u: router logits; any shape.
        lam: below 1; a scalar or the shape of u without `axis`.
        axis: axis of the experts.
        denom_floor: smallest divisor; where 1 - lam is below it, p sums to (1 - lam) / denom_floor
            and the divisor has no gradient (the authors use 1e-2, which their head never reaches).

    Returns:
        p with the shape and dtype of u; at least one entry is positive and rows sum to 1.

    Raises:
        ValueError: a lam that can be read is >= 1 or doesn't broadcast, E = 0, u is not floating.

    Source: arXiv 2509.25684, Sparsegen; the Jacobian is a derivation of ours (reconstructed).
    """
    return _sparsegen(jnp.asarray(u), lam, axis=axis, denom_floor=denom_floor)


def sparsemax(u: Float[ArrayLike, "*batch E"]) -> Float[Array, "*batch E"]:
    """Euclidean projection of logits on the simplex: `sparsegen` with lam = 0.

    Args:
        u: logits, experts last.

    Returns:
        p with the shape and dtype of u.

    Raises:
        ValueError: E = 0.

    Source: arXiv 2509.25684, lam = 0 (Martins and Astudillo, arXiv 1602.02068).
    """
    return sparsegen(u, 0.0)


def _check_lam(u: Array, lam: Any) -> Array:
    """Returns lam in the dtype and batch shape of the (already converted) logits."""
    if u.ndim < 1 or u.shape[-1] < 1:
        raise ValueError(f"u has shape {u.shape}, expected at least one expert on the last axis")
    if is_concrete(lam) and np.any(np.asarray(lam) >= 1):
        raise ValueError(f"lam is {np.max(np.asarray(lam))}, expected values below 1")
    if np.ndim(lam):
        check_shape("lam", lam, u.shape[:-1], "one entry a token of u")
    return jnp.broadcast_to(jnp.asarray(lam).astype(u.dtype), u.shape[:-1])


def sparsegen_threshold(
    u: Float[ArrayLike, "*batch E"], lam: Float[ArrayLike, "*batch"] | float
) -> tuple[Float[Array, "*batch"], Int[Array, "*batch"]]:
    """Threshold tau and number k of active experts of `sparsegen`.

    Args:
        u: router logits.
        lam: below 1; a scalar or one entry a token.

    Returns:
        (tau, k): tau float32 (float64 for float64 input), k int32 from 1 to E. An entry with
        u = tau exactly is not active.

    Raises:
        ValueError: as `sparsegen`.

    Source: arXiv 2509.25684, steps 2 and 3 of Sparsegen, in a form without a sort.
    """
    u = as_float(u)
    lam = _check_lam(u, lam)
    top = jnp.max(u, axis=-1, keepdims=True)
    v, slack = u - lax.stop_gradient(top), 1 - lam
    above = jnp.sum(jnp.maximum(v[..., None, :] - v[..., :, None], 0), axis=-1)
    member = above < slack[..., None]
    k = jnp.sum(member, axis=-1, dtype=jnp.int32)
    total = jnp.sum(jnp.where(member, v, 0), axis=-1)
    tau = (total - slack) / jnp.maximum(k, 1).astype(u.dtype)
    return tau + lax.stop_gradient(top)[..., 0], k


def lambda_interval(
    u: Float[ArrayLike, "*batch E"], k: int
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The interval [lower, upper) of lambda in which exactly k experts are active.

    lower(k) = 1 - (U_k - k u_(k+1)) and upper(k) = 1 - (U_k - k u_(k)), with u sorted downwards and
    U its running sums; lower(k) = upper(k + 1), upper(1) = 1, lower(E) = -inf. Equal neighbours
    make it empty.

    Args:
        u: router logits.
        k: 1..E, static.

    Returns:
        (lower, upper), one entry a token, float32 (float64 for float64 input).

    Raises:
        ValueError: k not in 1..E.

    Source: arXiv 2509.25684, proposition 2.
    """
    u = as_float(u)
    if u.ndim < 1 or u.shape[-1] < 1:
        raise ValueError(f"u has shape {u.shape}, expected at least one expert on the last axis")
    experts = u.shape[-1]
    check_count("k", k, 1, experts)
    best, _ = lax.top_k(u, min(k + 1, experts))
    # Differences to the k-th (k + 1-th) logit: no large numbers cancel, upper(1) is 1 exactly.
    upper = 1 - jnp.sum(best[..., :k] - best[..., k - 1 : k], axis=-1)
    if k == experts:
        return jnp.full_like(upper, -jnp.inf), upper
    return 1 - jnp.sum(best[..., :k] - best[..., k : k + 1], axis=-1), upper


def check_eps(eps: float) -> None:
    """Raises ValueError unless eps is inside (0, 1)."""
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}, expected a number in (0, 1)")


def fields_of(params: Any, names: tuple[str, ...], what: str) -> tuple[Array, ...]:
    """Arrays of a mapping or of an object's attributes, by name."""
    found = {
        name: params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
        for name in names
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(f"{what} lacks {missing}, expected arrays {list(names)}")
    return tuple(jnp.asarray(value[...]) for value in found.values())


def product_in_full(x: Array, w: Array, axis: int) -> Array:
    """Product of x [rows, D] and w along `axis` of w; operands of a router stay float32 on TPU."""
    return lax.dot_general(x, w, (((1,), (axis,)), ((), ())), precision=lax.Precision.HIGHEST)


def _check_head(params: Mapping[str, Array] | Any, x: Array, eps: float) -> tuple[Array, ...]:
    """The head's arrays in one dtype with x, checked."""
    check_eps(eps)
    x, w1, b1, w2, b2 = as_float(x, *fields_of(params, HEAD_LEAVES, "lambda head"))
    if w1.ndim != 2 or x.ndim < 1 or w1.shape[1] != x.shape[-1]:
        raise ValueError(
            f"W1 has shape {w1.shape}, expected [hidden, {x.shape[-1] if x.ndim else 1}] for "
            f"x of shape {x.shape}; use the head of this input width"
        )
    hidden = w1.shape[0]
    check_shape("b1", b1, (hidden,), "[hidden]")
    check_shape("W2", w2, (1, hidden), "[1, hidden]")
    check_shape("b2", b2, (1,), "[1]")
    return x, w1, b1, w2, b2


def _lambda(h: Array, b1: Array, w2: Array, b2: Array, eps: float) -> Array:
    """Lambda [rows] from W1 x [rows, H]."""
    out = product_in_full(jax.nn.relu(h + b1[None]), w2[0], 0) + b2
    return jax.nn.log_sigmoid(out) + (1 - eps)


def lambda_head(
    params: Mapping[str, Array] | Any, x: Float[ArrayLike, "*batch D"], eps: float = 1e-2
) -> Float[Array, "*batch"]:
    """Gives lambda of each token: logsigmoid(w2 . relu(W1 x + b1) + b2) + 1 - eps, below 1 - eps.

    It is mostly negative: at the paper's initial biases (-2.5) and x = 0 it is -1.5889.

    Args:
        params: W1 [H, D], b1 [H], W2 [1, H], b2 [1], as a mapping or as attributes.
        x: input of the adapted linear; any float dtype, the head runs in float32 (or float64).
        eps: distance of lambda's bound from 1.

    Returns:
        lambda without the last axis of x, float32 (float64 if an operand has it).

    Raises:
        ValueError: eps not in (0, 1), an array is missing or doesn't fit the width of x.

    Source: arXiv 2509.25684, shared lambda MLP (form of the authors' code).
    """
    x, w1, b1, w2, b2 = _check_head(params, jnp.asarray(x), eps)
    h = product_in_full(x.reshape(-1, x.shape[-1]), w1, 1)
    return _lambda(h, b1, w2, b2, eps).reshape(x.shape[:-1])


def gate_and_head(
    x: Float[ArrayLike, "tokens D"],
    gate: Float[ArrayLike, "E D"],
    head: Mapping[str, Array] | Any,
    eps: float = 1e-2,
) -> tuple[Float[Array, "tokens E"], Float[Array, " tokens"]]:
    """Gate logits and lambda of each token, by one product for the gate and the head's first layer.

    Args:
        x: input of the adapted linear.
        gate: Wg.
        head: as the parameters of `lambda_head`.
        eps: as `lambda_head`.

    Returns:
        (u, lambda): `x @ gate.T` and `lambda_head(head, x)`, float32 (float64 if an operand is).

    Raises:
        ValueError: as `lambda_head`, or the gate has another width than x.

    Source: arXiv 2509.25684, gate and shared lambda MLP of the MoLE layer.
    """
    x, w1, b1, w2, b2 = _check_head(head, jnp.asarray(x), eps)
    gate = jnp.asarray(gate).astype(x.dtype)
    check_shape("gate", gate, (*gate.shape[:1], x.shape[-1]), "[E, D of x]")
    experts = gate.shape[0]
    # A product with a handful of columns is slow; both read x, so they share one, and so does dx.
    both = product_in_full(x, jnp.concatenate([gate, w1]), 1)
    # Split and not sliced: the cotangents are then put side by side, not padded and added.
    u, h = jnp.split(both, [experts], axis=1)
    return u, _lambda(h, b1, w2, b2, eps)


def route(
    u: Float[ArrayLike, "*batch E"],
    router: Router | str,
    lam: Float[ArrayLike, "*batch"] | None = None,
    num_experts: ArrayLike | None = None,
) -> Float[Array, "*batch E"]:
    """Expert weights of every token.

    Args:
        u: gate logits.
        router: a `Router` or its name.
        lam: lambda of each token, for "sparsegen" only.
        num_experts: only the first so many experts take part (a scalar, may be traced): layers of
            one stack can differ in it.

    Returns:
        Weights with the shape of u, float32 (float64 for float64 input). They sum to 1, except for
        "relu", where all of them may be 0.

    Raises:
        ValueError: unknown router, top_k above E, lam missing for "sparsegen".

    Source: arXiv 2509.25684; "topk" as MoLA, "relu" as ReMoE (reconstructed).
    """
    router, u = Router.of(router), as_float(u)
    if num_experts is not None:
        there = jnp.arange(u.shape[-1], dtype=jnp.int32) < jnp.asarray(num_experts)
        u = jnp.where(jnp.broadcast_to(there, u.shape), u, _NOWHERE)
    if router.kind == "sparsegen":
        if lam is None:
            raise ValueError("lam is None, expected the lambda head's output for 'sparsegen'")
        return sparsegen(u, lam)
    if router.kind == "fixed_sparsegen":
        return sparsegen(u, router.lam)
    if router.kind == "relu":
        return jax.nn.relu(u)
    if router.kind == "softmax":
        return jax.nn.softmax(u, axis=-1)
    check_count("Router.top_k", router.top_k, 1, u.shape[-1])
    _, index = lax.top_k(lax.stop_gradient(u), router.top_k)
    chosen = jnp.sum(jax.nn.one_hot(index, u.shape[-1], dtype=jnp.int32), axis=-2) > 0
    return jax.nn.softmax(jnp.where(chosen, u, -jnp.inf), axis=-1)
