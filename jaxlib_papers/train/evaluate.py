"""Held-out loss per domain, and what the router does with each domain.

Evaluation runs domain by domain on batches of one domain each, so every figure is a sum that the
jitted step returns and the host adds up. The router statistics are those of the expert-divergence
paper (arXiv 2603.00054): full softmax over all experts, averaged over the tokens of a document
segment, then over segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxlib_papers.nn.head import decoder_cross_entropy
from jaxlib_papers.nn.partitioning import DEFAULT_RULES, ShardingRules, use_sharding
from jaxlib_papers.ops.divergence import js_divergence
from jaxlib_papers.ops.masked import segment_mean
from jaxlib_papers.ops.router import expert_counts
from jaxlib_papers.train.state import merge_model

__all__ = ["DomainTotals", "Evaluation", "evaluate_domains", "make_domain_eval_step"]

Batch = Mapping[str, Any]


class DomainTotals(NamedTuple):
    """Sums over a batch of one domain; additive. The last three are None for a dense model.

    Attributes:
      nll: Sum of negative log-likelihoods, nats.
      tokens: Number of target tokens.
      routing: [layers, experts], sum over segments of the mean router distribution.
      segments: Number of segments.
      counts: [layers, experts], how many tokens chose the expert.
    """

    nll: Float[Array, ""]
    tokens: Float[Array, ""]
    routing: Float[Array, "layers experts"] | None
    segments: Float[Array, ""] | None
    counts: Float[Array, "layers experts"] | None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    Attributes:
      losses: Held-out loss of each domain, nats per token.
      tokens: Target tokens that each was measured on.
      routing: [layers, domains, experts] mean router distributions, None for a dense model.
      expert_load: [layers, experts] share of all choices times the number of experts, 1 = balanced;
        over all domains together; None for a dense model.
      pairwise_jsd: [layers, domains, domains] Jensen-Shannon divergences of `routing`, nats, at
        most ln 2; None for a dense model.
    """

    losses: dict[str, float]
    tokens: dict[str, int]
    routing: np.ndarray | None
    expert_load: np.ndarray | None
    pairwise_jsd: np.ndarray | None

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, in order."""
        return tuple(self.losses)

    @property
    def loss(self) -> float:
        """Mean of the domains' losses, each with the same weight."""
        return float(np.mean(list(self.losses.values())))

    @property
    def mean_jsd(self) -> float | None:
        """Mean over layers and pairs of domains; None for a dense model or a single domain."""
        if self.pairwise_jsd is None or len(self.losses) < 2:
            return None
        pairs = np.triu_indices(len(self.losses), k=1)
        return float(np.mean(self.pairwise_jsd[:, pairs[0], pairs[1]]))

    def record(self) -> dict[str, Any]:
        """The evaluation as JSON values for the metrics file."""
        out: dict[str, Any] = {"loss": self.loss}
        out |= {f"loss/{name}": value for name, value in self.losses.items()}
        if self.mean_jsd is not None:
            out["mean_jsd"] = self.mean_jsd
        if self.pairwise_jsd is not None and self.expert_load is not None:
            out["max_expert_load"] = float(np.max(self.expert_load))
            out["pairwise_jsd"] = np.mean(self.pairwise_jsd, axis=0).round(6).tolist()
            out["layer_jsd"] = [
                float(np.mean(layer[np.triu_indices(len(layer), k=1)])) if len(layer) > 1 else 0.0
                for layer in self.pairwise_jsd
            ]
            out["expert_load"] = self.expert_load.round(4).tolist()
        return out


def make_domain_eval_step(
    graphdef: nnx.GraphDef,
    *,
    top_k: int | None,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
) -> Callable[[Any, Any, Batch], DomainTotals]:
    """Makes the jitted evaluation step, without dropout and gradient.

    Args:
      graphdef: Static structure of a `DecoderLM`.
      top_k: Experts per token, None for a dense model.
      mesh: Mesh of parameters and batch.
      rules: The sharding rules.

    Returns:
      ``step(params, rest, batch) -> DomainTotals``; the batch is as in training and all of one
      domain.
    """

    def step(params: Any, rest: Any, batch: Batch) -> DomainTotals:
        with use_sharding(mesh, rules):
            model = merge_model(graphdef, params, rest)
            segments = batch["segment_ids"]
            out = model(batch["tokens"], positions=batch["positions"], segment_ids=segments)
            nll, tokens = decoder_cross_entropy(
                model, out.hidden, batch["targets"], batch["loss_mask"]
            )
            if top_k is None:
                return DomainTotals(nll, tokens, None, None, None)
            means, present = segment_mean(out.router_probs, segments, batch["domain_ids"].shape[1])
            return DomainTotals(
                nll,
                tokens,
                jnp.sum(means, axis=(1, 2)),
                jnp.sum(present, dtype=jnp.float32),
                expert_counts(out.router_logits, top_k, segments > 0),
            )

    options = {} if mesh is None else {"out_shardings": NamedSharding(mesh, PartitionSpec())}
    return jax.jit(step, **options)


def evaluate_domains(
    step: Callable[[Any, Any, Batch], DomainTotals],
    params: Any,
    rest: Any,
    batches: Mapping[str, Iterable[Batch]],
    *,
    put: Callable[[Batch], Batch] = jax.device_put,
) -> Evaluation:
    """Evaluates every domain.

    Args:
      step: From :func:`make_domain_eval_step`.
      params: Trained parameters.
      rest: The model's other arrays.
      batches: Held-out batches by domain; the order of the domains is that of the result.
      put: Puts a host batch on the device(s).

    Returns:
      The :class:`Evaluation`.

    Raises:
      ValueError: A domain has no held-out token; it is named.
    """
    sums: dict[str, DomainTotals] = {}
    for domain, host_batches in batches.items():
        # Dispatch everything first: only the last read waits.
        totals = [step(params, rest, put(batch)) for batch in host_batches]
        if not totals:
            raise ValueError(f"domain {domain!r} has no held-out batch; give it more documents")
        sums[domain] = jax.tree.map(
            lambda *parts: np.sum([np.asarray(p, np.float64) for p in parts], axis=0), *totals
        )
        if not sums[domain].tokens > 0:
            raise ValueError(f"domain {domain!r} has no held-out token; give it more documents")
    losses = {name: float(t.nll / t.tokens) for name, t in sums.items()}
    tokens = {name: int(t.tokens) for name, t in sums.items()}
    if any(t.routing is None for t in sums.values()):
        return Evaluation(losses, tokens, None, None, None)
    routing = np.stack([t.routing / max(t.segments, 1.0) for t in sums.values()], axis=1)
    counts = np.sum([t.counts for t in sums.values()], axis=0)
    load = counts / np.maximum(counts.sum(-1, keepdims=True), 1.0) * counts.shape[-1]
    pairs = js_divergence(np.float32(routing)[:, :, None, :], np.float32(routing)[:, None, :, :])
    return Evaluation(losses, tokens, routing, load, np.asarray(pairs, np.float64))
