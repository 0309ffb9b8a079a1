"""sparsegen: golden vectors, kernels against the reference, closed forms, bad input."""

from __future__ import annotations

import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.sparsegen import gpu, reference, sparsegen
from kernels_pallas.sparsegen.cases import CASES
from tests.kernels.accelerators import lowering_for

VECTORS = pathlib.Path(__file__).parents[1] / "vectors" / "ld_mole_proj.npz"
IMPLEMENTATIONS = ("xla", "pallas_interpret")
SMALL = [case for case in CASES if case.size == "small"]


def _golden():
    stored = np.load(VECTORS)
    names = sorted({key.split("/")[0] for key in stored.files})
    assert len(names) == 11
    return {
        n: {k.split("/")[1]: stored[k] for k in stored.files if k.startswith(n + "/")}
        for n in names
    }


def _vjp(u, lam, g, **kwargs):
    @jax.jit
    def run(u, lam, g):
        p, pullback = jax.vjp(lambda u, lam: sparsegen(u, lam, **kwargs), u, lam)
        return p, *pullback(g)

    return run(u, lam, g)


def _by_sort(u, lam):
    """Steps 1 to 4 of the sheet in numpy, one row at a time."""
    out = np.zeros_like(u)
    for row in range(u.shape[0]):
        z = np.sort(u[row])[::-1]
        total = np.cumsum(z)
        k = max(i + 1 for i in range(len(z)) if 1 - lam[row] + (i + 1) * z[i] > total[i])
        tau = (total[k - 1] - 1 + lam[row]) / k
        out[row] = np.maximum(u[row] - tau, 0) / (1 - lam[row])
    return out


