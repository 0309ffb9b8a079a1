"""Tokens per second and model FLOP utilisation (MFU), without the time that is no training.

MFU = tokens/s x model FLOPs per token / peak FLOP/s of all devices. The FLOPs per token follow the
convention of :mod:`jaxlib_papers.train.flops` (causal attention counted half, backward = twice the
forward, recomputation not counted). The peak is given, or the maker's dense bfloat16 figure for
known accelerators, or measured with a matrix product; which of the three is reported beside it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["PeakFlops", "Throughput", "measure_matmul_flops", "peak_flops"]

# Makers' dense bfloat16 figures per device as JAX counts devices. First match wins.
_BF16_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("TPU v6", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
)


class PeakFlops(NamedTuple):
    """Peak rate of all devices together.

    Attributes:
      total: FLOP/s.
      source: ``given``, ``table`` or ``measured``.
    """

    total: float
    source: str


def measure_matmul_flops(dtype: str = "float32", *, seconds: float = 0.3) -> float:
    """Best rate of a square matrix product on the first local device, in FLOP/s.

    Args:
      dtype: Operand dtype.
      seconds: For about how long to repeat it, at least three times.
    """
    device = jax.local_devices()[0]
    size = 1024 if device.platform == "cpu" else 8192
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    best, end, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        product(x).block_until_ready()
        best, rounds = min(best, time.perf_counter() - start), rounds + 1
    return 2 * size**3 / best


def peak_flops(dtype: str = "float32", *, per_device: float | None = None) -> PeakFlops:
    """Peak FLOP/s of all devices of the run.

    Args:
      dtype: Compute dtype of the model; the table holds for bfloat16 only.
      per_device: Given peak of one device in FLOP/s.

    Returns:
      Total and source. Host-platform devices of one process share its cores, so they count once.

    Raises:
      ValueError: ``per_device`` is not positive.
    """
    devices = jax.devices()
    if per_device is not None:
        if not per_device > 0:
            raise ValueError(f"per_device: got {per_device} FLOP/s, expected a positive number")
        return PeakFlops(per_device * len(devices), "given")
    if dtype == "bfloat16":
        for name, peak in _BF16_PEAKS:
            if name.lower() in devices[0].device_kind.lower():
                return PeakFlops(peak * len(devices), "table")
    count = jax.process_count() if devices[0].platform == "cpu" else len(devices)
    return PeakFlops(measure_matmul_flops(dtype) * count, "measured")


class Throughput:
    """A stop-watch for training steps, stopped during compilation, evaluation and saves.

    Two figures: over the interval since the last ``lap`` and over the whole run.
    """

    def __init__(self, flops_per_token: float | None = None, peak: PeakFlops | None = None):
        """Starts stopped.

        Args:
          flops_per_token: Model FLOPs of forward and backward pass per token.
          peak: Peak of all devices; without either of the two there is no MFU.
        """
        self._flops, self._peak = flops_per_token, peak
        self._since: float | None = None
        self._seconds = self._lap_seconds = 0.0
        self._tokens = self._lap_tokens = 0
        self._clock = time.perf_counter

    def start(self) -> None:
        """Runs the watch; nothing if it runs already."""
        if self._since is None:
            self._since = self._clock()

    def stop(self) -> None:
        """Stops the watch; nothing if it is stopped already."""
        if self._since is not None:
            elapsed = self._clock() - self._since
            self._seconds, self._lap_seconds = self._seconds + elapsed, self._lap_seconds + elapsed
            self._since = None

    def add(self, tokens: int) -> None:
        """Counts tokens of a step that finished while the watch ran."""
        self._tokens, self._lap_tokens = self._tokens + tokens, self._lap_tokens + tokens

    def lap(self) -> dict[str, float]:
        """``tokens_per_second`` (and ``mfu``) since the last lap, which ends here."""
        running = self._since is not None
        self.stop()
        values = self._rates(self._lap_tokens, self._lap_seconds)
        self._lap_tokens, self._lap_seconds = 0, 0.0
        if running:
            self.start()
        return values

    def total(self) -> dict[str, float]:
        """``tokens_per_second`` (and ``mfu``) over all time that the watch ran."""
        running = self._since is not None
        self.stop()
        if running:
            self.start()
        return self._rates(self._tokens, self._seconds)

    def _rates(self, tokens: int, seconds: float) -> dict[str, float]:
        if seconds <= 0 or tokens == 0:
            return {}
        values = {"tokens_per_second": tokens / seconds}
        if self._flops is not None and self._peak is not None:
            values["mfu"] = values["tokens_per_second"] * self._flops / self._peak.total
        return values
