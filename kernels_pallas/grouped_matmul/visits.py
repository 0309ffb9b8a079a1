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

__all__ = [
    "Visits",
    "group_bounds",
    "halves_of_rows",
    "output_visits",
    "split_visits",
    "weight_visits",
]


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


def halves_of_rows(num_rows: int, height: int) -> list[tuple[int, int]]:
    """First row and one past the last row of two halves, cut between tiles; one if there is one."""
    tiles = ceil_div(num_rows, height)
    halves = min(2, tiles)
    step = ceil_div(tiles, halves) * height
    return [(half * step, min(num_rows, (half + 1) * step)) for half in range(halves)]


def split_visits(
    group_sizes: Int[Array, " groups"], num_rows: int, height: int, parts: list[tuple[int, int]]
) -> Visits:
    """`output_visits` of stretches of rows that share nothing, for chips with several cores.

    Args:
      group_sizes: Rows of each group.
      num_rows: Rows in all.
      height: Of a tile.
      parts: First row and one past the last row of each stretch, at borders of tiles
        (`halves_of_rows`); the first is the longest.

    Returns:
      Equally many visits for each stretch, one stretch behind the other. What fills a shorter one
      up stays at its last tile and matrix, and does nothing.
    """
    starts, ends = group_bounds(group_sizes, num_rows)
    length, split = 0, []
    for first, past in parts:
        low, high = (jnp.clip(bound, first, past) for bound in (starts, ends))
        visits = output_visits(high - low, past - first, height)
        length = length or visits.tile.shape[0]
        fill = (0, length - visits.tile.shape[0])
        start, end = (
            jnp.pad(bound, fill, constant_values=past - first) + jnp.int32(first)
            for bound in (visits.start, visits.end)
        )
        tile = jnp.pad(visits.tile, fill, mode="edge") + jnp.int32(first // height)
        split.append(Visits(tile, jnp.pad(visits.group, fill, mode="edge"), start, end))
    return Visits(*(jnp.concatenate(arrays) for arrays in zip(*split, strict=True)))


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
