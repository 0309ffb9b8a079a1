"""Trains some steps of the workload from a checkpoint, on whatever devices and processes there are.

Arguments: mesh text, directory, steps to take, then those of the harness. Takes up the last
checkpoint of the directory if there is one, and writes one at its end. Prints the losses, a hash of
each global batch as the host feeds it, and a hash of the whole state.
"""

from __future__ import annotations

import argparse
import hashlib
import json

import jax
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh")
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)

    # Only now: nothing may use a device before the processes know each other.
    import workload
    from jax.experimental import multihost_utils

    from jaxlib_papers.train.checkpoint import Checkpointer
    from jaxlib_papers.train.mesh import host_slot, make_mesh, to_global
    from jaxlib_papers.train.state import abstract_state, init_state
    from jaxlib_papers.train.step import make_train_step

    size = np.prod([int(part.split("=")[1]) for part in args.mesh.split(",")])
    mesh = make_mesh(args.mesh, jax.devices()[:size])
    index, count = host_slot(mesh) if args.processes > 1 else (0, 1)
    rows = slice(index * workload.ROWS // count, (index + 1) * workload.ROWS // count)
    step = make_train_step(
        workload.SPEC.graphdef, workload.OBJECTIVE, workload.OPTIMIZER, mesh=mesh
    )
    losses, batches = [], []
    with Checkpointer(args.directory) as saved:
        if saved.latest_step() is None:
            first = 0
            state = init_state(workload.model_fn, workload.OPTIMIZER, jax.random.key(0), mesh=mesh)
        else:
            target = abstract_state(workload.model_fn, workload.OPTIMIZER, mesh=mesh)
            restored = saved.restore(target)
            first, state = restored.step, restored.state
        for number in range(first, first + args.steps):
            local = {name: value[rows] for name, value in workload.batch(number).items()}
            batch = to_global(local, mesh)
            tokens = batch["tokens"]
            if args.processes > 1:
                tokens = multihost_utils.process_allgather(tokens, tiled=True)
            batches.append(hashlib.sha256(np.asarray(tokens).tobytes()).hexdigest()[:16])
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        saved.save(first + args.steps, state)
    digest = ""
    if args.processes == 1:
        whole = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
        digest = hashlib.sha256(whole).hexdigest()
    print(json.dumps({"first": first, "losses": losses, "batches": batches, "digest": digest}))


if __name__ == "__main__":
    main()
