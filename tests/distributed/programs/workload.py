"""What the distributed programs train: a small sparse language model with all auxiliary losses."""

from __future__ import annotations

import jax
import numpy as np

from jaxlib_papers.moe.expert_divergence import MoELossConfig, expert_divergence_objective
from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
from jaxlib_papers.train.state import abstract_model

VOCAB, WIDTH, EXPERTS, TOP_K, DOMAINS = 64, 16, 4, 2, 4
ROWS, SEQ = 16, 24

CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=WIDTH,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    moe=MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=24),
    init_std=0.2,
)


def model_fn(key: jax.Array) -> DecoderLM:
    return DecoderLM(CONFIG, key=key)


SPEC = abstract_model(model_fn)
OBJECTIVE = expert_divergence_objective(
    MoELossConfig(alpha=1e-2, beta=1e-2, gamma_z=1e-3), num_domains=DOMAINS, top_k=TOP_K
)
OPTIMIZER = make_optimizer(
    OptimizerConfig(learning_rate=1e-2, warmup_steps=5, total_steps=20), SPEC.axes
)


def batch(step: int) -> dict[str, np.ndarray]:
    """The global batch of a step: two segments a row, padding, domains spread unevenly.

    Domain 3 is in the last two rows only, so on one of eight shards; domain 2 in the first six.
    """
    rng = np.random.default_rng(step)
    domain = np.array([2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 0, 1, 3, 3], np.int32)
    cut = rng.integers(4, SEQ - 8, ROWS)
    end = rng.integers(SEQ - 6, SEQ + 1, ROWS)
    place = np.arange(SEQ)[None, :]
    segments = np.where(place < cut[:, None], 1, np.where(place < end[:, None], 2, 0))
    starts = np.where(segments == 2, cut[:, None], 0)
    # Each domain has its own part of the vocabulary, so that there is something to route by.
    of_token = np.where(segments == 2, domain[::-1, None] % 2, domain[:, None])
    tokens = (16 * of_token + rng.integers(0, 16, (ROWS, SEQ))).astype(np.int32)
    same = np.concatenate([segments[:, 1:] == segments[:, :-1], np.zeros((ROWS, 1), bool)], axis=1)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "loss_mask": same & (segments > 0),
        "segment_ids": segments.astype(np.int32),
        "positions": (place - starts).astype(np.int32),
        "domain_ids": np.stack([domain, domain[::-1] % 2], axis=1).astype(np.int32),
    }
