"""Tile sizes, loads and the loop over blocks that the Triton attention kernels share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention.scores import ScoreSpec, in_band
from kernels_pallas.dispatch import block_sizes
from kernels_pallas.tiling import next_power_of_2
from kernels_pallas.triton import padded_slice

__all__ = [
    "Pairs",
    "Tile",
    "View",
    "choose_tile",
    "load_line",
    "load_rows",
    "store_rows",
    "visit_blocks",
]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile of scores that one step of a program handles, and how Triton runs it.

    Attributes:
      queries: Queries in a tile, a power of two from 16 on.
      keys: Keys in a tile, a power of two from 16 on.
      warps: Warps of a program.
      stages: Blocks in flight in the software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def params(self) -> plgpu.CompilerParams:
        """The parameters that also select the Triton lowering."""
        return plgpu.CompilerParams(num_warps=self.warps, num_stages=self.stages)


def choose_tile(kernel: str, spec: ScoreSpec, head_dim: int, dtype: Any) -> Tile:
    """Tile from the block-size table, or by a rule that fits 100 KiB of shared memory."""
    wide = next_power_of_2(max(head_dim, 16))
    narrow = jnp.dtype(dtype).itemsize <= 2
    if kernel == "attention":
        tile = Tile(128, 64, 8 if wide >= 128 else 4, 2 if wide >= 128 else 3)
        if wide > 128 or not narrow:
            tile = Tile(64, 32, 4, 2)
    else:
        tile = Tile(64, 64, 8 if wide >= 128 else 4, 2)
        if wide > 128 or not narrow:
            tile = Tile(32, 32, 4, 1)
    if jax.default_backend() == "gpu":
        kind = jax.devices()[0].device_kind
        length = next_power_of_2(max(spec.queries, spec.keys))
        tile = dataclasses.replace(tile, **(block_sizes(kernel, kind, f"d{wide}_t{length}") or {}))
    return dataclasses.replace(
        tile,
        queries=min(tile.queries, next_power_of_2(max(spec.queries, 16))),
        keys=min(tile.keys, next_power_of_2(max(spec.keys, 16))),
    )


@dataclasses.dataclass(frozen=True)
class View:
    """Part of a ref: one index each for the axes before and between those that a tile spans.

    Triton takes one indexer a load, so that a ref can't be narrowed step by step.

    Attributes:
      ref: The ref.
      before: Indices of the leading axes.
      between: Indices of the axes between the last two that are left.
    """

    ref: Any
    before: tuple[Any, ...] = ()
    between: tuple[Any, ...] = ()

    def at(self, *window: Any) -> Any:
        """The ref, narrowed to a window of one or two slices."""
        return self.ref.at[(*self.before, window[0], *self.between, *window[1:])]


def load_rows(
    view: View, first: Int[Array, ""], block: int, length: int, masked: bool
) -> Float[Array, "block wide"]:
    """Rows ``first`` on of a view [length, dim]; zeros past either end of it."""
    dim = view.ref.shape[-1]
    wide = next_power_of_2(max(dim, 16))
    inside = None
    if wide != dim:
        inside = jnp.broadcast_to(jnp.arange(wide)[None, :] < dim, (block, wide))
    if masked and length % block:
        rows = jnp.broadcast_to(jnp.arange(block)[:, None] < length - first, (block, wide))
        inside = rows if inside is None else inside & rows
    ref = view.at(pl.ds(first, block), padded_slice(wide, first))
    if inside is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=inside, other=jnp.zeros((), view.ref.dtype))


def store_rows(
    view: View, first: Int[Array, ""], value: Float[Array, "block wide"], length: int
) -> None:
    """Writes what of ``value`` lies inside a view [length, dim]."""
    block, wide = value.shape
    dim = view.ref.shape[-1]
    inside = (jnp.arange(block)[:, None] < length - first) & (jnp.arange(wide)[None, :] < dim)
    ref = view.at(pl.ds(first, block), padded_slice(wide, first))
    plgpu.store(ref, value.astype(view.ref.dtype), mask=inside)


def load_line(view: View, first: Int[Array, ""], block: int, length: int) -> Array:
    """Entries ``first`` on of a view [length]; zeros past its end."""
    ref = view.at(pl.ds(first, block))
    if length % block == 0:
        return plgpu.load(ref)
    zero = jnp.zeros((), view.ref.dtype)
    return plgpu.load(ref, mask=jnp.arange(block) < length - first, other=zero)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the logits of a (batch, head) need beside q and k; any of the views may be None.

    Attributes:
      bias: [queries, keys] or, with ``bias_line``, [keys] float.
      mask: [queries, keys] or, with ``mask_line``, [keys] int8.
      q_seg: [queries] int32.
      k_seg: [keys] int32.
    """

    bias: View | None
    mask: View | None
    q_seg: View | None
    k_seg: View | None
    bias_line: bool
    mask_line: bool

    def _tile(self, view, line, first_query, first_key, tile: Tile, spec: ScoreSpec, transposed):
        row = jnp.arange(tile.queries)
        column = jnp.arange(tile.keys)
        if line:
            values = load_line(view, first_key, tile.keys, spec.keys)
            return values[:, None] if transposed else values[None, :]
        inside = (row[:, None] < spec.queries - first_query) & (
            column[None, :] < spec.keys - first_key
        )
        ref = view.at(pl.ds(first_query, tile.queries), pl.ds(first_key, tile.keys))
        value = plgpu.load(ref, mask=inside, other=jnp.zeros((), view.ref.dtype))
        return value.T if transposed else value

    def bias_tile(self, first_query, first_key, tile: Tile, spec: ScoreSpec, transposed: bool):
        """The bias of a tile in float32."""
        value = self._tile(
            self.bias, self.bias_line, first_query, first_key, tile, spec, transposed
        )
        return value.astype(jnp.float32)

    def allowed(
        self, first_query, first_key, tile: Tile, spec: ScoreSpec, transposed: bool
    ) -> Bool[Array, "a b"] | None:
        """Which pairs of a tile count; None when all do."""
        shape = (tile.keys, tile.queries) if transposed else (tile.queries, tile.keys)
        allowed = in_band(
            shape, int(transposed), first_query, first_key, spec,
            check_queries=transposed and spec.queries % tile.queries != 0,
            check_keys=spec.keys % tile.keys != 0,
        )  # fmt: skip
        if self.q_seg is not None:
            query = load_line(self.q_seg, first_query, tile.queries, spec.queries)
            key = load_line(self.k_seg, first_key, tile.keys, spec.keys)
            same = key[:, None] == query[None, :] if transposed else query[:, None] == key[None, :]
            allowed = same if allowed is None else allowed & same
        if self.mask is not None:
            chosen = self._tile(
                self.mask, self.mask_line, first_query, first_key, tile, spec, transposed
            )
            chosen = jnp.broadcast_to(chosen != 0, shape)
            allowed = chosen if allowed is None else allowed & chosen
        return allowed


def visit_blocks(
    bounds_ref: Any,
    row: Int[Array, ""],
    body: Callable[[Any, Any, bool], Any],
    carry: Any,
    *,
    head_masked: bool,
    full: bool,
    tail_masked: bool,
) -> Any:
    """Runs ``body(block, carry, masked)`` over the blocks of `block_bounds` for one row of blocks.

    Args:
      bounds_ref: The bounds, flattened.
      row: Which row of blocks.
      body: One step.
      carry: What it starts from.
      head_masked: Whether there may be blocks that need a mask before the full ones.
      full: Whether there may be full blocks; if not, one masked loop does it all.
      tail_masked: Whether there may be blocks that need a mask after the full ones.
    """
    first, first_full, end_full, end = (bounds_ref[row * 4 + n] for n in range(4))
    if not full:
        return jax.lax.fori_loop(first, end, lambda j, c: body(j, c, True), carry)
    if head_masked:
        carry = jax.lax.fori_loop(first, first_full, lambda j, c: body(j, c, True), carry)
    carry = jax.lax.fori_loop(first_full, end_full, lambda j, c: body(j, c, False), carry)
    if tail_masked:
        carry = jax.lax.fori_loop(end_full, end, lambda j, c: body(j, c, True), carry)
    return carry
