"""Expert Divergence Learning for MoE-based Language Models.

Jiaang Li et al., ICLR 2026, arXiv 2603.00054. No public code.

Load balancing asks that experts be used evenly; it does not say by which data. This auxiliary loss
reads the data-source label ("domain") of every sequence, averages the router's full softmax per
sequence and then per domain, and rewards the Jensen-Shannon divergence between domains:

    L = L_LM + alpha L_LB + beta L_ED + gamma L_z,
    L_ED = mean over pairs j < k of domains present in the batch of -ln(D_JS(p_j || p_k) + eps)

Here: the two aggregations, the pairwise divergence, L_ED and its form on logits (for stacks of
layers, packed rows and sharded batches), the decomposition of routing diversity into parts between
and inside domains, the evaluation by permuting experts, and the objective for the trainer.

Reconstructed, since the paper (as far as it was seen) leaves it open: natural logarithm, eps,
mean over layers, masked means, skipping of unlabelled or empty sequences, 0 for fewer than two
domains, segments of packed rows as sequences, the cross-device reduction, both forms of gradient
accumulation, alpha's partner beta = 1e-3, and the z-loss term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlib_papers.moe._router_domains import (
    LAYER_REDUCTIONS,
    domain_router_sums,
    domain_sums_of_tokens,
    expert_divergence_from_logits,
    expert_divergence_loss,
    expert_divergence_of_layers,
    pairwise_js,
    routing_diversity,
    sequence_router_mean,
)
from jaxlib_papers.nn.head import decoder_cross_entropy
from jaxlib_papers.ops.checks import (
    check_choice,
    check_count,
    check_nonnegative,
    check_positive,
)
from jaxlib_papers.ops.divergence import js_divergence
from jaxlib_papers.ops.masked import divide_or_zero
from jaxlib_papers.ops.router import expert_counts, load_balancing_loss, router_z_loss
from jaxlib_papers.train.step import Objective

__all__ = [
    "MoELossConfig",
    "check_domains_for_objective",
    "domain_router_sums",
    "expert_divergence_from_logits",
    "expert_divergence_loss",
    "expert_divergence_objective",
    "js_divergence",
    "load_balancing_loss",
    "moe_objective",
    "pairwise_js",
    "router_permutation_delta_ppl",
    "router_z_loss",
    "routing_diversity",
    "sequence_router_mean",
]


@dataclass(frozen=True)
class MoELossConfig:
    """Coefficients of the training objective.

    Attributes:
        alpha: of the load-balancing loss (1e-3: seen in a review of the paper).
        beta: of the expert divergence loss (reconstructed; the paper sweeps it).
        gamma_z: of the router z-loss; 0 leaves it out (1e-3 is usual).
        eps: inside the logarithm of the expert divergence loss (reconstructed).
        layer_reduction: "mean" or "sum" of the expert divergence over layers (reconstructed).
    """

    alpha: float = 1e-3
    beta: float = 1e-3
    gamma_z: float = 0.0
    eps: float = 1e-8
    layer_reduction: str = "mean"

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma_z"):
            check_nonnegative(name, getattr(self, name))
        check_positive("eps", self.eps)
        check_choice("layer_reduction", self.layer_reduction, LAYER_REDUCTIONS)


def check_domains_for_objective(coef: MoELossConfig, num_domains: int) -> None:
    """Refuses beta > 0 where the data has fewer than two domains, before anything is trained.

    The loss itself is defined (0) for such a batch, so nothing would fail later: the run would
    only not be what its name says.

    Args:
        coef: the coefficients.
        num_domains: domains that the data really has (with a positive sampling weight).

    Raises:
        ValueError: fewer than one domain, or one domain with beta > 0.
    """
    check_count("num_domains", num_domains, 1)
    if coef.beta > 0 and num_domains < 2:
        raise ValueError(
            f"beta is {coef.beta} but the data has {num_domains} domain: expert divergence "
            "compares domains; add a second domain, or set beta to 0"
        )


def moe_objective(
    lm: Float[Array, ""],
    lb: Float[Array, ""],
    ed: Float[Array, ""],
    z: Float[Array, ""],
    coef: MoELossConfig,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted sum lm + alpha lb + beta ed + gamma_z z.

    Args:
        lm: language-modelling loss.
        lb: load-balancing loss.
        ed: expert divergence loss.
        z: router z-loss.
        coef: the coefficients; a term whose coefficient is 0 is left out altogether, so it costs
            no backward pass.

    Returns:
        (total, parts): parts holds what each of "lm", "lb", "ed", "z" adds to the total.

    Raises:
        ValueError: a negative coefficient.

    Source: arXiv 2603.00054, training objective; the z term (reconstructed).
    """
    terms = {"lb": (coef.alpha, lb), "ed": (coef.beta, ed), "z": (coef.gamma_z, z)}
    total, parts = lm, {"lm": lm}
    for name, (weight, term) in terms.items():
        check_nonnegative(f"coefficient of {name}", weight)
        parts[name] = weight * term if weight else jnp.zeros_like(term)
        total = total + parts[name] if weight else total
    return total, parts


