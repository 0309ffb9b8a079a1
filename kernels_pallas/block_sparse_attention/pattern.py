"""Which blocks of a square attention map are kept, and which of their elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from kernels_pallas.tiling import ceil_div

__all__ = ["BlockPattern"]

_EMPTY, _FULL, _MIXED = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPattern:
    """The kept blocks of one [L, L] map for all heads, or of one map a head.

    Lists are padded to a common length with their last entry. A block whose elements all count is
    full; any other one names the tile of its elements. Tiles are stored once each, so that a band
    needs a handful of them whatever its length.

    Attributes:
      kv_index: For each block of queries the kept blocks of keys in rising order, int32
        [heads or 1, blocks, most].
      kv_count: How many there are, int32 [heads or 1, blocks].
      partial: 0 for a full block, else one more than the index of its tile in ``elements``; int32,
        shaped as ``kv_index``.
      q_index: For each block of keys the blocks of queries that keep it, int32
        [heads or 1, blocks, most].
      q_count: How many there are, int32 [heads or 1, blocks].
      q_partial: As ``partial``, for ``q_index``.
      elements: Tiles of blocks that are not full, bool [tiles, block, block], queries by keys.
      block: Side of a block, tokens.
      length: L, tokens; the last block may reach past it.
    """

    kv_index: Int[np.ndarray, "heads_or_1 blocks most"]
    kv_count: Int[np.ndarray, "heads_or_1 blocks"]
    partial: Int[np.ndarray, "heads_or_1 blocks most"]
    q_index: Int[np.ndarray, "heads_or_1 blocks most_queries"]
    q_count: Int[np.ndarray, "heads_or_1 blocks"]
    q_partial: Int[np.ndarray, "heads_or_1 blocks most_queries"]
    elements: Bool[np.ndarray, "tiles block block"]
    block: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def heads(self) -> int:
        """Number of maps: that of the heads, or 1 when they share one."""
        return self.kv_index.shape[0]

    @classmethod
    def from_mask(cls, mask: Bool[np.ndarray, "*heads length length"], block: int = 128):
        """The pattern of any mask: empty blocks are skipped, mixed ones keep their elements.

        Args:
          mask: bool [L, L] for all heads or [H, L, L]; entry [q, k] is True where query q sees key
            k. A concrete array: the pattern is built on the host.
          block: Side of a block, tokens.

        Returns:
          The pattern, as exact as the mask whatever the block.

        Raises:
          ValueError: ``mask`` is traced, not boolean, not square, or empty; ``block`` < 1.
        """
        if isinstance(mask, jax.core.Tracer):
            raise ValueError(
                "mask: got a traced array, expected a concrete one; build the pattern outside jit "
                "and pass it in or close over it"
            )
        mask = np.asarray(mask)
        if mask.dtype != np.bool_:
            raise ValueError(f"mask: got dtype {mask.dtype}, expected bool")
        if mask.ndim not in (2, 3) or mask.shape[-1] != mask.shape[-2] or mask.size == 0:
            raise ValueError(f"mask: got shape {mask.shape}, expected [L, L] or [H, L, L], L >= 1")
        _check_block(block)
        mask = mask.reshape(-1, *mask.shape[-2:])
        heads, length, _ = mask.shape
        count = ceil_div(length, block)
        pad = count * block - length
        # Rows past the end belong to no query: they may count as seen or not.
        any_of = np.pad(mask, ((0, 0), (0, pad), (0, pad)))
        all_of = np.pad(mask, ((0, 0), (0, pad), (0, 0)), constant_values=True)
        all_of = np.pad(all_of, ((0, 0), (0, 0), (0, pad)))
        cut = (heads, count, block, count, block)
        kept = any_of.reshape(cut).any(axis=(2, 4))
        full = all_of.reshape(cut).all(axis=(2, 4))
        state = np.where(full, _FULL, np.where(kept, _MIXED, _EMPTY))

        def tile(h: int, i: int, j: int) -> np.ndarray:
            return any_of[h, i * block : (i + 1) * block, j * block : (j + 1) * block]

        return _build(state, tile, block, length)

    @classmethod
    def band(
        cls,
        length: int,
        half_width: int,
        *,
        sink: int = 0,
        context: int = 0,
        prompt: int | None = None,
        block: int = 128,
    ):
        """Queries see keys at most ``half_width`` away, the first ``sink`` keys, and the context.

        The last ``context`` tokens stand outside the band, as text beside video. The first
        ``prompt`` of them see and are seen by every token but the padding after them, which sees
        only itself. The mask is never formed.

        Args:
          length: L, tokens, the context included.
          half_width: Largest distance in the band, tokens; negative keeps no band.
          sink: How many first keys every query outside the padding sees.
          context: Tokens at the end that stand outside the band.
          prompt: How many of them are no padding; all by default.
          block: Side of a block, tokens.

        Returns:
          The pattern, one map for all heads.

        Raises:
          ValueError: ``length`` or ``block`` < 1, or sizes that don't fit the length.
        """
        if length < 1:
            raise ValueError(f"length: got {length}, expected at least 1")
        _check_block(block)
        prompt = context if prompt is None else prompt
        if not 0 <= prompt <= context <= length or not 0 <= sink <= length:
            raise ValueError(
                f"sink, context, prompt: got {sink}, {context}, {prompt}, expected 0 <= prompt <= "
                f"context <= length and 0 <= sink <= length with length {length}"
            )
        body, real = length - context, length - context + prompt
        count = ceil_div(length, block)
        first = np.arange(count) * block
        last = np.minimum(first + block, length) - 1
        nearest = np.maximum(first[:, None] - last[None], first[None] - last[:, None]).clip(min=0)
        farthest = np.maximum(last[:, None] - first[None], last[None] - first[:, None])
        within = last < body
        whole = (first + block <= length)[None, :]
        full = (farthest <= half_width) | (last < sink)[None, :]
        full &= within[:, None] & within[None, :] & whole
        kept = (nearest <= half_width) | (first < sink)[None, :]
        kept |= ~within[:, None] | ~within[None, :]
        state = np.where(full, _FULL, np.where(kept, _MIXED, _EMPTY))[None]

        def tile(_: int, i: int, j: int) -> np.ndarray:
            row = np.minimum(first[i] + np.arange(block), length - 1)[:, None]
            col = first[j] + np.arange(block)[None]
            seen = (np.abs(row - col) <= half_width) & (row < body) & (col < body)
            seen |= (col < sink) & (row < real)
            seen |= ((row >= body) | (col >= body)) & (row < real) & (col < real)
            seen |= (row >= real) & (col >= real)
            return seen & (col < length)

        return _build(state, tile, block, length)

    def to_mask(self) -> Bool[np.ndarray, "heads_or_1 length length"]:
        """The mask this pattern stands for; for inspection, it takes L^2 bytes a map."""
        count, block = self.kv_index.shape[1], self.block
        mask = np.zeros((self.heads, count * block, count * block), bool)
        for h, i, j, part in self._entries():
            rows, cols = (slice(n * block, (n + 1) * block) for n in (i, j))
            mask[h, rows, cols] = True if part == 0 else np.asarray(self.elements)[part - 1]
        return mask[:, : self.length, : self.length]

    def density(self) -> float:
        """Share of the (query, key) pairs that count."""
        first = np.arange(self.kv_index.shape[1]) * self.block
        inside = np.minimum(self.block, self.length - first)
        elements = np.asarray(self.elements)
        pairs = 0
        for _, i, j, part in self._entries():
            if part == 0:
                pairs += int(inside[i]) * int(inside[j])
            else:
                pairs += int(elements[part - 1][: inside[i], : inside[j]].sum())
        return pairs / (self.heads * self.length**2)

    def block_density(self) -> float:
        """Share of the blocks that are visited."""
        return float(np.asarray(self.kv_count).sum()) / (self.heads * self.kv_index.shape[1] ** 2)

    def _entries(self):
        lists = (self.kv_index, self.kv_count, self.partial)
        index, count, partial = (np.asarray(x) for x in lists)
        for h, i in np.ndindex(*count.shape):
            for t in range(count[h, i]):
                yield h, i, int(index[h, i, t]), int(partial[h, i, t])


def _check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block: got {block}, expected at least 1")


def _build(
    state: Int[np.ndarray, "heads blocks blocks"],
    tile: Callable[[int, int, int], np.ndarray],
    block: int,
    length: int,
) -> BlockPattern:
    """Lists both ways, and each different tile once."""
    heads, count, _ = state.shape
    # Per block: -1 empty, 0 full, else the number of its tile.
    numbers = np.where(state == _FULL, 0, -1).astype(np.int32)
    known: dict[bytes, int] = {}
    tiles: list[np.ndarray] = []
    for h, i, j in np.argwhere(state == _MIXED):
        elements = np.asarray(tile(h, i, j), bool)
        rows, cols = min(block, length - i * block), min(block, length - j * block)
        if not elements[:rows, :cols].any():
            continue
        if cols == block and elements[:rows].all():
            numbers[h, i, j] = 0
            continue
        key = np.packbits(elements).tobytes()
        if key not in known:
            tiles.append(elements)
            known[key] = len(tiles)
        numbers[h, i, j] = known[key]
    rows = _lists(numbers)
    columns = _lists(numbers.transpose(0, 2, 1))
    stored = np.stack(tiles) if tiles else np.ones((1, block, block), bool)
    return BlockPattern(*rows, *columns, stored, block, length)


def _lists(numbers: Int[np.ndarray, "heads rows cols"]) -> tuple[np.ndarray, Any, np.ndarray]:
    """Index, count and tile number of the kept blocks of each row."""
    kept = numbers >= 0
    count = kept.sum(axis=2).astype(np.int32)
    most = max(1, int(count.max(initial=0)))
    # Stable sort: kept blocks first, in rising order.
    order = np.argsort(~kept, axis=2, kind="stable")[:, :, :most].astype(np.int32)
    slot = np.minimum(np.arange(most), np.maximum(count - 1, 0)[:, :, None])
    index = np.take_along_axis(order, slot, axis=2)
    partial = np.maximum(np.take_along_axis(numbers, index, axis=2), 0)
    return index, count, partial.astype(np.int32)
