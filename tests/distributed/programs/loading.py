"""Loads a folder onto a mesh of eight devices and onto one, and compares.

Prints, for a dense model and a mixture: whether all numbers are equal, the largest share of the
bytes that one device holds, the specs of some parameters, the tokens generated on either, and
whether the folder written from the mesh is the folder that was read.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxlib_papers.io.pretrained import load_pretrained, save_pretrained
from jaxlib_papers.nn.generate import generate
from jaxlib_papers.train.mesh import make_mesh
from tests.io.synthetic import CONFIG, SPARSE, make, read_weights


def compare(config) -> dict:
    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name) / "first", Path(name) / "second"
        save_pretrained(first, make(config))
        one = load_pretrained(first).model
        mesh = make_mesh("fsdp=2,expert=2,tensor=2")
        many = load_pretrained(first, mesh=mesh).model
        save_pretrained(second, many)
        a, b = read_weights(first), read_weights(second)
        same_files = a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
    leaves = list(zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))
    held = sum(y.addressable_data(0).nbytes for _, y in leaves) / sum(x.nbytes for x, _ in leaves)
    prompt = np.arange(1, 9, dtype=np.int32)[None]
    return {
        "equal": all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves),
        "devices": min(len(y.sharding.device_set) for _, y in leaves),
        "held": held,
        "query": [str(axis) for axis in many.layers.attention.query[...].sharding.spec],
        "tokens": [generate(m, prompt, max_new_tokens=4).tokens.tolist() for m in (one, many)],
        "same_files": same_files,
    }


print(json.dumps({"dense": compare(CONFIG), "mixture": compare(SPARSE)}))
