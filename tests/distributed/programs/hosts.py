"""Trains the workload on several processes, each of which feeds its own rows.

Arguments: mesh text, then those of the harness. Without the latter it is one process that feeds
all rows. Prints the losses of the steps, this process' slot and the parameters' checksum.
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh")
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)

    # Only now: nothing may use a device before the processes know each other.
    import workload

    from jaxlib_papers.train.mesh import host_slot, make_mesh, to_global
    from jaxlib_papers.train.state import init_state
    from jaxlib_papers.train.step import make_train_step

    mesh = make_mesh(args.mesh)
    index, count = host_slot(mesh)
    rows = slice(index * workload.ROWS // count, (index + 1) * workload.ROWS // count)
    state = init_state(workload.model_fn, workload.OPTIMIZER, jax.random.key(0), mesh=mesh)
    step = make_train_step(
        workload.SPEC.graphdef, workload.OBJECTIVE, workload.OPTIMIZER, mesh=mesh, accum_steps=2
    )
    losses = []
    for number in range(5):
        local = {name: value[rows] for name, value in workload.batch(number).items()}
        state, metrics = step(state, to_global(local, mesh))
        losses.append(float(metrics["loss"]))
    total = jax.jit(
        lambda tree: sum(jax.numpy.sum(jax.numpy.abs(x)) for x in jax.tree.leaves(tree))
    )
    print(
        json.dumps(
            {
                "losses": losses,
                "slot": [index, count],
                "devices": jax.device_count(),
                "checksum": float(np.asarray(total(state.params))),
            }
        )
    )


if __name__ == "__main__":
    main()
