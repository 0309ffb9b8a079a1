"""Trains LoRA factors on a base that lies on eight devices and on one that was never placed.

Prints the losses of either, and checks that steps after the first trace and compile nothing.
"""

from __future__ import annotations

import json
import tempfile

import jax
import optax
from flax import nnx

from jaxlib_papers.data.answers import answer_batch
from jaxlib_papers.io.pretrained import load_pretrained, save_pretrained
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora
from jaxlib_papers.train.adapters import adapter_training
from jaxlib_papers.train.mesh import make_mesh
from tests.io.synthetic import CONFIG, make

BATCH = answer_batch([([3, 4], [5, 6]), ([7], [8, 9]), ([3, 1], [2]), ([4], [4])])


def losses(base: nnx.Module) -> list[float]:
    model = inject_lora(base, LoRAConfig(rank=2), key=jax.random.key(1))
    training = adapter_training(model, optax.adam(0.05))
    state, metrics = training.step(training.state, BATCH)
    seen = [float(metrics["loss"])]
    with jax.no_tracing():
        for _ in range(3):
            state, metrics = training.step(state, BATCH)
            seen.append(float(metrics["loss"]))
    return seen


with tempfile.TemporaryDirectory() as folder:
    save_pretrained(folder, make(CONFIG))
    placed = load_pretrained(folder, mesh=make_mesh("fsdp=2,expert=2,tensor=2")).model
print(json.dumps({"eight devices": losses(placed), "as made": losses(make(CONFIG))}))
