"""The score family of JAPAN: what ranks a candidate y at x, higher being more conforming.

Each score comes in two parts, so that sets at one x cost little: `prepare(x)` computes what depends
on x alone (a threshold from model samples, a quantile head), `evaluate(y, x, aux)` the rest, for
any leading axes of y. `parts` holds the models; where they are Flax modules both run under `jit`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from jaxlib_papers.nn.flows.base import Flow, standard_normal_log_prob
from jaxlib_papers.nn.flows.networks import MLP
from jaxlib_papers.nn.flows.training import FitConfig, fit_module
from jaxlib_papers.ops.checks import as_float

__all__ = [
    "SCORES",
    "Density",
    "density_log_prob",
    "evaluate",
    "fit_quantile_head",
    "prepare",
    "sample_with_log_prob",
]

SCORES = (
    "conditional",
    "unconditional",
    "residual",
    "base_prediction",
    "posterior",
    "latent",
    "hpd",
    "tau_adaptive",
)
"""Names of the scores; "residual" is the second reading of "unconditional"."""


@runtime_checkable
class Density(Protocol):
    """Anything with a conditional log-density and samples; all flows are one.

    `log_prob(y [B, d], x [B, c]) -> [B]`, `sample(key, x [B, c], n) -> [n, B, d]`. It need not be
    written in JAX: results are converted.
    """

    def log_prob(self, y: Any, x: Any) -> Any:
        """Log-density of each row."""
        ...

    def sample(self, key: Any, x: Any, n: int) -> Any:
        """N samples of each row."""
        ...


def density_log_prob(density: Any, y: Array, x: Array | None) -> Array:
    """Log p(y | x) for y [*lead, B, *event] and x [B, c]; other densities see plain rows."""
    if isinstance(density, Flow):
        return density.log_prob(y, x)
    if x is None:
        flat = y.reshape(-1, y.shape[-1])
        return as_float(density.log_prob(flat, None)).reshape(y.shape[:-1])
    lead = y.shape[: y.ndim - 2]
    many = int(np.prod(lead, dtype=int))
    rows = jnp.broadcast_to(x[None], (many, *x.shape)).reshape(many * x.shape[0], *x.shape[1:])
    flat = density.log_prob(y.reshape(-1, *y.shape[len(lead) + 1 :]), rows)
    return as_float(flat).reshape(*lead, x.shape[0])


def sample_with_log_prob(
    density: Any, key: Key[Array, ""], x: Array | None, n: int
) -> tuple[Array, Array]:
    """Samples [n, B, *event] and log-densities [n, B], the same noise at every x.

    Common noise makes whatever is computed from the samples a function of x alone, the same in
    calibration and test, however the rows are batched.
    """
    if not isinstance(density, Flow):
        y = as_float(density.sample(key, x, n))
        return y, density_log_prob(density, y, x)
    if x is None:
        y, log_prob = density.sample_and_log_prob(key, None, n)
        return y, log_prob
    z = jax.random.normal(key, (n, 1, *density.event_shape), as_float(x).dtype)
    z = jnp.broadcast_to(z, (n, x.shape[0], *density.event_shape))
    y, logdet = density.inverse(z, x)
    return y, standard_normal_log_prob(z, len(density.event_shape)) - logdet


def _column(aux: Array, y_log_prob: Array) -> Array:
    return aux.reshape((1,) * (y_log_prob.ndim - 1) + aux.shape)


def prepare(kind: str, parts: dict[str, Any], x: Array, key: Array, samples: int) -> Any:
    """What a score needs of x, with rows along the first axis; None where it needs nothing."""
    if kind == "hpd":
        _, log_prob = sample_with_log_prob(parts["flow"], key, x, samples)
        return jnp.sort(log_prob, axis=0).T
    if kind == "tau_adaptive":
        return parts["head"](x)[..., 0]
    return None


def evaluate(
    kind: str, parts: dict[str, Any], y: Array, x: Array, aux: Any, log_prob: Array | None = None
) -> Array:
    """Scores of y [*lead, B, *event] at x [B, c].

    Args:
        kind: one of `SCORES`.
        parts: "flow", and by kind "marginal", "reverse" or "head".
        y: candidates; for "residual" minus the prediction already.
        x: context of each row; the prediction for "base_prediction".
        aux: of `prepare`.
        log_prob: log p(y | x) under parts["flow"] where it is known already.
    """
    if kind in ("unconditional", "residual"):
        return density_log_prob(parts["marginal"], y, None)
    if kind == "posterior":
        many = jnp.broadcast_to(
            x.reshape((1,) * (y.ndim - 2) + x.shape), (*y.shape[:-1], x.shape[-1])
        )
        return parts["reverse"].log_prob(many, y)
    if kind == "latent":
        z, _ = parts["flow"].forward(y, x)
        return standard_normal_log_prob(z, len(parts["flow"].event_shape))
    if log_prob is None:
        log_prob = density_log_prob(parts["flow"], y, x)
    if kind == "hpd":
        rank = jax.vmap(
            lambda row, values: jnp.searchsorted(row, values, side="right"),
            in_axes=(0, -1),
            out_axes=-1,
        )(aux, log_prob)
        share = rank.astype(log_prob.dtype) / aux.shape[-1]
        return jnp.where(jnp.isnan(log_prob), 0, share)
    if kind == "tau_adaptive":
        return log_prob - _column(aux, log_prob)
    return log_prob


def _pinball(module: MLP, batch: Any, key: Array | None) -> Array:
    x, target, level = batch
    gap = target - module(x)[:, 0]
    return jnp.maximum(level * gap, (level - 1) * gap)


class _QuantileHead(nnx.Module):
    """An MLP on standardised features whose output is in the units of its target."""

    def __init__(self, net: MLP, loc: Array, scale: Array, offset: Array, unit: Array):
        self.net = net
        names = ("loc", "scale", "offset", "unit")
        for name, value in zip(names, (loc, scale, offset, unit), strict=True):
            setattr(self, name, nnx.Variable(value))

    def __call__(self, x: Array) -> Array:
        standard = (x - self.loc[...][None]) / self.scale[...][None]
        return self.net(standard) * self.unit[...] + self.offset[...]


def fit_quantile_head(
    x: Array,
    target: Array,
    level: float,
    config: FitConfig,
    *,
    key: Key[Array, ""],
    hidden: int = 32,
) -> nnx.Module:
    """An MLP x -> the quantile of `target` given x, fitted by the pinball loss.

    Args:
        x: features [B, c].
        target: [B].
        level: of the quantile, in (0, 1).
        config: as for the flow.
        key: PRNG key.
        hidden: width.
    """
    net_key, fit_key = jax.random.split(key)
    net = MLP((x.shape[1], hidden, hidden, 1), key=net_key)
    loc, scale = jnp.mean(x, axis=0), jnp.std(x, axis=0)
    scale = jnp.where(scale > 0, scale, 1)
    offset = jnp.quantile(target, level)
    unit = jnp.maximum(jnp.std(target), 1e-6)
    data = (
        (x - loc[None]) / scale[None],
        (target - offset) / unit,
        jnp.full(len(target), level, target.dtype),
    )
    net, _ = fit_module(net, _pinball, data, config, key=fit_key)
    return _QuantileHead(net, loc, scale, offset, unit)
