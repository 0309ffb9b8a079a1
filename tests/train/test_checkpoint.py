"""Checkpoints: whole or absent, never cast, on any mesh (C13, C17)."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlib_papers.train import checkpoint as ckpt

ROOT = pathlib.Path(__file__).parents[2]


def make_state(seed: int = 0, width: int = 8):
    params = {
        "layers": {"kernel": jax.random.normal(jax.random.key(seed), (3, width, width))},
        "scale": jnp.full((width,), 1 + seed, jnp.bfloat16),
    }
    return {"step": jnp.int32(seed), "params": params, "opt_state": optax.adam(1e-3).init(params)}


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


def run_python(code: str, *args: str, devices: int = 1, **popen):
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def test_round_trip_with_data_state_and_config(tmp_path):
    state = make_state(3)
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(3, state, data_state={"epoch": 1, "at": [4, 5]}, config={"lr": 0.1})
    with ckpt.Checkpointer(tmp_path) as c:
        got = c.restore(jax.eval_shape(lambda: state))
        assert c.read_config(3) == {"lr": 0.1}
    assert_same(got.state, state)
    assert jax.tree.structure(got.state) == jax.tree.structure(state)
    assert (got.step, got.data_state, got.config) == (3, {"epoch": 1, "at": [4, 5]}, {"lr": 0.1})


def test_saved_values_are_those_of_the_call_though_buffers_are_donated(tmp_path):
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (512, 512))}
    expected = np.array(state["w"], copy=True)
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, state)
        for _ in range(20):
            state = bump(state)
        got = c.restore(jax.eval_shape(lambda: state))
    np.testing.assert_array_equal(np.asarray(got.state["w"]), expected)


def test_retention_keeps_the_last_and_the_periodic_steps(tmp_path):
    with ckpt.Checkpointer(tmp_path, keep_last=2, keep_period=4) as c:
        for step in range(1, 8):
            c.save(step, {"x": jnp.float32(step)})
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.steps() == (4, 6, 7)
        assert float(c.restore({"x": jnp.float32(0)}, 4).state["x"]) == 4


def test_differences_in_keys_shapes_and_dtypes_raise_and_name_the_array(tmp_path):
    state = make_state()
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, state)
        c.wait()

        def restore_with(change):
            target = jax.eval_shape(lambda: state)
            change(target["params"])
            return c.restore(target)

        def set_kernel(shape, dtype):
            return lambda p: p["layers"].update(kernel=jax.ShapeDtypeStruct(shape, dtype))

        bad = ckpt.CheckpointMismatchError
        with pytest.raises(bad, match=r"params\.layers\.kernel: dtype float32 .* bfloat16 asked"):
            restore_with(set_kernel((3, 8, 8), jnp.bfloat16))
        with pytest.raises(bad, match=r"params\.layers\.kernel: shape \(3, 8, 8\) .*\(3, 8, 9\)"):
            restore_with(set_kernel((3, 8, 9), jnp.float32))
        with pytest.raises(bad, match=r"params\.scale: in the checkpoint, not asked for"):
            restore_with(lambda p: p.pop("scale"))
        with pytest.raises(bad, match=r"params\.bias: not in the checkpoint"):
            restore_with(lambda p: p.update(bias=jax.ShapeDtypeStruct((8,), jnp.float32)))


def test_random_keys_and_ambiguous_names_are_refused(tmp_path):
    with ckpt.Checkpointer(tmp_path) as c:
        with pytest.raises(ValueError, match=r"'rng' is a random key"):
            c.save(1, {"rng": jax.random.key(0)})
        with pytest.raises(ValueError, match=r"two leaves are both called 'a\.b'"):
            c.save(1, {"a": {"b": jnp.zeros(())}, "a.b": jnp.zeros(())})
        assert c.latest_step() is None


def test_directory_without_commit_is_ignored_and_its_number_can_be_saved(tmp_path):
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(5, make_state(5))
    (tmp_path / "7" / "state").mkdir(parents=True)
    (tmp_path / "7" / "note").write_text("made by hand")
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    with ckpt.Checkpointer(tmp_path, keep_last=2) as c:
        assert c.latest_step() == 5
        assert c.restore(make_state()).step == 5
        c.save(7, make_state(7))
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.steps() == (5, 7)
        assert_same(c.restore(make_state()).state, make_state(7))
    assert (tmp_path / "incomplete-7" / "note").read_text() == "made by hand"


def test_directory_that_appears_while_running_does_not_block_the_save(tmp_path):
    with ckpt.Checkpointer(tmp_path) as c:
        (tmp_path / "7" / "state").mkdir(parents=True)
        assert c.latest_step() is None
        c.save(7, make_state(7))
        assert_same(c.restore(make_state()).state, make_state(7))


@pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA"])
def test_step_that_lost_a_part_does_not_count(tmp_path, lost):
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, make_state(1))
        c.save(2, make_state(2))
    (tmp_path / "2" / lost).unlink()
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.latest_step() == 1
        with pytest.raises(ckpt.CheckpointError, match=r"step 2 .*complete steps: \[1\]"):
            c.restore(make_state(), 2)


def test_step_whose_data_is_damaged_is_a_clear_error(tmp_path):
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, make_state(1))
        c.wait()
        for path in (tmp_path / "1" / "state").rglob("d/*"):
            path.unlink()
        with pytest.raises(ckpt.CheckpointError, match="cannot be read"):
            c.restore(make_state())


def test_whatever_file_is_lost_or_cut_short_the_error_is_ours_or_the_state_is_right(tmp_path):
    state = {f"w{i}": jax.random.normal(jax.random.key(i), (64, 128)) for i in range(3)}
    with ckpt.Checkpointer(tmp_path / "whole") as c:
        c.save(1, state)
    files = [p for p in (tmp_path / "whole" / "1").rglob("*") if p.is_file()]
    refused = 0
    for number, path in enumerate(files):
        for size in (None, path.stat().st_size // 2):
            copy = tmp_path / f"copy-{number}-{size}"
            shutil.copytree(tmp_path / "whole", copy)
            damaged = copy / path.relative_to(tmp_path / "whole")
            damaged.unlink() if size is None else os.truncate(damaged, size)
            with ckpt.Checkpointer(copy) as c:
                if not c.steps():
                    refused += 1
                    continue
                try:
                    restored = c.restore(state).state
                except ckpt.CheckpointError:
                    refused += 1
                else:
                    assert_same(restored, state)
    assert refused > len(files) // 2, f"{refused} of {2 * len(files)} damages were seen"


def test_complete_step_is_never_overwritten(tmp_path):
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, make_state(1))
        with pytest.raises(ckpt.CheckpointError, match="not overwritten"):
            c.save(1, make_state(2))
        assert_same(c.restore(make_state()).state, make_state(1))


KILLED = """
    import sys, jax, jax.numpy as jnp
    from jaxlib_papers.train import checkpoint as ckpt
    state = {"w": jax.random.normal(jax.random.key(0), (4096, 4096))}
    c = ckpt.Checkpointer(sys.argv[1])
    c.save(1, state)
    c.wait()
    print("first done", flush=True)
    c.save(2, state)
    c.wait()
    print("second done", flush=True)
