"""Batches of prompts with their answers, for fine-tuning: the loss lies on the answers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["answer_batch"]


def answer_batch(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], *, length: int | None = None, pad_id: int = 0
) -> dict[str, np.ndarray]:
    """One row for each prompt and its answer, padded on the right.

    End an answer with the tokenizer's end token if the model is to learn to stop.

    Args:
        pairs: (token ids of the prompt, token ids of the answer).
        length: tokens to which rows are padded; None takes the longest row. One length for all
            batches compiles one step.
        pad_id: token in padding.

    Returns:
        `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_mask` bool, [rows, seq],
        as `data.packing` makes them: the target of a token is the next one, the loss counts where
        that belongs to the answer, and padding has segment 0. The last token is a target only.

    Raises:
        ValueError: no pair, an empty prompt or answer, ids that are no row of integers, or a row
            longer than `length`; the message says which.
    """
    if not pairs:
        raise ValueError("pairs is empty, expected at least one prompt with its answer")
    rows = []
    for index, pair in enumerate(pairs):
        parts = []
        for name, part in zip(("prompt", "answer"), pair, strict=True):
            ids = np.asarray(part)
            if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(
                    f"{name} of pairs[{index}] has shape {ids.shape} and dtype {ids.dtype}, "
                    "expected at least one token id; encode the text first"
                )
            parts.append(ids)
        rows.append(parts)
    sizes = [len(prompt) + len(answer) - 1 for prompt, answer in rows]
    longest = int(np.argmax(sizes))
    if length is None:
        length = sizes[longest]
    if sizes[longest] > length:
        raise ValueError(
            f"pairs[{longest}] takes {sizes[longest]} tokens, more than length={length}; shorten "
            "it, leave it out or raise length"
        )
    shape = (len(rows), length)
    tokens, targets = np.full(shape, pad_id, np.int32), np.full(shape, pad_id, np.int32)
    place, size = np.arange(length, dtype=np.int32)[None], np.asarray(sizes)[:, None]
    inside = place < size
    first = np.asarray([len(prompt) - 1 for prompt, _ in rows])[:, None]
    loss_mask = inside & (place >= first)
    for index, (row, used) in enumerate(zip(rows, sizes, strict=True)):
        whole = np.concatenate(row)
        tokens[index, :used] = whole[:-1]
        targets[index, :used] = np.where(loss_mask[index, :used], whole[1:], pad_id)
    return {
        "tokens": tokens,
        "targets": targets,
        "loss_mask": loss_mask,
        "segment_ids": inside.astype(np.int32),
        "positions": np.where(inside, place, np.int32(0)),
    }