def router_permutation_delta_ppl(
    apply_fn: Callable[[Any, Array | None], tuple[Any, ...]],
    batch: Any,
    key: Array,
    *,
    num_layers: int | None = None,
    num_experts: int | None = None,
    layers: Collection[int] | None = None,
    num_draws: int = 1,
) -> float:
    """How much perplexity rises when tokens are sent to the wrong experts.

    Expert identities are permuted at random, in each layer on its own: what the router meant for
    expert e goes to expert permutation[layer, e], with the same gate weight. A model whose experts
    are interchangeable does not notice.

    Args:
        apply_fn: (batch, permutations) -> (sum of negative log-likelihoods in nats, number of
            tokens), where permutations is int32 [num_layers, num_experts], or None for the model
            as it is. It may return the router's logits or probabilities [num_layers, ...,
            num_experts] as a third entry. For a router matrix, `kernel[:, argsort(permutation)]`
            does the permuting. Called 1 + num_draws times; jit it if it is slow.
        batch: handed to `apply_fn` unchanged.
        key: PRNG key of the permutations.
        num_layers: layers that have experts; None reads it from apply_fn's third entry.
        num_experts: experts per layer; None as for num_layers.
        layers: the layers to permute (each alone shows where experts are specialised); None
            permutes all.
        num_draws: independent permutations, whose mean rise of the log-perplexity is taken.

    Returns:
        Perplexity ratio permuted / intact, as a Python float; 1.0 means no specialisation. Its
        logarithm is the rise of the loss in nats.

    Raises:
        ValueError: sizes below 1 or neither given nor returned, a layer out of range, or a batch
            without tokens.

    Source: arXiv 2603.00054, delta-PPL under router permutation; details (reconstructed).
    """
    check_count("num_draws", num_draws, 1)

    def mean_nll(permutations: Array | None) -> tuple[float, tuple[int, ...]]:
        nll, tokens, *routing = apply_fn(batch, permutations)
        if not float(tokens) > 0:
            raise ValueError(f"the batch has {float(tokens)} tokens to evaluate, expected some")
        return float(nll) / float(tokens), jnp.shape(routing[0]) if routing else ()

    intact, seen = mean_nll(None)
    if (num_layers is None or num_experts is None) and len(seen) < 2:
        raise ValueError(
            "num_layers or num_experts is None and apply_fn returned no router logits [num_layers, "
            "..., num_experts] to read them from; give both"
        )
    num_layers = seen[0] if num_layers is None else num_layers
    num_experts = seen[-1] if num_experts is None else num_experts
    check_count("num_layers", num_layers, 1)
    check_count("num_experts", num_experts, 1)
    chosen = range(num_layers) if layers is None else layers
    for layer in chosen:
        check_count("layers", layer, 0, num_layers - 1)

    experts = jnp.arange(num_experts, dtype=jnp.int32)
    rise = 0.0
    for draw in range(num_draws):
        keys = jax.random.split(jax.random.fold_in(key, draw), num_layers)
        rows = [
            jax.random.permutation(keys[layer], experts) if layer in chosen else experts
            for layer in range(num_layers)
        ]
        rise += (mean_nll(jnp.stack(rows))[0] - intact) / num_draws
    return math.exp(rise)


