"""From router probabilities to the divergence between domains.

The mathematics of `jaxlib_papers.moe.expert_divergence`, which names the paper and exports it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import (
    as_float,
    check_choice,
    check_count,
    check_labels,
    check_ndim,
    check_positive,
    check_shape,
)
from jaxlib_papers.ops.divergence import entropy_decomposition, js_divergence
from jaxlib_papers.ops.masked import divide_or_zero, masked_mean, segment_sum

__all__ = [
    "domain_router_sums",
    "domain_sums_of_tokens",
    "expert_divergence_from_logits",
    "expert_divergence_loss",
    "expert_divergence_of_layers",
    "pairwise_js",
    "routing_diversity",
    "sequence_router_mean",
]

AxisName = str | tuple[str, ...] | None
LAYER_REDUCTIONS: dict[str, Callable] = {"mean": jnp.mean, "sum": jnp.sum}


def sequence_router_mean(
    probs: Float[ArrayLike, "seqs seq experts"], mask: ArrayLike | None = None
) -> Float[Array, "seqs experts"]:
    """Mean router distribution of each sequence, over its valid tokens.

    Args:
        probs: [S, T, N] softmax over ALL experts, before top-k.
        mask: [S, T] bool or weights; None counts every token.

    Returns:
        [S, N], float32 (float64 for float64 input). The row of a sequence without a valid token
        is 0, with gradient 0; `domain_router_sums` skips such rows.

    Raises:
        ValueError: probs is not [S, T, N], or the shape of the mask differs.

    Source: arXiv 2603.00054, aggregation level 1; the mask (reconstructed).
    """
    probs = as_float(probs)
    check_ndim("probs", probs, (3,), "[sequences, tokens, experts]")
    if mask is not None:
        check_shape("mask", mask, probs.shape[:2], "[sequences, tokens] of probs")
    return masked_mean(probs, mask, axis=1)


def domain_router_sums(
    seq_mean: Float[ArrayLike, "seqs experts"],
    domain_ids: Int[ArrayLike, " seqs"],
    num_domains: int,
    valid: ArrayLike | None = None,
) -> tuple[Float[Array, "domains experts"], Float[Array, " domains"]]:
    """Sum of the sequence means of each domain, and its number of sequences.

    Both are additive, over shards, micro-batches and evaluation batches alike; their quotient is
    the domain's mean of sequence means (never a token-weighted mean).

    Args:
        seq_mean: [S, N].
        domain_ids: [S] in 0..num_domains - 1, -1 for no label. Ids outside raise where they can
            be read; under `jit` they count as -1.
        num_domains: M, static.
        valid: [S] bool, sequences that count; None counts the rows that are not all 0.

    Returns:
        (sums [M, N], counts [M]), both 0 for an absent domain. The counts have no gradient.

    Raises:
        ValueError: num_domains < 1, ids not integer, out of range or of another shape.

    Source: arXiv 2603.00054, aggregation level 2; skipping unlabelled rows (reconstructed).
    """
    seq_mean = as_float(seq_mean)
    check_ndim("seq_mean", seq_mean, (2,), "[sequences, experts]")
    check_count("num_domains", num_domains, 1)
    check_shape("domain_ids", domain_ids, seq_mean.shape[:1], "[sequences] of seq_mean")
    check_labels("domain_ids", domain_ids, num_domains)
    if valid is None:
        valid = jnp.any(seq_mean != 0, axis=-1)
    check_shape("valid", valid, seq_mean.shape[:1], "[sequences] of seq_mean")
    valid = jnp.asarray(valid).astype(bool)
    member = jax.nn.one_hot(domain_ids, num_domains, dtype=seq_mean.dtype)
    member = jnp.where(valid[:, None], member, 0)
    seq_mean = jnp.where(valid[:, None], seq_mean, 0)
    # HIGHEST: with TF32 or bfloat16 passes, alike domains would differ by rounding only.
    sums = jnp.matmul(member.T, seq_mean, precision=jax.lax.Precision.HIGHEST)
    return sums, jnp.sum(member, axis=0)


def _check_sums(sums: ArrayLike, counts: ArrayLike) -> tuple[Array, Array]:
    check_ndim("sums", sums, (2,), "[domains, experts]")
    check_shape("counts", counts, jnp.shape(sums)[:1], "[domains] of sums")
    totals, numbers = as_float(sums, counts)
    return totals, jax.lax.stop_gradient(numbers)


def pairwise_js(
    sums: Float[ArrayLike, "domains experts"], counts: Float[ArrayLike, " domains"]
) -> Float[Array, "domains domains"]:
    """Jensen-Shannon divergence between the mean router distributions of each two domains.

    Args:
        sums: [M, N] from `domain_router_sums`, reduced over shards if there are any.
        counts: [M] from the same.

    Returns:
        [M, M] symmetric, in nats, in [0, ln 2]; 0 on the diagonal and where a domain is absent.

    Raises:
        ValueError: shapes disagree.

    Source: arXiv 2603.00054, D_JS between domain means; natural logarithm (reconstructed).
    """
    sums, counts = _check_sums(sums, counts)
    present = (counts > 0)[:, None]
    # Absent rows become a constant before the logarithm, or they would send NaN gradients.
    means = jnp.where(present, sums / jnp.where(present, counts[:, None], 1), 1 / sums.shape[1])
    both = present & present.T
    return jnp.where(both, js_divergence(means[:, None, :], means[None, :, :]), 0)


def _loss_and_mean_jsd(sums: Array, counts: Array, eps: float) -> tuple[Array, Array]:
    sums, counts = _check_sums(sums, counts)
    divergence = pairwise_js(sums, counts)
    present = (counts > 0).astype(sums.dtype)
    pairs = jnp.triu(present[:, None] * present[None, :], k=1)  # each unordered pair once
    number = jnp.maximum(jnp.sum(pairs), 1)
    loss = jnp.sum(pairs * -jnp.log(divergence + eps)) / number
    return loss, jnp.sum(pairs * divergence) / number


def expert_divergence_loss(
    sums: Float[ArrayLike, "domains experts"],
    counts: Float[ArrayLike, " domains"],
    eps: float = 1e-8,
) -> Float[Array, ""]:
    """Mean over the pairs of present domains of -ln(D_JS + eps): the loss of one layer.

    Args:
        sums: [M, N] from `domain_router_sums`, reduced over shards if there are any.
        counts: [M] from the same.
        eps: added to the divergence inside the logarithm.

    Returns:
        A scalar in [-ln(ln 2 + eps), -ln eps]. With fewer than two domains present it is 0 with
        gradient 0; for identical distributions it is -ln eps with gradient exactly 0.

    Raises:
        ValueError: eps <= 0, shapes disagree.

    Source: arXiv 2603.00054, L_ED; eps and the case of one domain (reconstructed).
    """
    check_positive("eps", eps)
    return _loss_and_mean_jsd(sums, counts, eps)[0]


def expert_divergence_of_layers(
    sums: Float[Array, "layers domains experts"],
    counts: Float[Array, " domains"],
    eps: float,
    layer_reduction: str,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`expert_divergence_loss` over a stack of layers, with its metrics."""
    check_positive("eps", eps)
    check_choice("layer_reduction", layer_reduction, LAYER_REDUCTIONS)
    losses, mean_jsd = jax.vmap(lambda s: _loss_and_mean_jsd(s, counts, eps))(sums)
    metrics = {
        "mean_jsd": jnp.mean(mean_jsd),
        "num_domains_present": jnp.sum(counts > 0, dtype=jnp.int32),
    }
    return LAYER_REDUCTIONS[layer_reduction](losses), metrics


