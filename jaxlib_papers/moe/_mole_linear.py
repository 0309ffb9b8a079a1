"""The linear layer with LoRA experts, its lambda head, and their initial values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxlib_papers.moe._mole_routing import (
    Router,
    gate_and_head,
    lambda_head,
    product_in_full,
    route,
)
from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.nn.layers import dropout
from jaxlib_papers.ops.checks import (
    as_float,
    check_choice,
    check_count,
    check_positive,
    check_shape,
    float_dtype,
)

__all__ = [
    "LAMBDA_INITS",
    "LambdaHead",
    "MoLELinear",
    "MoLEOutput",
    "adapter_arrays",
    "head_arrays",
    "mole_delta",
    "mole_linear",
]

LAMBDA_INITS = ("default", "zeros", "sparse", "dense")


class MoLEOutput(NamedTuple):
    """What a linear layer with LoRA experts returns.

    Attributes:
        y: output [..., out] in the dtype of x.
        p: expert weights [..., E], float32.
        u: gate logits [..., E], float32.
        lam: lambda [...], float32; None for routers without one.
    """

    y: Float[Array, "*batch out"]
    p: Float[Array, "*batch E"]
    u: Float[Array, "*batch E"]
    lam: Float[Array, "*batch"] | None


def _read(params: Mapping[str, Any], name: str) -> Array:
    value = params.get(name)
    if value is None:
        raise ValueError(f"params lacks {name!r}, expected A, B, Wg (and W, b of the base layer)")
    return jnp.asarray(value[...])


def mole_delta(
    params: Mapping[str, Any],
    x: Float[ArrayLike, "*batch in"],
    lam_params: Any = None,
    *,
    alpha: float,
    router: Router | str = "sparsegen",
    eps: float = 1e-2,
    dropout_rate: float = 0.0,
    key: Key[Array, ""] | None = None,
    num_experts: ArrayLike | None = None,
) -> MoLEOutput:
    """What the experts add to a linear layer: (alpha / r) sum_i p_i B_i A_i x'.

    Computed in the fused form: one product with all [E * r] rows of A, each block scaled by its
    p_i, one product with all columns of B. Zero weights save no arithmetic.

    Args:
        params: A [E, r, in], B [E, out, r], Wg [E, in].
        x: input.
        lam_params: arrays of the lambda head of this width (`lambda_head`); only "sparsegen" reads
            them.
        alpha: numerator of the scaling alpha / r.
        router: a `Router` or its name.
        eps: of the lambda head.
        dropout_rate: of x' = dropout(x), which feeds gate, head and experts ("softmax" gates on x).
        key: PRNG key of dropout; None is no dropout.
        num_experts: as in `route`.

    Returns:
        `MoLEOutput` whose y is the sum above; routing in float32, y in the dtype of x.

    Raises:
        ValueError: r < 1, E < 2, shapes that disagree, unknown router.

    Source: arXiv 2509.25684, MoLE layer.
    """
    router, x = Router.of(router), jnp.asarray(x)
    a, b, gate = (_read(params, name) for name in ("A", "B", "Wg"))
    if a.ndim != 3 or b.ndim != 3:
        raise ValueError(f"A, B have shapes {a.shape}, {b.shape}, expected [E, r, in], [E, out, r]")
    experts, rank, width = a.shape
    check_count("E, experts of A,", experts, 2)
    check_count("r, rank of A,", rank, 1)
    check_shape("B", b, (experts, b.shape[1], rank), "[E, out, r]")
    check_shape("Wg", gate, (experts, width), "[E, in]")
    check_shape("x", x, (*x.shape[:-1], width), "[..., in of A]")
    check_positive("alpha", alpha)

    rows = x.reshape(-1, width)
    dropped = dropout(rows, dropout_rate, key)
    seen, gate = as_float(rows if router.kind == "softmax" else dropped, gate)
    lam = None
    if router.uses_head:
        u, lam = gate_and_head(seen, gate, lam_params, eps)
    else:
        u = product_in_full(seen, gate, 1)
    if router.kind == "fixed_sparsegen":
        lam = jnp.full(u.shape[:1], router.lam, u.dtype)
    p = route(u, router, lam, num_experts)

    # Scaled in the accumulation dtype: p in bfloat16 would lose what the router was careful with.
    wide = float_dtype(x)
    z = lax.dot_general(
        dropped,
        a.reshape(experts * rank, width).astype(x.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=wide,
    )
    scaled = z.reshape(-1, experts, rank) * (p.astype(wide) * (alpha / rank))[:, :, None]
    # One plain product of [rows, E * r] and [E * r, out], forward and backward.
    columns = jnp.swapaxes(b, 1, 2).reshape(experts * rank, -1).astype(x.dtype)
    y = lax.dot_general(
        scaled.astype(x.dtype).reshape(-1, experts * rank),
        columns,
        (((1,), (0,)), ((), ())),
        preferred_element_type=wide,
    ).astype(x.dtype)

    batch = x.shape[:-1]
    return MoLEOutput(
        y.reshape(*batch, -1),
        p.reshape(*batch, experts),
        u.reshape(*batch, experts),
        None if lam is None else lam.reshape(batch),
    )


def mole_linear(
    params: Mapping[str, Any],
    x: Float[ArrayLike, "*batch in"],
    lam_params: Any = None,
    *,
    alpha: float,
    router: Router | str = "sparsegen",
    eps: float = 1e-2,
    dropout_rate: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> MoLEOutput:
    """A frozen linear layer with E LoRA experts: W x + b + (alpha / r) sum_i p_i B_i A_i x'.

    Args:
        params: W [out, in], b [out] (may be absent or None), A [E, r, in], B [E, out, r],
            Wg [E, in].
        x: input, any number of leading axes.
        lam_params: W1 [H, in], b1 [H], W2 [1, H], b2 [1] of the lambda head that all layers of this
            input width share; only the router "sparsegen" reads it.
        alpha: numerator of the scaling alpha / r.
        router: "sparsegen", "topk", "relu", "softmax", "fixed_sparsegen", or a `Router`.
        eps: of the lambda head.
        dropout_rate: of the experts' input, x' = dropout(x).
        key: PRNG key of dropout; None (evaluation) is no dropout.

    Returns:
        `MoLEOutput(y, p, u, lam)`: y in the dtype of x, the rest in float32 whatever x has. With
        B = 0, the initial value, y is the base layer's.

    Raises:
        ValueError: r < 1, E < 2, unknown router, a missing array, shapes that disagree.

    Source: arXiv 2509.25684, MoLE layer.
    """
    x = jnp.asarray(x)
    weight, bias = _read(params, "W").astype(x.dtype), params.get("b")
    check_shape("W", weight, (*weight.shape[:1], x.shape[-1]), "[out, in of x]")
    out = mole_delta(
        params,
        x,
        lam_params,
        alpha=alpha,
        router=router,
        eps=eps,
        dropout_rate=dropout_rate,
        key=key,
    )
    check_shape(
        "B", params["B"], (out.p.shape[-1], weight.shape[0], params["B"].shape[2]), "[E, out, r]"
    )
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    if bias is not None:
        check_shape("b", bias, weight.shape[:1], "[out]")
        y = y + jnp.expand_dims(jnp.asarray(bias[...]).astype(x.dtype), tuple(range(x.ndim - 1)))
    return out._replace(y=y + out.y)


def _uniform(key: Array, shape: tuple[int, ...], low: float, high: float, dtype: str) -> Array:
    return jax.random.uniform(key, shape, dtype, low, high)


def head_arrays(
    key: Key[Array, ""],
    hidden: int,
    width: int,
    *,
    init: str = "default",
    hidden_bias_init: float | None = None,
    dtype: str = "float32",
) -> dict[str, Array]:
    """Initial arrays of a lambda head.

    Args:
        key: PRNG key.
        hidden: H.
        width: D, input width.
        init: "default" (weights U(+-1/sqrt(fan_in)), biases -2.5), "zeros" (weights 0, biases -2),
            "sparse" (weights U(0, 0.5), biases -2.5) or "dense" (weights U(-0.5, 0), biases -2.5).
        hidden_bias_init: in place of b1's value; with -2.5 and inputs of unit size nearly all
            hidden units are off at the start.
        dtype: of the arrays.

    Returns:
        W1 [H, D], b1 [H], W2 [1, H], b2 [1].

    Raises:
        ValueError: sizes below 1, unknown init.

    Source: arXiv 2509.25684, code (initial values).
    """
    check_count("hidden", hidden, 1)
    check_count("width", width, 1)
    check_choice("init", init, LAMBDA_INITS)
    keys = jax.random.split(key)
    bias = -2.0 if init == "zeros" else -2.5

    def weights(key: Array, shape: tuple[int, ...]) -> Array:
        bound = 1 / math.sqrt(shape[1])
        low, high = {
            "default": (-bound, bound),
            "zeros": (0.0, 0.0),
            "sparse": (0.0, 0.5),
            "dense": (-0.5, 0.0),
        }[init]
        return _uniform(key, shape, low, high, dtype)

    first = bias if hidden_bias_init is None else hidden_bias_init
    return {
        "W1": weights(keys[0], (hidden, width)),
        "b1": jnp.full((hidden,), first, dtype),
        "W2": weights(keys[1], (1, hidden)),
        "b2": jnp.full((1,), bias, dtype),
    }


def adapter_arrays(
    key: Key[Array, ""],
    num_experts: int,
    rank: int,
    width: int,
    out: int,
    *,
    stack: tuple[int, ...] = (),
    dtype: str = "float32",
) -> dict[str, Array]:
    """Initial arrays of one layer's experts: A and Wg U(+-1/sqrt(in)), B zero.

    Args:
        key: PRNG key.
        num_experts: E.
        rank: r.
        width: inputs of the base layer.
        out: outputs of the base layer.
        stack: leading axes of a stack of layers.
        dtype: of the arrays.

    Returns:
        A [*stack, E, r, in], B [*stack, E, out, r], Wg [*stack, E, in].

    Source: arXiv 2509.25684, initial values of the MoLE layer.
    """
    keys, bound = jax.random.split(key), 1 / math.sqrt(width)
    return {
        "A": _uniform(keys[0], (*stack, num_experts, rank, width), -bound, bound, dtype),
        "B": jnp.zeros((*stack, num_experts, out, rank), dtype),
        "Wg": _uniform(keys[1], (*stack, num_experts, width), -bound, bound, dtype),
    }


class LambdaHead(nnx.Module):
    """The lambda head as a module; one for all linears of one input width, in the whole model.

    Args:
        hidden: hidden units H.
        width: input width D.
        eps: lambda stays below 1 - eps.
        init: initial values, see `head_arrays`.
        hidden_bias_init: in place of the initial value of b1.
        param_dtype: of the parameters.
        key: PRNG key of the initial weights.

    Source: arXiv 2509.25684, shared lambda MLP.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        eps: float = 1e-2,
        init: str = "default",
        hidden_bias_init: float | None = None,
        param_dtype: str = "float32",
        key: Key[Array, ""],
    ):
        arrays = head_arrays(
            key, hidden, width, init=init, hidden_bias_init=hidden_bias_init, dtype=param_dtype
        )
        self.W1 = AdapterParam(arrays["W1"], logical_axes=(None, None))
        self.b1 = AdapterParam(arrays["b1"], logical_axes=(None,))
        self.W2 = AdapterParam(arrays["W2"], logical_axes=(None, None))
        self.b2 = AdapterParam(arrays["b2"], logical_axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
        """Gives lambda of each token, float32."""
        return lambda_head(self, x, self.eps)


class MoLELinear(nnx.Module):
    """A linear layer with LoRA experts; the lambda head is handed in at the call.

    Args:
        width: inputs.
        out: outputs.
        num_experts: E, at least 2.
        rank: r of each expert.
        alpha: numerator of the scaling alpha / r.
        router: a `Router` or its name.
        eps: of the lambda head.
        dropout: rate on the experts' input.
        use_bias: whether the base layer has a bias.
        param_dtype: of the parameters.
        key: PRNG key of the initial weights.

    Source: arXiv 2509.25684, MoLE layer.
    """

    def __init__(
        self,
        width: int,
        out: int,
        *,
        num_experts: int = 8,
        rank: int = 8,
        alpha: float = 16.0,
        router: Router | str = "sparsegen",
        eps: float = 1e-2,
        dropout: float = 0.0,
        use_bias: bool = False,
        param_dtype: str = "float32",
        key: Key[Array, ""],
    ):
        check_count("num_experts", num_experts, 2)
        check_count("rank", rank, 1)
        base_key, key = jax.random.split(key)
        bound = 1 / math.sqrt(width)
        base = _uniform(base_key, (out, width), -bound, bound, param_dtype)
        arrays = adapter_arrays(key, num_experts, rank, width, out, dtype=param_dtype)
        self.W = nnx.Param(base, logical_axes=(None, None))
        self.b = nnx.Param(jnp.zeros(out, param_dtype), logical_axes=(None,)) if use_bias else None
        self.A = AdapterParam(arrays["A"], logical_axes=(None, None, None))
        self.B = AdapterParam(arrays["B"], logical_axes=(None, None, None))
        self.Wg = AdapterParam(arrays["Wg"], logical_axes=(None, None))
        self.alpha, self.eps, self.dropout = alpha, eps, dropout
        self.router = Router.of(router)

    def __call__(
        self,
        x: Float[Array, "*batch in"],
        lam_params: Any = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> MoLEOutput:
        """Applies `mole_linear`.

        Args:
            x: input.
            lam_params: the lambda head of this input width: a `LambdaHead` or its arrays.
            key: PRNG key of dropout; None is no dropout.
        """
        return mole_linear(
            {"W": self.W, "b": self.b, "A": self.A, "B": self.B, "Wg": self.Wg},
            x,
            lam_params,
            alpha=self.alpha,
            router=self.router,
            eps=self.eps,
            dropout_rate=self.dropout,
            key=key,
        )
