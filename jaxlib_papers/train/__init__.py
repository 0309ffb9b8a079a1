"""The trainer: mesh, sharding, state, step, loop, checkpoints, metrics."""