def _golden_runs(dtype, implementation):
    """Each stored case with our result; cases of one width share a call."""
    cases = _golden()
    calls = sorted({(v["z"].shape[1], name == "proj_clamped") for name, v in cases.items()})
    for width, clamped in calls:
        names = [
            name
            for name, v in cases.items()
            if v["z"].shape[1] == width and (name == "proj_clamped") == clamped
        ]
        stacked = [
            jnp.concatenate(
                [
                    jnp.asarray(cases[n].get(key, np.zeros(cases[n]["z"].shape)), dtype)
                    for n in names
                ]
            )
            for key in ("z", "lam", "g")
        ]
        floor = 1e-2 if clamped else None
        results = _vjp(*stacked, denom_floor=floor, implementation=implementation)
        ends = np.cumsum([cases[n]["z"].shape[0] for n in names])[:-1]
        parts = zip(*(np.split(np.asarray(r), ends) for r in results), strict=True)
        yield from ((n, cases[n], part) for n, part in zip(names, parts, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden_vectors_in_float32(implementation):
    for name, v, (p, du, dlam) in _golden_runs(jnp.float32, implementation):
        rtol = 1e-3 if name in ("proj_huge", "proj_onehot", "proj_clamped") else 2e-5
        np.testing.assert_allclose(p, v["p"], rtol=rtol, atol=2e-6)
        if "dz" in v:
            np.testing.assert_allclose(du, v["dz"], rtol=rtol, atol=2e-5 * np.abs(v["dz"]).max())
            scale = max(np.abs(v["dlam"]).max(), 0.1)
            np.testing.assert_allclose(dlam, v["dlam"], rtol=rtol, atol=2e-5 * scale)


def test_golden_vectors_in_float64():
    with jax.enable_x64(True):
        for name, v, (p, du, dlam) in _golden_runs(jnp.float64, None):
            assert p.dtype == np.float64
            if name == "proj_f32":  # Stored in float32.
                continue
            np.testing.assert_allclose(p, v["p"], rtol=1e-8, atol=1e-10)
            if "dz" in v:
                np.testing.assert_allclose(du, v["dz"], rtol=1e-8, atol=1e-10)
                np.testing.assert_allclose(dlam, v["dlam"], rtol=1e-8, atol=1e-10)


@hypothesis.settings(max_examples=8, derandomize=True, deadline=None)
@hypothesis.given(
    rows=st.sampled_from((1, 7, 13, 20, 129, 257)),
    entries=st.sampled_from((1, 2, 7, 8, 13, 16, 17, 64, 129, 256)),
    dtype=st.sampled_from(("float32", "bfloat16")),
    lam_kind=st.sampled_from(("typical", "near_one", "very_negative", "scalar")),
    ties=st.booleans(),
)
def test_kernels_equal_the_sorted_form(rows, entries, dtype, lam_kind, ties):
    rng = np.random.default_rng(rows + 1000 * entries)
    u = rng.normal(size=(rows, entries)) * 2
    if ties:
        u = np.round(u)
    u = np.asarray(jnp.asarray(u, dtype).astype(jnp.float32), np.float64)
    lam = {
        "typical": 0.99 - rng.exponential(1.5, size=rows),
        "near_one": 1 - rng.uniform(1e-3, 1e-2, size=rows),
        "very_negative": -rng.exponential(1e4, size=rows),
        "scalar": np.full(rows, -0.5),
    }[lam_kind]
    lam = lam.astype(np.float32).astype(np.float64)
    expected = _by_sort(u, lam)
    g = jnp.asarray(rng.normal(size=u.shape), dtype)
    given_lam = jnp.float32(-0.5) if lam_kind == "scalar" else jnp.asarray(lam, jnp.float32)
    runs = [
        _vjp(jnp.asarray(u, dtype), given_lam, g, implementation=name) for name in IMPLEMENTATIONS
    ]
    # A rounding of 1e-7 in u is one of 1e-7 / (1 - lam) in p.
    slack = np.min(1 - lam)
    atol = 2e-6 / min(slack, 1.0) if dtype == "float32" else 8e-3
    for p, _, dlam in runs:
        assert p.dtype == jnp.dtype(dtype) and dlam.dtype == jnp.float32
        p = np.asarray(p.astype(jnp.float32))
        np.testing.assert_allclose(p, expected, rtol=2e-5, atol=atol)
        assert (p >= 0).all() and (p.max(axis=1) > 0).all()
    for a, b in zip(*(run[1:] for run in runs), strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        scale = max(np.abs(b).max(), 1e-6)
        tolerance = (1e-4 if dtype == "float32" else 1e-2) * max(1.0, 1e-3 / slack)
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)


@pytest.mark.parametrize("rows,entries,floor", [(1, 1, None), (257, 7, 1e-2), (20, 129, None)])
def test_triton_kernel_interpreted_equals_reference(rows, entries, floor):
    rng = np.random.default_rng(rows)
    u = jnp.asarray(rng.normal(size=(rows, entries)), jnp.float32).at[0, 0].set(-jnp.inf)
    if entries == 1:
        u = jnp.ones((rows, 1))
    lam = jnp.asarray(0.999 - rng.exponential(1.0, size=rows), jnp.float32)
    g = jnp.asarray(rng.normal(size=u.shape), jnp.float32)
    p = reference.project(u, lam, floor)
    three = (u[None], lam[None], floor)
    np.testing.assert_allclose(gpu.project(*three, interpret=True)[0], p, atol=2e-6)
    expected = reference.project_vjp(p, lam, g, floor)
    got = gpu.project_vjp(p[None], lam[None], g[None], floor, interpret=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_worked_example_and_intervals(implementation):
    u = jnp.asarray([1.0, 0.5, 0.0, -1.0])
    for lam, expected in (
        (0.0, (0.75, 0.25, 0, 0)),
        (0.5, (1, 0, 0, 0)),
        (-1.0, (7 / 12, 1 / 3, 1 / 12, 0)),
        (-1e5, (0.25, 0.25, 0.25, 0.25)),
    ):
        p = sparsegen(u, lam, implementation=implementation)
        np.testing.assert_allclose(p, expected, atol=1e-6 if lam > -10 else 1e-4)
    # k entries are active for lam in [lower(k), upper(k)): the ends are 1, .5, -.5, -3.5.
    lam = jnp.asarray([0.9, 0.51, 0.49, -0.49, -0.51, -3.49, -3.51, -50.0])
    p = sparsegen(jnp.broadcast_to(u, (8, 4)), lam, implementation=implementation)
    np.testing.assert_array_equal(jnp.sum(p > 0, axis=1), [1, 1, 2, 2, 3, 3, 4, 4])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_invariances_and_closed_forms(implementation):
    rng = np.random.default_rng(2)
    u = jnp.asarray(rng.normal(size=(20, 8)), jnp.float32)
    lam = jnp.asarray(0.9 - rng.exponential(1.0, size=20), jnp.float32)
    g = jnp.asarray(rng.normal(size=u.shape), jnp.float32)
    p, du, dlam = _vjp(u, lam, g, implementation=implementation)
    np.testing.assert_allclose(jnp.sum(p, axis=1), np.ones(20), atol=1e-6)
    np.testing.assert_allclose(jnp.sum(du, axis=1), np.zeros(20), atol=2e-5)
    one_hot = np.asarray(jnp.sum(p > 0, axis=1) == 1)
    assert one_hot.any() and not np.asarray(dlam)[one_hot].any()
    order = rng.permutation(8)
    shuffled = sparsegen(u[:, order] + 3.0, lam, implementation=implementation)
    np.testing.assert_allclose(shuffled, p[:, order], atol=2e-6)
    tied = sparsegen(jnp.full((3, 8), 1e4), 0.3, implementation=implementation)
    np.testing.assert_allclose(tied, np.full((3, 8), 0.125), rtol=1e-6)
    swapped = sparsegen(u.T, lam, axis=0, implementation=implementation)
    np.testing.assert_allclose(swapped, p.T, atol=1e-6)
    cube = sparsegen(u.reshape(4, 5, 8), lam.reshape(4, 5), implementation=implementation)
    np.testing.assert_array_equal(cube.reshape(20, 8), p)


def test_vjp_equals_finite_differences():
    rng = np.random.default_rng(4)
    with jax.enable_x64(True):
        u, lam = jnp.asarray(rng.normal(size=(6, 9))), jnp.asarray(0.8 - rng.exponential(size=6))
        g = jnp.asarray(rng.normal(size=u.shape))
        for floor in (None, 1.0):
            _, du, dlam = _vjp(u, lam, g, denom_floor=floor)
            if floor is None:
                run = jax.jit(
                    jax.vmap(lambda d: jnp.sum(g * (sparsegen(u + d, lam) - sparsegen(u - d, lam))))
                )
                numeric = run(1e-6 * jnp.eye(u.size).reshape(u.size, *u.shape)) / 2e-6
                np.testing.assert_allclose(du.ravel(), numeric, atol=1e-6)
                step = sparsegen(u, lam + 1e-6) - sparsegen(u, lam - 1e-6)
                np.testing.assert_allclose(dlam, jnp.sum(g * step, axis=1) / 2e-6, atol=1e-6)
            else:
                clamped = np.asarray(1 - lam < floor)
                assert clamped.any() and not clamped.all()
                p = sparsegen(u, lam, denom_floor=floor)
                np.testing.assert_allclose(
                    jnp.sum(p, axis=1), np.where(clamped, (1 - lam) / floor, 1), rtol=1e-9
                )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_degenerate_rows(implementation):
    inf, nan = np.inf, np.nan
    u = jnp.asarray([[-inf, 0, -inf, 0], [1e4, -1e4, 0, 1e4], [nan, 0, 0, 0], [3, 3, 1, 0]])
    p = sparsegen(u.astype(jnp.float32), 0.5, implementation=implementation)
    np.testing.assert_allclose(
        p, [[0, 0.5, 0, 0.5], [0.5, 0, 0, 0.5], [nan] * 4, [0.5, 0.5, 0, 0]], atol=1e-6
    )
    # A traced lam of 1 or more gives the limit, with zero gradients.
    run = jax.jit(lambda u, lam: sparsegen(u, lam, implementation=implementation))
    u = jnp.asarray([[3.0, 3.0, 1.0], [1.0, 2.0, 3.0]])
    for lam in (1.0, 5.0):
        np.testing.assert_allclose(run(u, jnp.float32(lam)), [[0.5, 0.5, 0], [0, 0, 1]])
        grads = jax.grad(lambda u, lam: jnp.sum(run(u, lam) ** 3), (0, 1))(u, jnp.float32(lam))
        assert not any(np.asarray(x).any() for x in grads)
    wide = jnp.asarray(np.random.default_rng(0).normal(size=(3, 20)), jnp.float32).at[1, 4].set(nan)
    p = sparsegen(wide, -1.0, implementation=implementation)
    np.testing.assert_array_equal(np.isnan(p).any(axis=1), [False, True, False])


@pytest.mark.parametrize("case", SMALL[1:3], ids=lambda case: case.name)
def test_two_runs_agree_bit_for_bit(case):
    args = case.draw(np.random.default_rng(0))
    run = jax.jit(case.vjp("pallas_interpret"))
    g = jnp.ones(case.args[0].shape, case.args[0].dtype)
    for a, b in zip(run(*args, g), run(*args, g), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platform,lowering", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_lowers_for_accelerators_on_a_cpu(case, platform, lowering):
    with lowering_for(platform):
        traced = jax.jit(case.vjp("pallas")).trace(*case.args, case.cotangents())
        text = traced.lower(lowering_platforms=(lowering,)).as_text()
    assert "sparsegen_forward" in text and "sparsegen_backward" in text


def test_bad_input_names_the_argument():
    u = jnp.zeros((2, 3))
    for lam in (1.0, np.asarray([0.0, 1.5]), jnp.asarray([0.0, 2.0])):
        with pytest.raises(ValueError, match="lam"):
            sparsegen(u, lam)
    with pytest.raises(ValueError, match="lam: got shape"):
        sparsegen(u, jnp.zeros(3))
    with pytest.raises(ValueError, match="u: got shape"):
        sparsegen(jnp.zeros((2, 0)), 0.0)
    with pytest.raises(ValueError, match="u: got dtype"):
        sparsegen(jnp.zeros((2, 3), jnp.int32), 0.0)
    with pytest.raises(ValueError, match="axis"):
        sparsegen(u, 0.0, axis=2)
    with pytest.raises(ValueError, match="denom_floor"):
        sparsegen(u, 0.0, denom_floor=0.0)
    with pytest.raises(NotImplementedError, match="257 entries"):
        sparsegen(jnp.zeros((2, 257)), 0.0, implementation="pallas_interpret")
    with pytest.raises(NotImplementedError, match="sparsegen"):
        sparsegen(u, 0.0, implementation="pallas")
