"""Rotary position embedding in the half-split form, with the usual extensions of the context.

Channel i is rotated together with channel ``i + dim / 2``. Weights stored for the interleaved form
(pairs ``2i, 2i + 1``) have to be permuted when they are loaded.

Source: Su et al., arXiv 2104.09864, with the rotation's pairs half a head apart.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import check_choice, check_positive, float_dtype

__all__ = ["RopeScaling", "apply_rope", "rope_angles", "rope_frequencies"]

RopeKind = Literal["linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than the trained one.

    Attributes:
      kind: "linear" divides every frequency by ``factor``; "llama3" only the low ones, with a
        linear transition; "yarn" ramps between both by how often a channel turns within the
        original context, and scales the attention logits.
      factor: New context over original context.
      original_max_positions: Context that the model was trained with.
      low_freq_factor: llama3: below ``original / low_freq_factor`` turns a channel is stretched.
      high_freq_factor: llama3: above it a channel is left alone.
      beta_fast: yarn: channels with more turns than this are left alone.
      beta_slow: yarn: channels with fewer turns are stretched.
      attention_factor: yarn: factor on cos and sin; None is ``0.1 ln(factor) + 1``.
      truncate: yarn: round the ramp's ends to whole channels.
    """

    kind: RopeKind
    factor: float
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_choice("RopeScaling.kind", self.kind, get_args(RopeKind))
        check_positive("RopeScaling.factor", self.factor)
        check_positive("RopeScaling.original_max_positions", self.original_max_positions)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling.high_freq_factor is {self.high_freq_factor}, expected more than "
                f"low_freq_factor = {self.low_freq_factor}"
            )


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / width, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    def channel(turns: float) -> float:
        """The (fractional) channel that turns this often within the original context."""
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return frequencies * (1 - ramp + ramp / scaling.factor)


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, float]:
    """Angular frequencies of the channel pairs, and the factor on cos and sin.

    Args:
      head_dim: Size of a head, even.
      theta: Base: frequencies are ``theta ** (-2 i / head_dim)``.
      scaling: Extension of the context.

    Returns:
      (float64 [head_dim / 2] in radians per position, factor); host constants.

    Raises:
      ValueError: ``head_dim`` is odd or not positive, ``theta`` not above 1.

    Source: Su et al., arXiv 2104.09864, section 3.2; yarn: Peng et al., arXiv 2309.00071,
      section 3.2; llama3: the released configuration of Llama 3.1.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}, expected a positive even number")
    if not theta > 1:
        raise ValueError(f"theta is {theta}, expected a number > 1")
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    factor = scaling.attention_factor
    if factor is None:
        factor = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
    return _yarn(frequencies, head_dim, theta, scaling), factor


def rope_angles(
    positions: Int[Array, "*batch length"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "*batch length half"], Float[Array, "*batch length half"]]:
    """Cosines and sines of every position's angles, float32.

    Args:
      positions: Integer positions; they restart in each packed segment.
      head_dim: Size of a head, even.
      theta: Base of the frequencies.
      scaling: Extension of the context.

    Raises:
      ValueError: As `rope_frequencies`.
    """
    frequencies, factor = rope_frequencies(head_dim, theta, scaling)
    frequencies = jnp.asarray(frequencies, jnp.float32)
    frequencies = jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "*batch length heads dim"],
    cos: Float[Array, "*batch length half"],
    sin: Float[Array, "*batch length half"],
) -> Float[Array, "*batch length heads dim"]:
    """Rotates channel pairs (i, i + dim / 2) of every head by its position's angles.

    Args:
      x: Queries or keys, any float dtype; the result has the same (rotated in float32).
      cos: From `rope_angles`.
      sin: From `rope_angles`.

    Raises:
      ValueError: The angles' last axis is not half of the heads' size.
    """
    if cos.shape[-1] * 2 != x.shape[-1]:
        raise ValueError(f"cos has {cos.shape[-1]} channels, expected half of {x.shape[-1]}")
    dtype = float_dtype(x, cos)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = cos[..., None, :].astype(dtype), sin[..., None, :].astype(dtype)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
