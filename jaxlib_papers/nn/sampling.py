"""Choice of the next token from logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxlib_papers.ops.checks import as_float, check_count, check_nonnegative

__all__ = ["SamplingConfig", "restrict_logits", "sample_token"]


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a token is chosen; the default is the most probable one.

    The order is that of transformers: temperature, then top-k, then top-p.

    Attributes:
      temperature: Divides the logits; 0 takes the most probable token, whatever else is set.
      top_k: Only this many most probable tokens; None is all. Equal logits at the limit all stay.
      top_p: Only the smallest set of most probable tokens whose probabilities reach this sum, at
        least one; 1 is all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_nonnegative("SamplingConfig.temperature", self.temperature)
        if self.top_k is not None:
            check_count("SamplingConfig.top_k", self.top_k, 1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingConfig.top_p is {self.top_p}, expected a number in (0, 1]")


def restrict_logits(
    logits: Float[Array, "batch vocab"], config: SamplingConfig
) -> Float[Array, "batch vocab"]:
    """Logits of the distribution that is drawn from: -inf for what top-k and top-p leave out.

    Args:
      logits: Of the model; computed on in float32.
      config: With a temperature above 0.

    Source: top-p is nucleus sampling, Holtzman et al., arXiv 1904.09751, section 3.1.
    """
    logits = as_float(logits) / config.temperature
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        lowest = lax.top_k(logits, config.top_k)[0][:, -1:]
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    if config.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it do not reach the sum yet: the first always does.
        before = jnp.cumsum(probs, axis=-1) - probs
        count = jnp.sum(before < config.top_p, axis=-1, keepdims=True)
        lowest = jnp.take_along_axis(ordered, count - 1, axis=-1)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    return logits


def sample_token(
    logits: Float[Array, "batch vocab"], config: SamplingConfig, key: Key[Array, ""] | None
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """One token a row.

    Args:
      logits: Of the model.
      config: How to choose.
      key: PRNG key; not used (and may be None) at temperature 0.

    Returns:
      (token ids int32, their log-probabilities under the model itself, at temperature 1 and with
      nothing left out, float32).

    Raises:
      ValueError: A key is needed and there is none.
    """
    logits = as_float(logits)
    if config.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    elif key is None:
        raise ValueError("key is None; sampling at a temperature above 0 needs a PRNG key")
    else:
        tokens = jax.random.categorical(key, restrict_logits(logits, config), axis=-1)
    tokens = tokens.astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)
