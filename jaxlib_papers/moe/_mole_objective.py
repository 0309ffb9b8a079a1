"""The training objective of a language model with LoRA experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlib_papers.moe._mole_decoder import MoLERouting
from jaxlib_papers.moe._mole_losses import dynamic_load_balance, lambda_penalty, sparsity_loss
from jaxlib_papers.nn.head import decoder_cross_entropy
from jaxlib_papers.ops.checks import check_count, check_nonnegative
from jaxlib_papers.ops.router import active_experts, router_z_loss
from jaxlib_papers.train.step import Objective

__all__ = ["MoLELossConfig", "mole_auxiliary", "mole_objective"]


@dataclass(frozen=True)
class MoLELossConfig:
    """Coefficients of the objective; a term whose coefficient is 0 is left out altogether.

    Attributes:
        alpha: of the load balance loss (1.0: the authors' launch script).
        beta: of the sparsity loss (0 in the main table; 1e-1 for its ablation, reconstructed).
        k: experts per token that the sparsity loss allows.
        gamma_z: of the router z-loss.
        lam_coef: of the mean of 1 - lambda.
        smoothing: label smoothing of the language-modelling loss (the paper: 0.1 on answers).
    """

    alpha: float = 1.0
    beta: float = 0.0
    k: int = 2
    gamma_z: float = 0.0
    lam_coef: float = 0.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma_z", "lam_coef"):
            check_nonnegative(f"MoLELossConfig.{name}", getattr(self, name))
        check_count("MoLELossConfig.k", self.k, 1)
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"MoLELossConfig.smoothing is {self.smoothing}, expected in [0, 1)")


def mole_auxiliary(
    routing: dict[str, MoLERouting],
    mask: Float[Array, "batch seq"] | None,
    coef: MoLELossConfig,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Auxiliary losses over all projections and layers of a decoder.

    Args:
        routing: `DecoderOutput.adapter_routing`: by projection, leaves [layers, batch, seq, ...].
        mask: valid tokens; None counts all.
        coef: the coefficients.

    Returns:
        (weighted sum, metrics): "load_balance" (1 at balance), "active_experts" (mean per token),
        and "sparsity", "router_z", "lambda_penalty" where their coefficients are not 0.

    Raises:
        ValueError: nothing was routed, or a loss on lambda with a router that has none.

    Source: arXiv 2509.25684, L = L_LM + alpha L_lb + beta L_sparse; masks (reconstructed).
    """
    if not routing:
        raise ValueError("routing is empty: the model has no LoRA experts (see with_mole)")
    parts = list(routing.values())
    if (coef.beta or coef.lam_coef) and any(part.lam is None for part in parts):
        raise ValueError("beta and lam_coef need lambda; this router has none, set them to 0")

    def mean(values: list[Array]) -> Array:
        return jnp.mean(jnp.stack(values))

    metrics = {"load_balance": mean([dynamic_load_balance(part.p, mask) for part in parts])}
    total = coef.alpha * metrics["load_balance"]
    if coef.beta:
        metrics["sparsity"] = mean([sparsity_loss(r.lam, r.u, coef.k, mask) for r in parts])
        total += coef.beta * metrics["sparsity"]
    if coef.gamma_z:
        metrics["router_z"] = mean([router_z_loss(part.u, mask) for part in parts])
        total += coef.gamma_z * metrics["router_z"]
    if coef.lam_coef:
        metrics["lambda_penalty"] = mean([lambda_penalty(part.lam, mask) for part in parts])
        total += coef.lam_coef * metrics["lambda_penalty"]
    weights = jnp.ones(parts[0].p.shape[1:3]) if mask is None else mask.astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(weights), 1)
    counts = [
        jnp.sum(active_experts(part.p).astype(jnp.float32) * weights[None]) / part.p.shape[0]
        for part in parts
    ]
    metrics["active_experts"] = mean(counts) / tokens
    return total, metrics


def mole_objective(coef: MoLELossConfig | None = None) -> Objective:
    """The objective for `train.step` on packed batches: answers are what `loss_mask` holds.

    Train it with `trainable=AdapterParam`. Under gradient accumulation the language-modelling loss
    is exactly that of the whole batch, and the auxiliary losses are averages over micro-batches.

    Args:
        coef: coefficients, by default `MoLELossConfig()`.

    Returns:
        An `Objective` with the metrics "lm_loss" (nats per token, smoothing included) and those of
        `mole_auxiliary`.

    Raises:
        ValueError: while tracing, a model without LoRA experts, or smoothing with a soft cap.

    Source: arXiv 2509.25684, training objective; accumulation semantics (reconstructed).
    """
    coef = MoLELossConfig() if coef is None else coef

    def count(batch):
        return {
            "tokens": jnp.sum(batch["loss_mask"], dtype=jnp.float32),
            "microbatches": jnp.float32(1),
        }

    def loss(model, batch, key, totals, statistics=None):
        del statistics
        segments = batch["segment_ids"]
        out = model(batch["tokens"], positions=batch["positions"], segment_ids=segments, key=key)
        nll, _ = decoder_cross_entropy(model, out.hidden, batch["targets"], batch["loss_mask"])
        if coef.smoothing:
            if model.config.logit_softcap is not None:
                raise ValueError("smoothing is not defined with a soft cap of the logits")
            # Smoothed minus plain: s (target's logit - mean logit), with no second softmax.
            hidden, kernel = out.hidden.astype(jnp.float32), model.head_kernel()
            columns = jnp.take(kernel, batch["targets"], axis=1).astype(jnp.float32)
            mean = jnp.mean(kernel, axis=1, dtype=jnp.float32)
            columns = jnp.moveaxis(columns, 0, -1) - mean[None, None]
            gap = jnp.sum(hidden * columns, axis=-1)
            nll += coef.smoothing * jnp.sum(gap * batch["loss_mask"].astype(jnp.float32))
        auxiliary, metrics = mole_auxiliary(out.adapter_routing or {}, segments > 0, coef)
        part = 1 / totals["microbatches"]
        lm = nll / jnp.maximum(totals["tokens"], 1)
        metrics = {name: value * part for name, value in metrics.items()}
        return lm + auxiliary * part, {"lm_loss": lm} | metrics

    return Objective(count=count, loss=loss, statistics=None)
