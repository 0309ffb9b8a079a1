"""The pattern's lists and tiles in the form in which the TPU kernels read them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from kernels_pallas.block_sparse_attention.pattern import BlockPattern

__all__ = [
    "TILE_BYTES",
    "Lists",
    "Tables",
    "fetch_tile",
    "make_lists",
    "tile_specs",
    "visited_pairs",
]

# Tiles that take no more than this stay in VMEM.
TILE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Lists:
    """Static sizes of a kernel's walk through its lists.

    Attributes:
      block: Side of a block, tokens.
      length: Tokens.
      stretch_blocks: Blocks of the listed side in VMEM at a time.
    """

    block: int
    length: int
    stretch_blocks: int


class Tables(NamedTuple):
    """Lists in scalar memory, one row a block.

    Attributes:
      bounds: First and last stretch that a row needs, flat int32 [maps * rows * 2].
      index: Listed blocks [maps, rows, 1, most].
      number: 0 or one more than the tile of each [maps, rows, 1, most].
      starts: Where the entries of each stretch begin [maps, rows, 1, stretches + 1].
    """

    bounds: Int[Array, " flat"]
    index: Int[Array, "maps rows 1 most"]
    number: Int[Array, "maps rows 1 most"]
    starts: Int[Array, "maps rows 1 stretches_and_1"]


def make_lists(index: Any, number: Any, count: Any, blocks: int, lists: Lists) -> Tables:
    """Tables of lists [maps, rows, most] whose entries name one of ``blocks`` blocks."""
    index, number, count = (jnp.asarray(x, jnp.int32) for x in (index, number, count))
    stretches = -(-blocks // lists.stretch_blocks)
    edges = jnp.arange(stretches + 1, dtype=jnp.int32) * lists.stretch_blocks
    valid = jnp.arange(index.shape[2], dtype=jnp.int32)[None, None] < count[:, :, None]
    before = valid[..., None] & (index[..., None] < edges[None, None, None])
    starts = jnp.sum(before, axis=2, dtype=jnp.int32)
    last = jnp.take_along_axis(index, jnp.maximum(count - 1, 0)[..., None], axis=2)[..., 0]
    bounds = jnp.stack([index[..., 0], last], axis=-1) // lists.stretch_blocks
    return Tables(bounds.reshape(-1), index[:, :, None], number[:, :, None], starts[:, :, None])


def tile_specs(tiles: Int[Array, "tiles block block"]) -> tuple[pl.BlockSpec, list[Any]]:
    """How a kernel gets the tiles, and the scratch it needs to fetch them one by one."""
    if tiles.size <= TILE_BYTES:
        return pl.BlockSpec(tiles.shape, lambda *_: (0, 0, 0)), []
    return pl.BlockSpec(memory_space=pl.ANY), [pltpu.VMEM(tiles.shape[1:], tiles.dtype)]


def fetch_tile(tiles_ref: Any, fetched: list[Any], n: Int[Array, ""]) -> Bool[Array, "block block"]:
    """Tile ``n``, from VMEM or through the scratch."""
    if fetched:
        pltpu.sync_copy(tiles_ref.at[n], fetched[0])
        tile = fetched[0][...]
    else:
        tile = tiles_ref[n]
    return tile.astype(jnp.int32) != 0


def visited_pairs(pattern: BlockPattern) -> int:
    """Pairs of a head that a kernel works on, for its cost estimate: a bound from static sizes."""
    most = min(pattern.kv_index.shape[2], pattern.q_index.shape[2])
    return pattern.kv_index.shape[1] * most * pattern.block**2
