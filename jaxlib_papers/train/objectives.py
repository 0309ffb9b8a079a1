"""The objective that needs no paper: cross-entropy of the next token."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.head import decoder_cross_entropy
from jaxlib_papers.train.step import Objective

__all__ = ["language_objective"]


def language_objective() -> Objective:
    """Mean cross-entropy over the tokens of `loss_mask`, of a `DecoderLM` with adapters or without.

    Batches are those of `data.packing` and `data.answers`. Under accumulation the loss is that of
    the whole batch. A batch without any such token gives 0.

    Returns:
      An `Objective` with the metric "lm_loss" (nats per token).

    Source: cross-entropy of the next token; no paper.
    """

    def count(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"tokens": jnp.sum(batch["loss_mask"], dtype=jnp.float32)}

    def loss(
        model: DecoderLM,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None,
        totals: Mapping[str, jax.Array],
        statistics: None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        del statistics
        out = model(
            batch["tokens"],
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            key=key,
        )
        total, _ = decoder_cross_entropy(model, out.hidden, batch["targets"], batch["loss_mask"])
        mean = total / jnp.maximum(totals["tokens"], 1)
        return mean, {"lm_loss": mean}

    return Objective(count=count, loss=loss)