"""


def test_sigkill_during_a_save_leaves_the_previous_step(tmp_path):
    process = run_python(KILLED, tmp_path)
    assert process.stdout.readline() == "first done\n", process.stderr.read()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("2.orbax*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and "second" not in out
    assert not (tmp_path / "2").exists(), "the kill came too late to test anything"
    target = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.steps() == (1,)
        state = c.restore(target).state
        c.save(2, state)
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.steps() == (1, 2)
    assert not list(tmp_path.glob("*orbax-checkpoint-tmp*"))


# Orbax leaves the futures of the failed write unread; Python mentions it when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_raises_and_the_previous_step_stays_valid(tmp_path):
    state = make_state(1, width=128)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ckpt.Checkpointer(tmp_path, keep_last=1) as c:
        c.save(1, state)
        c.wait()
        # No file may grow beyond 20 kB: the system refuses the write, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(ckpt.CheckpointError, match=r"step 2 .* complete one is step 1"):
                c.save(2, make_state(2, width=128))
                c.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert c.steps() == (1,)
        assert not list(tmp_path.glob("2*"))
        assert_same(c.restore(state).state, state)
        c.save(2, make_state(2, width=128))
        assert_same(c.restore(state).state, make_state(2, width=128))


def test_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ckpt.CheckpointError, match="cannot use .*file"):
        ckpt.Checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(ValueError, match="keep_last: got 0"):
        ckpt.Checkpointer(tmp_path, keep_last=0)


MESHES = """
    import contextlib, sys, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from jaxlib_papers.train import checkpoint as ckpt
    def mesh(shape):
        devices = jax.devices()[: int(np.prod(shape))]
        auto = (AxisType.Auto,) * 2
        return jax.make_mesh(shape, ("data", "fsdp"), axis_types=auto, devices=devices)
    def active(m):
        return contextlib.nullcontext() if m is None else jax.set_mesh(m)
    w = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    def state(m):
        return {"w": jax.device_put(w, NamedSharding(m, P("data", "fsdp"))),
                "step": jax.device_put(np.int32(7), NamedSharding(m, P()))}
    targets = [mesh((2, 4)), mesh((8, 1)), mesh((1, 1)), mesh((4, 2))]
    number = 1
    with ckpt.Checkpointer(sys.argv[1], keep_last=100) as c:
        for at_save in (None, targets[-1]):
            with active(at_save):
                c.save(number, state(mesh((4, 2))))
                c.wait()
            for m in targets:
                target = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(m))
                for at_restore in (None, m, targets[-1]):
                    with active(at_restore):
                        got = c.restore(target, number).state
                    assert got["w"].sharding == target["w"].sharding, (m, at_restore)
                    np.testing.assert_array_equal(np.asarray(got["w"]), w)
                    assert int(got["step"]) == 7
            plain = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype), "step": np.int32(0)}
            one = c.restore(plain, number).state
            np.testing.assert_array_equal(np.asarray(one["w"]), w)
            number += 1
    print("ok")