def domain_sums_of_tokens(
    probs: Float[Array, "layers rows seq experts"],
    domain_ids: Int[ArrayLike, "rows *segments"],
    num_domains: int,
    *,
    mask: ArrayLike | None = None,
    segment_ids: Int[ArrayLike, "rows seq"] | None = None,
    sequence_axis_name: AxisName = None,
) -> tuple[Float[Array, "layers domains experts"], Float[Array, " domains"]]:
    """Both aggregations for a stack of layers, for whole rows or for packed segments.

    Args:
        probs: [L, B, T, N] full router softmax.
        domain_ids: [B], or [B, G] with `segment_ids`: the domain of segment g + 1 of the row.
        num_domains: M, static.
        mask: [B, T] tokens that count.
        segment_ids: [B, T] in 0..G, 0 for padding; each segment is one sequence.
        sequence_axis_name: mapped axis over which the tokens of a row are spread.

    Returns:
        (sums [L, M, N], counts [M]).

    Raises:
        ValueError: shapes disagree, or as `domain_router_sums`.
    """
    layers, rows, seq, num_experts = probs.shape
    if segment_ids is None:
        check_shape("domain_ids", domain_ids, (rows,), "[rows], one label a row")
        segment_ids, num_segments = jnp.ones((rows, seq), jnp.int32), 1
    else:
        check_ndim("domain_ids", domain_ids, (2,), "[rows, segments] beside segment_ids")
        num_segments = jnp.shape(domain_ids)[1]
        check_shape("domain_ids", domain_ids, (rows, num_segments), "[rows, segments]")
    token_sums, tokens = segment_sum(probs, segment_ids, num_segments, mask)
    if sequence_axis_name is not None:  # before the grouping: a mean of part means is wrong
        token_sums, tokens = jax.lax.psum((token_sums, tokens), sequence_axis_name)
    means = divide_or_zero(token_sums, tokens[None, :, :, None])
    means = means.reshape(layers, rows * num_segments, num_experts)
    labels, valid = jnp.reshape(domain_ids, -1), (tokens > 0).reshape(-1)
    sums, counts = jax.vmap(lambda m: domain_router_sums(m, labels, num_domains, valid))(means)
    return sums, counts[0]


