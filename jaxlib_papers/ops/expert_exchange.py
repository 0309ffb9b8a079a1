"""Tokens travel to the devices that hold their experts, and their results travel back.

For use inside `jax.shard_map`, where every device has tokens and experts of its own. Two ways:

* ragged: rows are sorted by destination and each device sends exactly what it has
  (`jax.lax.ragged_all_to_all`): ``tokens * top_k * width`` values each way. Without a receive
  factor there is room for all rows of all devices, and nothing is dropped. TPU and GPU.
* in slots: every destination gets the same number of slots. With a capacity factor slots belong to
  experts, and what finds none is dropped and counted. Without one there are slots for the worst
  case: nothing is dropped, but mostly zeros are sent. Any platform.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlib_papers.ops.checks import check_positive
from jaxlib_papers.ops.expert_dispatch import (
    Dispatch,
    expert_capacity,
    plan_dispatch,
    sum_rows,
    take_rows,
    weights_of_rows,
)
from jaxlib_papers.ops.expert_mixture import expert_mixture
from kernels_pallas.tiling import align_varying

__all__ = ["exchanged_expert_mixture"]

AxisNames = str | tuple[str, ...]


def exchanged_expert_mixture(
    x: Float[Array, "tokens embed"],
    indices: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_up: Float[Array, "local_experts embed two hidden"],
    down: Float[Array, "local_experts hidden embed"],
    *,
    axis_name: AxisNames,
    capacity_factor: float | None = None,
    receive_factor: float | None = None,
    ragged: bool = False,
) -> tuple[Float[Array, "tokens embed"], Int[Array, ""]]:
    """`ops.expert_mixture.expert_mixture` with the experts spread over a mesh axis.

    Call it inside `jax.shard_map`. Device i of the axis holds the experts from
    ``i * local_experts`` on and tokens that the others don't have.

    Args:
      x: This device's token vectors.
      indices: Experts of each token, out of those of all devices; one outside adds nothing.
      weights: Their weights, float32. They travel too, so that results come back weighted and
        nothing but the tokens is kept for the backward pass.
      gate_up: First matrices of this device's experts, gate before up.
      down: Second matrices.
      axis_name: Mesh axis (or axes) over which experts and tokens are spread.
      capacity_factor: None drops nothing. A number gives every expert that many times its balanced
        share of each device's tokens; later tokens past it are dropped.
      receive_factor: With ragged, a device has room for that many times the assignments of its
        own tokens, and what comes from later devices past it is dropped. None: for everything
        that can come, which with many devices is mostly empty.
      ragged: Send exactly the rows that there are; see the module.

    Returns:
      (y [tokens, embed] in the dtype of x, number of this device's assignments dropped, int32).

    Raises:
      ValueError: ragged together with a capacity factor, or a factor that is not positive.

    Source: GShard, arXiv 2006.16668, section 3.3 (slots); MegaBlocks, arXiv 2211.15841 (without
      drops).
    """
    if ragged and capacity_factor is not None:
        raise ValueError("exchanged_expert_mixture: capacity_factor fixes slots; take ragged=False")
    if receive_factor is not None:
        check_positive("receive_factor", receive_factor)
    x, indices, weights = align_varying(x, indices, weights)
    tokens, top_k = indices.shape
    local = gate_up.shape[0]
    devices = lax.axis_size(axis_name)
    experts = devices * local
    if capacity_factor is not None:
        slots = expert_capacity(tokens, experts, top_k, capacity_factor)
        dispatch = plan_dispatch(indices, experts, capacity=slots)
    else:
        outside = (indices < 0) | (indices >= experts)
        owner = jnp.where(outside, jnp.full_like(indices, devices), indices // local)
        slots = None if ragged else max(tokens * top_k, 1)
        dispatch = plan_dispatch(owner, devices, capacity=slots)

    exchange: _Slots | _Ragged
    if ragged:
        factor = devices if receive_factor is None else min(receive_factor, devices)
        exchange = _Ragged.plan(dispatch, axis_name, room=math.ceil(factor * tokens * top_k))
    else:
        exchange = _Slots(axis_name)
    received = exchange.there(take_rows(x, dispatch))
    # Which of its owner's experts a row is for (-1: none).
    number = weights_of_rows((indices % local + 1).astype(weights.dtype), dispatch)
    weight, number = exchange.labels_there(weights_of_rows(weights, dispatch), number)
    number = lax.stop_gradient(number).astype(jnp.int32)[:, None] - 1
    results, _ = expert_mixture(received, number, weight[:, None], gate_up, down)
    y = sum_rows(exchange.back(results), dispatch)
    if isinstance(exchange, _Ragged):
        return y, exchange.dropped
    assert dispatch.kept is not None, "slots are limited"
    real = (indices >= 0) & (indices < experts)
    return y, jnp.sum(real & ~dispatch.kept, dtype=jnp.int32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["axis_name"])
@dataclasses.dataclass(frozen=True)
class _Slots:
    """Equal parts to and from every device."""

    axis_name: AxisNames

    def there(self, rows: Array) -> Array:
        return lax.all_to_all(rows, self.axis_name, 0, 0, tiled=True)

    back = there

    def labels_there(self, *labels: Array) -> tuple[Array, ...]:
        return tuple(self.there(jnp.stack(labels, axis=1)).T)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields="sizes starts places from_sizes from_starts from_places dropped".split(),
    meta_fields=["axis_name", "room", "rows"],
)
@dataclasses.dataclass(frozen=True)
class _Ragged:
    """Parts of any size.

    Attributes:
      axis_name: Mesh axis.
      room: Rows that this device can receive.
      rows: Rows that it has.
      sizes: Rows that it sends to each, [devices].
      starts: Where they start here.
      places: Where they go on their receivers.
      from_sizes: Rows that come from each.
      from_starts: Where those go here.
      from_places: Where those lay on their senders.
      dropped: Rows that found no room on their receivers.
    """

    axis_name: AxisNames
    room: int
    rows: int
    sizes: Array
    starts: Array
    places: Array
    from_sizes: Array
    from_starts: Array
    from_places: Array
    dropped: Array

    @classmethod
    def plan(cls, dispatch: Dispatch, axis_name: AxisNames, *, room: int) -> _Ragged:
        wanted = lax.all_gather(dispatch.group_sizes, axis_name)  # [from, to]
        me = lax.axis_index(axis_name)
        # In each receiver, rows of earlier senders; in each sender, rows to earlier receivers.
        before = jnp.minimum(jnp.cumsum(wanted, axis=0) - wanted, room)
        inside = jnp.cumsum(wanted, axis=1) - wanted
        sizes = jnp.minimum(wanted, room - before)
        return cls(
            axis_name,
            room,
            dispatch.source.shape[0],
            sizes=sizes[me],
            starts=inside[me],
            places=before[me],
            from_sizes=sizes[:, me],
            from_starts=before[:, me],
            from_places=inside[:, me],
            dropped=jnp.sum(wanted[me] - sizes[me]),
        )

    def labels_there(self, weights: Array, numbers: Array) -> tuple[Array, Array]:
        """[rows] -> [room], zeros in rows that nothing came to; weights have a gradient."""
        return _labels_there(weights, numbers, self)

    def there(self, rows: Array) -> Array:
        sent = (self.starts, self.sizes, self.places, self.from_sizes)
        return self._send(rows, self.room, *sent)

    def back(self, rows: Array) -> Array:
        sent = (self.from_starts, self.from_sizes, self.from_places, self.sizes)
        return self._send(rows, self.rows, *sent)

    def _send(self, rows: Array, room: int, *parts: Array) -> Array:
        empty, _ = align_varying(jnp.zeros((room, *rows.shape[1:]), rows.dtype), rows)
        return lax.ragged_all_to_all(rows, empty, *parts, axis_name=self.axis_name)


def _pick(
    labels: tuple[Array, ...],
    axis_name: AxisNames,
    room: int,
    sizes: Array,
    starts: Array,
    places: Array,
) -> list[Array]:
    """Labels of rows that lie here from `starts` on and lay on the others from `places` on.

    Gathered from all devices: a few numbers a row, which a ragged exchange would pad to a line.
    """
    every = lax.all_gather(jnp.stack(labels), axis_name)  # rows last, so that they lie densely
    row = lax.iota(jnp.int32, room)
    owner = jnp.sum((row[:, None] >= starts[None, :]).astype(jnp.int32), axis=1) - 1
    inside = row - starts[owner]
    at = owner * labels[0].shape[0] + places[owner] + inside
    valid = inside < sizes[owner]

    def pick(label: Array) -> Array:
        picked = jnp.take(label.reshape(-1), at, mode="clip")
        return jnp.where(valid, picked, jnp.zeros_like(picked))

    return [pick(every[:, i]) for i in range(len(labels))]


@jax.custom_vjp
def _labels_there(weights: Array, numbers: Array, exchange: _Ragged) -> tuple[Array, Array]:
    e = exchange
    sent = (e.axis_name, e.room, e.from_sizes, e.from_starts, e.from_places)
    weights, numbers = _pick((weights, numbers), *sent)
    return weights, numbers


def _labels_fwd(
    weights: Array, numbers: Array, exchange: _Ragged
) -> tuple[tuple[Array, Array], _Ragged]:
    return _labels_there(weights, numbers, exchange), exchange


def _labels_bwd(exchange: _Ragged, gradients: tuple[Array, Array]) -> tuple[Array, Array, None]:
    e = exchange
    (back,) = _pick(gradients[:1], e.axis_name, e.rows, e.sizes, e.starts, e.places)
    return back, jnp.zeros_like(back), None


_labels_there.defvjp(_labels_fwd, _labels_bwd)