"""


@pytest.mark.distributed
def test_saved_on_4x2_restored_on_other_meshes_with_and_without_an_active_mesh(tmp_path):
    process = run_python(MESHES, tmp_path, devices=8)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and out.endswith("ok\n"), err[-3000:]


def test_sums_of_bits_are_those_of_any_dtype_and_see_one_bit():
    tree = {
        "f": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": jnp.arange(4, dtype=jnp.bfloat16),
        "i": np.int32(-3),
        "o": np.array([True, False, True]),
    }
    sums = ckpt.bit_sums(tree)
    assert sums["f"] == np.sum(tree["f"].view(np.uint32), dtype=np.uint32)
    assert sums["i"] == 2**32 - 3 and sums["o"] == 2
    flipped = tree["f"].copy()
    flipped.view(np.uint32)[1, 1] ^= 1 << 7
    assert ckpt.bit_sums({"f": flipped})["f"] != sums["f"]


def test_arrays_whose_bits_changed_are_refused_and_metadata_too(tmp_path, monkeypatch):
    state = {"w": jnp.ones((8, 8), jnp.float32), "v": jnp.zeros(3, jnp.float32)}
    with ckpt.Checkpointer(tmp_path) as saved:
        saved.save(1, state, config={"rate": 3})
        saved.wait()
        sums = ckpt.bit_sums
        with monkeypatch.context() as patch:  # as if one word had been read otherwise
            patch.setattr(ckpt, "bit_sums", lambda x: {**sums(x), "w": sums(x)["w"] + 1})
            with pytest.raises(ckpt.CheckpointError, match="is damaged: the bits of w"):
                saved.restore(state, 1)
        assert saved.restore(state, 1).step == 1
        saved.save(2, state, config={"rate": 3})
        saved.wait()
        saved.set_aside(2)
        assert saved.steps() == (1,) and (tmp_path / "damaged-2").is_dir()
        saved.save(2, state, config={"rate": 3})
        saved.wait()
        assert saved.steps() == (1, 2)
    path = tmp_path / "2" / "meta" / "metadata"
    path.write_text(path.read_text().replace('"rate": 3', '"rate": 2').replace(":3}", ":2}"))
    with ckpt.Checkpointer(tmp_path) as saved:
        assert saved.steps() == (1,)


def test_newer_format_is_refused_by_name_and_nothing_is_changed(tmp_path):
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(1, make_state())
        c.save(2, make_state())
    path = tmp_path / "2" / "meta" / "metadata"
    written = json.loads(path.read_text())
    newer = written | {"format": 2, "something": "new"}
    newer["digest"] = ckpt._digest(newer)
    path.write_text(json.dumps(newer))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ckpt.CheckpointFormatError, match="2 is a checkpoint of format 2, .* to 1"):
        ckpt.Checkpointer(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    # The same number by a bit that changed on disk: damage, which is set aside.
    path.write_text(json.dumps(written | {"format": 3}))
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.steps() == (1,)
    assert (tmp_path / "incomplete-2").is_dir()
