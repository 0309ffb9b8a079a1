"""Choice of implementation, block-size table and shape checks that all kernels share.

A kernel's public function takes ``implementation=None | "xla" | "pallas" | "pallas_interpret"``:

* ``None`` is the best that is available and always works: the Pallas kernel on TPU and GPU when the
  arguments qualify, XLA otherwise. The reason is logged once at DEBUG level. With several TPU
  devices the kernel runs inside `jax.shard_map` only: XLA can't split it by itself.
* a name means exactly that implementation, or a ``NotImplementedError`` that says why it can't be.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Literal

import jax

__all__ = [
    "Backend",
    "Implementation",
    "block_sizes",
    "choose",
    "current_platform",
    "target_platform",
]

Implementation = Literal["xla", "pallas", "pallas_interpret"]
Backend = Literal["xla", "tpu", "gpu", "interpret"]

_IMPLEMENTATIONS = ("xla", "pallas", "pallas_interpret")
_logger = logging.getLogger("kernels_pallas")
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target_platform(platform: Literal["cpu", "tpu", "gpu"]) -> Iterator[None]:
    """Traces for ``platform`` instead of the default backend (ahead-of-time compilation)."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def current_platform() -> str:
    """``"cpu"``, ``"tpu"`` or ``"gpu"``: the target in force, else JAX's default backend."""
    platform = _target.get() or jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


def _may_be_split() -> bool:
    """Whether the arrays at hand may be spread over devices without `jax.shard_map` around us."""
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes


@functools.cache
def _log_once(message: str) -> None:
    _logger.debug(message)


def choose(
    kernel: str,
    implementation: Implementation | None,
    *,
    tpu: str | None = None,
    gpu: str | None = None,
) -> Backend:
    """Resolves ``implementation`` for the platform in force.

    Args:
      kernel: name of the kernel, for messages.
      implementation: what the caller asked for.
      tpu: why the TPU kernel can't take these arguments, or None when it can.
      gpu: the same for the GPU kernel.

    Returns:
      Which code to run: ``"xla"``, ``"tpu"``, ``"gpu"`` or ``"interpret"`` (the TPU kernel in
      interpret mode).

    Raises:
      ValueError: ``implementation`` is not a known name.
      NotImplementedError: the named implementation can't take these arguments or this platform.
    """
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: got {implementation!r}, expected None or one of {_IMPLEMENTATIONS}"
        )
    if implementation == "xla":
        return "xla"
    if implementation == "pallas_interpret":
        if tpu is not None:
            raise NotImplementedError(f"{kernel}: implementation='pallas_interpret': {tpu}")
        return "interpret"

    platform = current_platform()
    reasons = {"tpu": tpu, "gpu": gpu}
    reason = reasons.get(platform, f"no Pallas kernel runs on platform {platform!r}")
    if reason is None and implementation is None and platform == "tpu" and _may_be_split():
        reason = (
            f"XLA can't split a Mosaic kernel over {jax.device_count()} devices by itself; call it "
            "inside jax.shard_map, or name implementation='pallas' if one device holds everything"
        )
    if reason is None:
        return "tpu" if platform == "tpu" else "gpu"
    if implementation == "pallas":
        raise NotImplementedError(
            f"{kernel}: implementation='pallas': {reason}; use implementation=None to fall back "
            "to XLA, or 'pallas_interpret' to debug"
        )
    _log_once(f"{kernel}: XLA path taken: {reason}")
    return "xla"


@functools.cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]:
    text = resources.files("kernels_pallas").joinpath("block_sizes.json").read_text()
    return json.loads(text)


def block_sizes(kernel: str, device_kind: str, shape_class: str) -> Mapping[str, int] | None:
    """Tuned block sizes for a kernel, device kind and shape class; None when not in the table."""
    return _table().get(kernel, {}).get(device_kind, {}).get(shape_class)
