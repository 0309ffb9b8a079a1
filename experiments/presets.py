"""Model sizes and training defaults by name.

The three `edl-*` presets are the sizes of the expert-divergence paper (arXiv 2603.00054). Seen
there: total and active parameters, the 64 experts and top-4. Depth, widths, heads and vocabulary
are (reconstructed) so that the parameter counts match; a test holds them to 3 %.

| preset | layers | width | heads (KV) x 128 | expert width | experts / top-k | total | active |
|---|---|---|---|---|---|---|---|
| edl-3b | 16 | 1024 | 8 (4) | 896 | 64 / 4 | 2.95B | 0.29B |
| edl-8b | 20 | 1536 | 24 (4) | 1280 | 64 / 4 | 7.87B | 0.79B |
| edl-15b | 24 | 2048 | 32 (4) | 1536 | 64 / 4 | 15.1B | 1.49B |
"""

from __future__ import annotations

import dataclasses
import difflib

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig

__all__ = ["PRESETS", "Preset", "get_preset"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and the settings that it is trained with unless flags say otherwise.

    Attributes:
      model: The architecture; its vocabulary size is a placeholder where `vocab_size` is None.
      vocab_size: Rows of the embedding; None = as many as the tokenizer needs.
      seq_len: Tokens per row.
      batch: Rows per step, over all devices.
      steps: Optimizer steps.
      learning_rate: Peak.
      warmup_steps: Steps of linear warm-up.
      alpha: Coefficient of the load-balancing loss.
      beta: Coefficient of the expert divergence loss.
      eval_every: Steps between evaluations.
      save_every: Steps between checkpoints.
      log_every: Steps between records.
      eval_batches: Held-out batches per domain in an evaluation.
    """

    model: DecoderConfig
    vocab_size: int | None
    seq_len: int
    batch: int
    steps: int
    learning_rate: float
    warmup_steps: int
    alpha: float
    beta: float
    eval_every: int
    save_every: int
    log_every: int
    eval_batches: int


def _decoder(
    *, layers: int, embed: int, heads: int, kv: int, head_dim: int, moe: MoEConfig, **more
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=more.pop("vocab_size", 1),
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        mlp_dim=0,
        moe=moe,
        qk_norm=True,
        tie_embeddings=True,
        **more,
    )


def _paper(*, layers: int, embed: int, heads: int, expert: int, learning_rate: float) -> Preset:
    """A size of the paper; what is the same for the three."""
    vocab = 65536
    return Preset(
        model=_decoder(
            vocab_size=vocab,
            layers=layers,
            embed=embed,
            heads=heads,
            kv=4,
            head_dim=128,
            moe=MoEConfig(num_experts=64, top_k=4, expert_dim=expert),
            max_positions=4096,
            compute_dtype="bfloat16",
            remat="minimal",
        ),
        vocab_size=vocab,
        seq_len=4096,
        batch=256,
        steps=95_367,  # 100B tokens
        learning_rate=learning_rate,
        warmup_steps=2000,
        alpha=1e-3,
        beta=1e-3,
        eval_every=1000,
        save_every=1000,
        log_every=10,
        eval_batches=32,
    )


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        model=_decoder(
            layers=3,
            embed=128,
            heads=4,
            kv=2,
            head_dim=32,
            moe=MoEConfig(num_experts=8, top_k=2, expert_dim=128),
            max_positions=1024,
        ),
        vocab_size=None,
        seq_len=128,
        batch=32,
        steps=300,
        learning_rate=3e-3,
        warmup_steps=30,
        alpha=1e-2,
        beta=1e-2,
        eval_every=25,
        save_every=100,
        log_every=10,
        eval_batches=2,
    ),
    "small": Preset(
        model=_decoder(
            layers=8,
            embed=512,
            heads=8,
            kv=4,
            head_dim=64,
            moe=MoEConfig(num_experts=32, top_k=4, expert_dim=512),
            max_positions=2048,
            remat="minimal",
        ),
        vocab_size=None,
        seq_len=1024,
        batch=64,
        steps=10_000,
        learning_rate=1e-3,
        warmup_steps=200,
        alpha=1e-3,
        beta=1e-3,
        eval_every=500,
        save_every=500,
        log_every=10,
        eval_batches=8,
    ),
    "edl-3b": _paper(layers=16, embed=1024, heads=8, expert=896, learning_rate=4e-4),
    "edl-8b": _paper(layers=20, embed=1536, heads=24, expert=1280, learning_rate=3e-4),
    "edl-15b": _paper(layers=24, embed=2048, heads=32, expert=1536, learning_rate=3e-4),
}


def get_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
      ValueError: Unknown name; the nearest one is named.
    """
    if name in PRESETS:
        return PRESETS[name]
    # Ratios, not get_close_matches: there is always a nearest name to offer.
    nearest = max(PRESETS, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())
    raise ValueError(
        f"preset: unknown {name!r}; did you mean {nearest!r}? known: {', '.join(PRESETS)}"
    )