def expert_divergence_objective(
    coef: MoELossConfig | None = None, *, num_domains: int, top_k: int
) -> Objective:
    """The objective for `train.step`, on packed batches whose segments carry domain labels.

    The model is called as `model(tokens, positions=, segment_ids=, key=)` and returns hidden
    states, router logits and router probabilities (`nn.decoder.DecoderLM`). Padding counts in no
    term; a segment counts as one sequence of its domain, whatever its length.

    Under gradient accumulation each micro-batch's result is an additive contribution:

    * language modelling and the z-loss are exactly those of the whole batch;
    * load balance and expert divergence are averages of the micro-batches' own values, which is
      not the value of the whole batch (neither is a mean over tokens). With `exact_statistics`
      the trainer first sums `statistics` over the whole batch; then both are the whole batch's,
      in value and gradient, at the price of a second forward pass.

    Logged values are comparable whatever the number of micro-batches.

    Args:
        coef: coefficients, by default `MoELossConfig()`.
        num_domains: M, static; labels outside 0..M - 1 count as unlabelled.
        top_k: experts per token of the model.

    Returns:
        An `Objective`. Metrics: "lm_loss" (nats per token), "load_balance" (1 at balance),
        "expert_divergence", "router_z", "mean_jsd", "num_domains_present" (mean over
        micro-batches), "expert_load" ([L, N] shares of all choices, each row summing to 1), and
        "dropped_fraction" where the model drops tokens. Statistics, additive: "domain_sums"
        [L, M, N] and "domain_counts" [M] as `domain_router_sums`, "expert_counts" [L, N].

    Raises:
        ValueError: one domain with beta > 0, top_k < 1; while tracing, a model without experts.

    Source: arXiv 2603.00054; accumulation semantics (reconstructed).
    """
    coef = MoELossConfig() if coef is None else coef
    check_domains_for_objective(coef, num_domains)
    check_count("top_k", top_k, 1)

    def count(batch):
        return {
            "tokens": jnp.sum(batch["loss_mask"], dtype=jnp.float32),
            "router_tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.float32),
            "microbatches": jnp.float32(1),
        }

    def forward(model, batch, key):
        out = model(
            batch["tokens"],
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            key=key,
        )
        if out.router_probs is None:
            raise ValueError("the model has no experts: set config.moe, or train without this loss")
        sums, counts = domain_sums_of_tokens(
            out.router_probs,
            batch["domain_ids"],
            num_domains,
            segment_ids=batch["segment_ids"],
        )
        chosen = expert_counts(out.router_logits, top_k, batch["segment_ids"] > 0)
        return out, {"domain_sums": sums, "domain_counts": counts, "expert_counts": chosen}

    def statistics(model, batch, key):
        return forward(model, batch, key)[1]

    def loss(model, batch, key, totals, statistics=None):
        out, own = forward(model, batch, key)
        valid = batch["segment_ids"] > 0
        nll, _ = decoder_cross_entropy(model, out.hidden, batch["targets"], batch["loss_mask"])
        tokens = jnp.maximum(totals["tokens"], 1)
        weight = jnp.sum(valid, dtype=jnp.float32) / jnp.maximum(totals["router_tokens"], 1)
        part = 1 / totals["microbatches"]
        pooled = own if statistics is None else _with_gradient_of(statistics, own)
        shares = divide_or_zero(
            pooled["expert_counts"], jnp.sum(pooled["expert_counts"], axis=-1, keepdims=True)
        )
        ed, ed_metrics = expert_divergence_of_layers(
            pooled["domain_sums"], pooled["domain_counts"], coef.eps, coef.layer_reduction
        )
        lb = load_balancing_loss(out.router_probs, mask=valid, load_shares=shares)
        if statistics is None:
            lb, ed = lb * part, ed * part
        else:  # every micro-batch sees the whole batch's value, but only its own gradient
            lb, ed = lb * weight, _scaled_value(ed, part)
        z = router_z_loss(out.router_logits, valid) * weight
        lm = nll / tokens
        total, _ = moe_objective(lm, lb, ed, z, coef)
        choices = top_k * jnp.maximum(totals["router_tokens"], 1)
        metrics = {
            "lm_loss": lm,
            "load_balance": lb,
            "expert_divergence": ed,
            "router_z": z,
            "mean_jsd": ed_metrics["mean_jsd"] * part,
            "num_domains_present": ed_metrics["num_domains_present"].astype(jnp.float32) * part,
            "expert_load": own["expert_counts"] / choices,
        }
        if out.dropped_fraction is not None:
            metrics["dropped_fraction"] = jnp.mean(out.dropped_fraction) * weight
        return total, metrics

    return Objective(count=count, loss=loss, statistics=statistics)


def _with_gradient_of(whole: dict[str, Array], own: dict[str, Array]) -> dict[str, Array]:
    """The values of `whole`, of which this micro-batch's part `own` carries the gradient."""
    stop = jax.lax.stop_gradient
    return {name: stop(whole[name]) + (own[name] - stop(own[name])) for name in own}


def _scaled_value(term: Array, factor: Array) -> Array:
    """`term * factor` as a value, with the gradient of `term`."""
    fixed = jax.lax.stop_gradient(term)
    return fixed * factor + (term - fixed)
