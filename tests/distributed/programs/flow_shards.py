"""Densities, thresholds and volumes of rows on eight devices, and under shard_map.

Prints one JSON object: name of the check -> largest absolute difference to the unsharded call.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlib_papers.nn.flows.coupling import ConditionalSplineFlow
from jaxlib_papers.nn.flows.trajectory import TrajectoryFlow
from jaxlib_papers.ops.conformal import conformal_threshold
from jaxlib_papers.ops.regions import log_volume_importance

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
ROWS, SAMPLES = 32, 10


def main() -> None:
    key = jax.random.key(0, impl="unsafe_rbg")
    flow = jax.jit(
        lambda: ConditionalSplineFlow(2, 3, layers=2, hidden=8, bins=4, zero_last=False, key=key)
    )()
    walk = jax.jit(
        lambda: TrajectoryFlow(
            4, 1, context_dim=3, blocks=2, width=8, heads=2, attention_layers=1, key=key
        )
    )()
    rng = np.random.default_rng(0)
    y, x, z = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((ROWS, 2), (ROWS, 3), (SAMPLES, ROWS, 2))
    )

    def everything(y, x, z):
        """Density and its gradient of each row, and the volume of its region."""
        log_prob, gradient = jax.vmap(jax.value_and_grad(flow.log_prob))(y, x)
        samples, logdet = flow.inverse(z, x)
        inside = jnp.sum(samples**2, axis=-1) < 4
        volume = log_volume_importance(logdet, inside)
        # The same future at the history of each row, and back.
        future, _ = walk.inverse(jnp.ones((4, 1)), x)
        return log_prob, gradient, volume, walk.log_prob(future, x)

    def with_threshold(y, x, z):
        out = everything(y, x, z)
        return *out, conformal_threshold(out[0], 0.1)

    wanted = jax.jit(with_threshold)(y, x, z)
    specs = (P("data"), P("data"), P(None, "data"))
    placed = [
        jax.device_put(a, NamedSharding(MESH, s)) for a, s in zip((y, x, z), specs, strict=True)
    ]
    assert all(len(a.sharding.device_set) == 8 for a in placed)
    spread = jax.jit(with_threshold)(*placed)
    mapped = jax.jit(
        jax.shard_map(everything, mesh=MESH, in_specs=specs, out_specs=(P("data"),) * 4)
    )(y, x, z)
    names = ("log_prob", "gradient", "log_volume", "trajectory", "threshold")
    found = {}
    for how, got in (("placed", spread), ("shard_map", mapped)):
        for name, ours, theirs in zip(names, got, wanted, strict=False):
            found[f"{name}, {how}"] = float(jnp.max(jnp.abs(ours - theirs)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
