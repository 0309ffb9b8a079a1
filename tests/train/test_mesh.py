"""Mesh texts, sizes that fit or don't, and batches on a one-device mesh."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlib_papers.nn.partitioning import MESH_AXES
from jaxlib_papers.train.mesh import (
    MeshConfig,
    abstract_mesh,
    batch_shardings,
    host_slot,
    make_mesh,
    to_global,
)


def test_texts():
    assert MeshConfig.parse("fsdp=64, expert=4") == MeshConfig(fsdp=64, expert=4)
    assert MeshConfig.parse("auto") == MeshConfig.parse("") == MeshConfig(data=-1)
    assert MeshConfig.parse("fsdp=-1,tensor=2").resolve(8) == MeshConfig(fsdp=4, tensor=2)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("fsdb=4", "unknown axis 'fsdb'"),
        ("fsdp=4,fsdp=2", "given twice"),
        ("fsdp", "expected fsdp=SIZE"),
        ("fsdp=two", "expected fsdp=SIZE"),
        ("fsdp=0", "fsdp=0"),
        ("data=-1,fsdp=-1", "only one"),
    ],
)
def test_bad_texts_say_what_is_wrong(text, match):
    with pytest.raises(ValueError, match=match):
        MeshConfig.parse(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("fsdp=4", r"needs 4 devices, there are 8; data=2 instead of data=1 fits"),
        ("fsdp=16", r"needs 16 devices, there are 8.*\[1, 2, 4, 8\]"),
        ("fsdp=3,data=-1", r"multiply to 3, which does not divide the 8 devices.*\[1, 2, 4, 8\]"),
    ],
)
def test_a_mesh_that_does_not_fit_says_what_does(text, match):
    with pytest.raises(ValueError, match=match):
        MeshConfig.parse(text).resolve(8)


def test_meshes_have_all_axes_in_auto_mode():
    for mesh in (make_mesh("auto", jax.devices()[:1]), abstract_mesh("fsdp=64,expert=4")):
        assert mesh.axis_names == MESH_AXES
        assert set(mesh.axis_types) == {AxisType.Auto}
    assert abstract_mesh("data=-1,tensor=8", 512).shape["data"] == 64


def test_batches_become_global_arrays():
    mesh = make_mesh("auto", jax.devices()[:1])
    rows = {"tokens": np.arange(12, dtype=np.int32).reshape(4, 3), "image": np.ones((4, 2, 2))}
    rows["image"] = rows["image"].astype(np.float32)
    assert host_slot(mesh) == (0, 1)
    for batch in (to_global(rows, mesh), to_global(rows, None)):
        for name, value in rows.items():
            np.testing.assert_array_equal(batch[name], value)


def test_batch_entries_are_split_by_rows_and_tokens_by_sequence_too():
    mesh = abstract_mesh("data=2,fsdp=2,context=2")
    shapes = {
        "tokens": jax.ShapeDtypeStruct((8, 16), np.int32),
        "domain_ids": jax.ShapeDtypeStruct((8, 3), np.int32),
    }
    specs = {name: s.spec for name, s in batch_shardings(shapes, mesh).items()}
    assert specs["tokens"] == jax.P(("data", "fsdp"), "context")
    assert specs["domain_ids"] == jax.P(("data", "fsdp"), None)
    shapes["tokens"] = jax.ShapeDtypeStruct((6, 16), np.int32)
    with pytest.raises(ValueError, match=r"batch\['tokens'\].*size 6.*data\*fsdp of size 4"):
        batch_shardings(shapes, mesh)


def test_sizes_that_are_no_product_of_a_slices_axes_cut_those_axes(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    mesh = make_mesh("data=1", jax.devices()[:1])
    assert dict(mesh.shape) == dict.fromkeys(MESH_AXES, 1)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
