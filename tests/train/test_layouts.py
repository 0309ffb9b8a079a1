"""Where every parameter of every preset lies, on meshes of 8 to 512 devices: a snapshot.

A change of rules, names or shapes shows here as a difference. After one that is meant,
`python -m tests.train.test_layouts` writes the snapshot anew; read the difference before you keep
it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib

import jax
import numpy as np
import pytest

from experiments.presets import PRESETS, get_preset
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.train.mesh import abstract_mesh, batch_shardings
from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
from jaxlib_papers.train.sharding import describe_shardings
from jaxlib_papers.train.state import abstract_model

SNAPSHOT = pathlib.Path(__file__).parent / "layouts.json"
SMALL = ("fsdp=8", "data=2,fsdp=2,expert=2", "fsdp=4,tensor=2", "fsdp=4,context=2")
LARGE = ("fsdp=64", "fsdp=16,expert=4", "fsdp=8,expert=32", "fsdp=16,expert=32", "fsdp=8,tensor=4")
CASES = [
    (preset, mesh)
    for preset in PRESETS
    for mesh in (*SMALL, *(LARGE if preset.startswith("edl-") else ()))
]


@functools.cache
def model_of(preset: str):
    chosen = get_preset(preset)
    config = dataclasses.replace(chosen.model, vocab_size=chosen.vocab_size or 288)
    return abstract_model(lambda key: DecoderLM(config, key=key))


def text_of(spec) -> str:
    """ "(fsdp, -, tensor)": what each dimension is split over."""
    return ", ".join("-" if e is None else "*".join(np.atleast_1d(e)) for e in spec)


def layout(preset: str, mesh: str) -> dict[str, str]:
    model = model_of(preset)
    rows = describe_shardings(model.params, model.axes, abstract_mesh(mesh))
    return {row.name: text_of(row.spec) for row in rows} | {
        "bytes per device": f"{sum(row.bytes_per_device for row in rows):,}"
    }


@pytest.mark.parametrize(("preset", "mesh"), CASES)
def test_parameters_lie_where_they_lay(preset, mesh):
    expected = json.loads(SNAPSHOT.read_text())[f"{preset} on {mesh}"]
    assert layout(preset, mesh) == expected


def test_the_snapshot_holds_nothing_else():
    names = {f"{preset} on {mesh}" for preset, mesh in CASES}
    assert set(json.loads(SNAPSHOT.read_text())) == names
    sizes = {math.prod(abstract_mesh(mesh).shape.values()) for _, mesh in CASES}
    assert min(sizes) == 8 and max(sizes) == 512


@pytest.mark.parametrize("mesh", LARGE)
def test_no_large_parameter_is_replicated_and_moments_lie_beside_their_parameters(mesh):
    model = model_of("edl-15b")
    where = abstract_mesh(mesh)
    state = jax.eval_shape(make_optimizer(OptimizerConfig(), model.axes).init, model.params)
    specs = {row.name: row.spec for row in describe_shardings(model.params, model.axes, where)}
    for row in describe_shardings(model.params, model.axes, where):
        if math.prod(row.shape) > 1e6:
            assert any(row.spec), row.name
    moments = describe_shardings(state, model.axes, where, like=model.params)
    for row in moments:
        owner = next((name for name in specs if row.name.endswith("." + name)), None)
        assert row.spec == (specs[owner] if owner else row.spec), row.name
    assert sum(row.bytes_per_device for row in moments) == pytest.approx(
        2
        * sum(row.bytes_per_device for row in describe_shardings(model.params, model.axes, where)),
        rel=1e-3,
    )


def test_rows_are_split_over_data_fsdp_and_expert_and_tokens_over_context():
    mesh = abstract_mesh("data=2,fsdp=4,expert=8,context=2")
    batch = {
        "tokens": jax.ShapeDtypeStruct((64, 128), np.int32),
        "domain_ids": jax.ShapeDtypeStruct((64, 8), np.int32),
    }
    with pytest.raises(ValueError, match="not divisible by mesh axis data"):
        batch_shardings({"tokens": jax.ShapeDtypeStruct((32, 128), np.int32)}, mesh)
    specs = {name: text_of(s.spec) for name, s in batch_shardings(batch, mesh).items()}
    assert specs == {"tokens": "data*fsdp*expert, context", "domain_ids": "data*fsdp*expert, -"}


if __name__ == "__main__":
    found = {f"{preset} on {mesh}": layout(preset, mesh) for preset, mesh in CASES}
    SNAPSHOT.write_text(json.dumps(found, indent=1) + "\n")
