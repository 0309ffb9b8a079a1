"""Runs kernels under shard_map on eight CPU devices and compares with the unsharded call.

Prints one JSON object: name of the check -> largest difference of values and gradients, relative to
the largest entry.
"""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.router_mean import router_mean
from kernels_pallas.sparsegen import sparsegen

RNG = np.random.default_rng(0)
MESH = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def difference(function, specs, out_specs, args, differentiable):
    """Largest relative difference between ``function`` and its shards, values and gradients."""
    interpreted = "interpret" in str(function)
    # The interpreter of JAX 0.10.2 mixes varying blocks with unvarying indices.
    sharded = jax.shard_map(
        function, mesh=MESH, in_specs=specs, out_specs=out_specs, check_vma=not interpreted
    )

    def with_gradient(f):
        def run(*args):
            def of_chosen(*chosen):
                full = list(args)
                for position, value in zip(differentiable, chosen, strict=True):
                    full[position] = value
                return f(*full)

            out, pullback = jax.vjp(of_chosen, *(args[i] for i in differentiable))
            ramp = jax.tree.map(
                lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), out
            )
            return out, pullback(ramp)

        return jax.jit(run)(*args)

    pairs = zip(
        jax.tree.leaves(with_gradient(function)),
        jax.tree.leaves(with_gradient(sharded)),
        strict=True,
    )
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))) for a, b in pairs)


def means(logits, mask, ids, *, implementation):
    return router_mean(logits, mask, segment_ids=ids, num_segments=3, implementation=implementation)


def main() -> None:
    found = {}
    for implementation in ("xla", "pallas_interpret"):
        batch = P("shard")
        found[f"sparsegen {implementation}"] = difference(
            partial(sparsegen, implementation=implementation),
            (batch, batch),
            batch,
            (array(16, 13, 7), -jnp.abs(array(16, 13))),
            (0, 1),
        )

        ids = jnp.asarray(RNG.integers(0, 4, (16, 20)), jnp.int32)
        found[f"router_mean {implementation}"] = difference(
            partial(means, implementation=implementation),
            (batch,) * 3,
            batch,
            (array(16, 20, 8), array(16, 20) > -1, ids),
            (0,),
        )

        # Experts: each device holds two groups and the rows that belong to them.
        per_device = 20
        sizes = np.stack([RNG.multinomial(per_device, [0.3, 0.7]) for _ in range(8)])
        sizes[3] = [per_device, 0]
        found[f"grouped_matmul experts {implementation}"] = difference(
            partial(grouped_matmul, implementation=implementation),
            (batch, batch, batch),
            batch,
            (array(8 * per_device, 24), array(16, 24, 13), jnp.asarray(sizes.ravel(), jnp.int32)),
            (0, 1),
        )

        # Columns: all devices hold all groups, each a slice of the matrices' columns.
        found[f"grouped_matmul columns {implementation}"] = difference(
            partial(grouped_matmul, implementation=implementation),
            (P(), P(None, None, "shard"), P()),
            P(None, "shard"),
            (array(37, 24), array(3, 24, 32), jnp.asarray([5, 0, 30], jnp.int32)),
            (0, 1),
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
