"""Trains the workload on one device and on meshes of eight, and compares.

Arguments: mesh texts. Prints per mesh: the metrics of every step, and how far the gradient of the
first step and the parameters after the last are from those of one device.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import workload

from jaxlib_papers.train.mesh import make_mesh, to_global
from jaxlib_papers.train.state import init_state, state_shardings
from jaxlib_papers.train.step import make_train_step

STEPS = 20


def train(mesh, start=None, **options):
    if start is None:
        state = init_state(workload.model_fn, workload.OPTIMIZER, jax.random.key(0), mesh=mesh)
    else:
        state = jax.device_put(start, state_shardings(workload.SPEC.graphdef, start, mesh))
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state))
    step = make_train_step(
        workload.SPEC.graphdef, workload.OBJECTIVE, workload.OPTIMIZER, mesh=mesh, **options
    )
    history, gradient = [], None
    for number in range(STEPS):
        state, metrics = step(state, to_global(workload.batch(number), mesh))
        history.append({name: np.asarray(value).tolist() for name, value in metrics.items()})
        if number == 0:
            # The first moment after one step is the gradient, up to one factor for all.
            gradient = jax.tree.map(np.asarray, state.opt_state.mu)
    return history, gradient, jax.tree.map(np.asarray, state.params), held


def distance(tree, reference):
    """The largest difference in any array, relative to the array's largest entry."""
    far = jax.tree.map(lambda x, r: np.max(np.abs(x - r)) / np.max(np.abs(r)), tree, reference)
    return float(max(jax.tree.leaves(far)))


def main() -> None:
    start = init_state(workload.model_fn, workload.OPTIMIZER, jax.random.key(0))
    start = jax.tree.map(np.asarray, start)
    history, gradient, params, held = train(None)
    out = {"one": {"metrics": history, "held": held}}
    for text in sys.argv[1:]:
        mesh_text, _, accum = text.partition("/")
        result = train(
            make_mesh(mesh_text),
            # One mesh initialises in its shards; the others would only repeat it.
            None if mesh_text == "fsdp=8" else start,
            accum_steps=int(accum or 1),
            exact_statistics=bool(accum),
        )
        out[text] = {
            "metrics": result[0],
            "gradient": distance(result[1], gradient),
            "params": distance(result[2], params),
            "held": result[3],
        }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
