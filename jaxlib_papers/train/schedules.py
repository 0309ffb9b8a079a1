"""Learning rate as a function of the number of optimizer updates.

Each factory returns an optax schedule: a function of the int32 update count (0 for the first
update), giving a float32 scalar. Warm-up starts at `peak / warmup_steps`, not at zero, so that the
first update already moves.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

__all__ = ["Schedule", "constant", "warmup_cosine", "warmup_stable_decay"]

Schedule = Callable[[jax.Array | int], jax.Array]


def _warmup(count: jax.Array, warmup_steps: int) -> jax.Array:
    return jnp.minimum((count + 1.0) / max(warmup_steps, 1), 1.0)


def _float(count: jax.Array | int) -> jax.Array:
    return jnp.asarray(count).astype(jnp.float32)


def _check_length(warmup_steps: int, total_steps: int) -> None:
    if warmup_steps < 0 or total_steps < 1 or warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps}, total_steps={total_steps}; expected "
            "0 <= warmup_steps <= total_steps and total_steps >= 1"
        )


def constant(peak: float, *, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up to `peak`, then constant."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}; expected >= 0")

    def schedule(count: jax.Array | int) -> jax.Array:
        return peak * _warmup(_float(count), warmup_steps)

    return schedule


def warmup_cosine(
    peak: float, *, warmup_steps: int, total_steps: int, min_ratio: float = 0.1
) -> Schedule:
    """Linear warm-up, then half a cosine down to `min_ratio * peak` at the last update.

    Args:
      peak: Highest learning rate.
      warmup_steps: Updates of warm-up.
      total_steps: All updates; the rate stays at its minimum after them.
      min_ratio: Last rate as a fraction of `peak`.

    Raises:
      ValueError: If warm-up is longer than the run.

    Source: Loshchilov and Hutter, arXiv:1608.03983, eq. 5, without restarts.
    """
    _check_length(warmup_steps, total_steps)
    span = max(total_steps - 1 - warmup_steps, 1)

    def schedule(count: jax.Array | int) -> jax.Array:
        count = _float(count)
        progress = jnp.clip((count - warmup_steps) / span, 0.0, 1.0)
        falling = min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return peak * jnp.where(count < warmup_steps, _warmup(count, warmup_steps), falling)

    return schedule


def warmup_stable_decay(
    peak: float,
    *,
    warmup_steps: int,
    total_steps: int,
    decay_fraction: float = 0.2,
    min_ratio: float = 0.0,
) -> Schedule:
    """Linear warm-up, a constant plateau, then a linear fall over the last part of the run.

    Args:
      peak: Highest learning rate.
      warmup_steps: Updates of warm-up.
      total_steps: All updates; the rate stays at its minimum after them.
      decay_fraction: Part of `total_steps` over which the rate falls.
      min_ratio: Last rate as a fraction of `peak`.

    Raises:
      ValueError: If warm-up and decay together are longer than the run.

    Source: Hu et al. (MiniCPM), arXiv:2404.06395, section 4; linear cooldown as in Hagele et al.,
    arXiv:2405.18392.
    """
    _check_length(warmup_steps, total_steps)
    decay_steps = round(total_steps * decay_fraction)
    if not 0.0 <= decay_fraction <= 1.0 or warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"decay_fraction={decay_fraction} with warmup_steps={warmup_steps}, "
            f"total_steps={total_steps}; expected a fraction in [0, 1] and warm-up plus decay "
            "within the run"
        )
    start = total_steps - decay_steps

    def schedule(count: jax.Array | int) -> jax.Array:
        count = _float(count)
        progress = jnp.clip((count + 1.0 - start) / max(decay_steps, 1), 0.0, 1.0)
        falling = 1.0 - (1.0 - min_ratio) * progress
        return peak * jnp.minimum(_warmup(count, warmup_steps), falling)

    return schedule