def expert_divergence_from_logits(
    logits: Float[ArrayLike, "*layers seqs seq experts"],
    domain_ids: Int[ArrayLike, "seqs *segments"],
    num_domains: int,
    mask: ArrayLike | None = None,
    eps: float = 1e-8,
    axis_name: AxisName = None,
    *,
    segment_ids: Int[ArrayLike, "seqs seq"] | None = None,
    layer_reduction: str = "mean",
    sequence_axis_name: AxisName = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Expert divergence loss of router logits.

    Args:
        logits: [S, T, N] or, for a stack of layers, [L, S, T, N].
        domain_ids: [S] in 0..num_domains - 1, -1 for no label; with `segment_ids` [S, G], where
            entry g labels segment g + 1 of the row.
        num_domains: M, static. Which of them are present is data: no recompilation.
        mask: [S, T] bool or weights, tokens that count; None counts all. Logits that are masked
            out may hold anything, NaN too.
        eps: added to the divergence inside the logarithm.
        axis_name: mapped axis (or axes) over which sequences are spread, inside `shard_map`.
        segment_ids: [S, T] in 0..G for packed rows, 0 for padding; a segment is a sequence.
        layer_reduction: "mean" or "sum" over layers.
        sequence_axis_name: mapped axis over which the tokens of each sequence are spread.

    Returns:
        (loss, {"mean_jsd": mean over pairs and layers, "num_domains_present": int32}), computed in
        float32 (float64 for float64 input).

    Raises:
        ValueError: N < 2, eps <= 0, shapes that disagree, labels as in `domain_router_sums`.

    Sharding: under `jit` on arrays whose batch axis is sharded, the call without `axis_name` is
    the global-batch loss and its gradient is right as it is. Inside `shard_map`, `axis_name` sums
    (sums, counts) over the shards (M N + M numbers a layer), and each shard returns the same
    global loss. With `check_vma=True` (the default) the gradient of that one loss arrives in
    full: with respect to sharded logits each shard holds its rows of it, with respect to
    replicated parameters JAX has already summed over the shards, so neither sum nor average it
    again and do not rescale the loss. With `check_vma=False` (and in `pmap`) each shard
    differentiates the sum of all R equal losses: what it gets is R times its own part, and the
    usual average of parameter gradients over the shards makes that exact.

    Source: arXiv 2603.00054; layer mean, packing and the sharded form (reconstructed).
    """
    logits = as_float(logits)
    check_ndim("logits", logits, (3, 4), "[seqs, tokens, experts], with or without [layers, ...]")
    if logits.shape[-1] < 2:
        raise ValueError(f"logits has {logits.shape[-1]} expert, expected at least 2 to compare")
    logits = logits if logits.ndim == 4 else logits[None]
    if mask is not None:
        check_shape("mask", mask, logits.shape[1:3], "[seqs, tokens] of logits")
        logits = jnp.where(jnp.asarray(mask).astype(bool)[None, :, :, None], logits, 0)
    if segment_ids is not None:
        check_shape("segment_ids", segment_ids, logits.shape[1:3], "[seqs, tokens] of logits")
        logits = jnp.where((jnp.asarray(segment_ids) > 0)[None, :, :, None], logits, 0)
    sums, counts = domain_sums_of_tokens(
        jax.nn.softmax(logits, axis=-1),
        domain_ids,
        num_domains,
        mask=mask,
        segment_ids=segment_ids,
        sequence_axis_name=sequence_axis_name,
    )
    if axis_name is not None:
        sums, counts = jax.lax.psum((sums, counts), axis_name)
    return expert_divergence_of_layers(sums, counts, eps, layer_reduction)


def routing_diversity(
    seq_mean: Float[ArrayLike, "seqs experts"],
    domain_ids: Int[ArrayLike, " seqs"],
    num_domains: int,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Diversity of routing: total, and its parts between domains and inside them.

    Args:
        seq_mean: [S, N] from `sequence_router_mean`; rows that are all 0 (no valid token) are
            left out.
        domain_ids: [S], -1 for no label (left out).
        num_domains: M, static.

    Returns:
        (total, inter, intra) in nats, each >= 0, total = inter + intra <= ln N. For balanced
        domains inter >= mean pairwise JS >= exp(-L_ED) - eps.

    Raises:
        ValueError: as `domain_router_sums`.

    Source: arXiv 2603.00054, D_total = D_inter + D_intra; definitions (reconstructed).
    """
    seq_mean = as_float(seq_mean)
    check_ndim("seq_mean", seq_mean, (2,), "[sequences, experts]")
    check_count("num_domains", num_domains, 1)
    check_shape("domain_ids", domain_ids, seq_mean.shape[:1], "[sequences] of seq_mean")
    check_labels("domain_ids", domain_ids, num_domains)
    there = jnp.any(seq_mean != 0, axis=-1)
    return entropy_decomposition(seq_mean, jnp.where(there, domain_ids, -1), num_domains)
