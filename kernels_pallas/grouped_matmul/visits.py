"""Which rows of which group each turn of a grouped-matmul kernel works on.

Rows are cut into tiles of equal height, groups start and end anywhere. A *visit* is the part of one
group in one tile: a tile with the end of one group and the start of the next is visited twice. The
number of visits depends on the group sizes, its bound does not, so that the tables have a static
length; visits past the last real one do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas.tiling import ceil_div

__all__ = ["Visits", "group_bounds", "output_visits", "weight_visits"]


class Visits(NamedTuple):
    """Tables with one int32 entry per visit, in order of rows.

    Attributes:
      tile: Tile of rows.
      group: Group whose matrix takes part.
      start: First row of the visit's group, counted in all rows.
      end: One past the group's last row. Equal to ``start`` where there is nothing to multiply.
    """

    tile: Int[Array, " visits"]
    group: Int[Array, " visits"]
    start: Int[Array, " visits"]
    end: Int[Array, " visits"]


def group_bounds(
    group_sizes: Int[Array, " groups"], num_rows: int
) -> tuple[Int[Array, " groups"], Int[Array, " groups"]]:
    """First row and one past the last row of each group; negative sizes are 0, ends are clipped."""
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), jnp.int32(0))
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), jnp.int32(num_rows))
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    return starts, ends


def _spread(tiles: Array, starts: Array, height: int, length: int) -> tuple[Array, Array, Array]:
    """Lays the groups' tiles one after the other: group, tile and "is real" of each visit."""
    through = jnp.cumsum(tiles, dtype=jnp.int32)
    visit = jnp.arange(length, dtype=jnp.int32)
    real = visit < through[-1]
    group = jnp.sum(visit[:, None] >= through[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, jnp.int32(tiles.shape[0] - 1))
    tile = starts[group] // jnp.int32(height) + visit - (through[group] - tiles[group])
    return group, tile, real


def output_visits(group_sizes: Int[Array, " groups"], num_rows: int, height: int) -> Visits:
    """Visits that cover every row once; rows past the last group form visits with no matrix.

    Consecutive visits of one tile answer for its rows from their own ``start`` on.
    """
    starts, ends = group_bounds(group_sizes, num_rows)
    groups = starts.shape[0]
    starts = jnp.concatenate([starts, ends[-1:]])
    ends = jnp.concatenate([ends, jnp.full((1,), num_rows, jnp.int32)])
    step = jnp.int32(height)
    touched = (ends + step - jnp.int32(1)) // step - starts // step
    touched = jnp.where(ends > starts, touched, jnp.int32(0))
    num_tiles = ceil_div(num_rows, height)
    group, tile, real = _spread(touched, starts, height, num_tiles + groups)
    multiplies = real & (group < groups)
    # Where nothing is multiplied the last matrix stays: a change of index would be a read for it.
    last = jnp.max(jnp.where(touched[:-1] > 0, jnp.arange(groups, dtype=jnp.int32), 0))
    start = jnp.where(real, starts[group], jnp.int32(num_rows))
    return Visits(
        tile=jnp.where(real, tile, jnp.int32(num_tiles - 1)),
        group=jnp.where(multiplies, group, last),
        start=start,
        end=jnp.where(multiplies, ends[group], start),
    )


def weight_visits(group_sizes: Int[Array, " groups"], num_rows: int, height: int) -> Visits:
    """Visits of the rows of every group in turn; an empty group has one visit with no rows."""
    starts, ends = group_bounds(group_sizes, num_rows)
    step = jnp.int32(height)
    num_tiles = ceil_div(num_rows, height)
    touched = (ends + step - jnp.int32(1)) // step - starts // step
    touched = jnp.where(ends > starts, touched, jnp.int32(1))
    group, tile, real = _spread(touched, starts, height, num_tiles + starts.shape[0])
    start = jnp.where(real, starts[group], jnp.int32(num_rows))
    return Visits(
        tile=jnp.minimum(jnp.where(real, tile, num_tiles - 1), jnp.int32(num_tiles - 1)),
        group=group,
        start=start,
        end=jnp.where(real, ends[group], start),
    )
