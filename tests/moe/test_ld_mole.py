"""LD-MoLE: golden vectors, the sheet's values, laws of the projection and the losses, bad input."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxlib_papers.moe import ld_mole as m

VECTORS = Path(__file__).parents[1] / "vectors"
HEAD = ("W1", "b1", "W2", "b2")
# One compilation a shape, and a compiler that need not try hard.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
project = jit(m.sparsegen)
jacobian = jit(jax.jacrev(m.sparsegen, argnums=(0, 1)))
sparsity = jit(m.sparsity_loss, static_argnums=2)
sparsity_gradient = jit(jax.grad(m.sparsity_loss, argnums=(0, 1)), static_argnums=2)
mole_linear = jit(m.mole_linear, static_argnames=("alpha", "router", "dropout_rate"))


def cases(kind: str, file: str = "ld_mole.npz") -> dict[str, dict[str, np.ndarray]]:
    stored = np.load(VECTORS / file)
    names = sorted({k.split("/")[0] for k in stored.files if k.startswith(kind)})
    assert names
    return {
        n: {k.split("/")[1]: stored[k] for k in stored.files if k.startswith(n + "/")}
        for n in names
    }


def close(mine, golden, double: bool, loose: bool = False):
    rtol, atol = (1e-8, 1e-10) if double else (1e-3, 1e-3) if loose else (2e-5, 2e-5)
    np.testing.assert_allclose(np.asarray(mine), golden, rtol=rtol, atol=atol)


@pytest.fixture(params=[True, False], ids=["float64", "float32"])
def double(request):
    with jax.enable_x64(request.param):
        yield request.param


def cast(case: dict, double: bool) -> dict:
    kind = np.float64 if double else np.float32
    return {k: v.astype(kind) if v.dtype.kind == "f" else v for k, v in case.items()}


class TestGoldenVectors:
    @pytest.mark.parametrize("name", sorted(cases("proj", "ld_mole_proj.npz")))
    def test_projection(self, name, double):
        golden = cases("proj", "ld_mole_proj.npz")[name]
        if name == "proj_f32" and double:
            return  # float32 only
        case = cast(golden, double)
        loose = name in ("proj_huge", "proj_onehot")
        floor = float(golden["eps"]) if name == "proj_clamped" else None

        @jit
        def run(z, lam, g):
            p, pull = jax.vjp(lambda z, lam: m.sparsegen(z, lam, -1, floor), z, lam)
            return p, *pull(g), *m.sparsegen_threshold(z, lam)

        p, dz, dlam, tau, k = run(case["z"], case["lam"], case.get("g", np.ones_like(case["z"])))
        close(p, golden["p"], double, loose)
        assert k.dtype == jnp.int32
        if "tau" in golden:
            np.testing.assert_array_equal(k, golden["k"])
            scale = max(1.0, float(np.abs(golden["z"]).max()))
            close(tau / scale, golden["tau"] / scale, double, loose)
        if "dz" in golden:
            close(dz, golden["dz"], double, loose)
            size = max(1.0, float(np.abs(golden["dlam"]).max()))
            close(dlam / size, golden["dlam"] / size, double, loose)

    @pytest.mark.parametrize("name", sorted(cases("route")))
    def test_routing_with_the_head(self, name, double):
        golden = cases("route")[name]
        case = cast(golden, double)

        def route(z, x, head):
            lam = m.lambda_head(head, x)
            return m.route(z, "sparsegen", lam), lam

        @jit
        def run(z, x, head, g):
            out, pull = jax.vjp(route, z, x, head)
            return out, pull(g)

        head = {leaf: case[leaf] for leaf in HEAD}
        (p, lam), (dz, dx, dhead) = run(case["z"], case["x"], head, (case["g"], case["glam"]))
        close(p, golden["p"], double)
        close(lam, golden["lam"], double)
        close(dz, golden["dz"], double)
        close(dx, golden["dx"], double)
        for leaf in HEAD:
            close(dhead[leaf], golden["d" + leaf], double)

    @pytest.mark.parametrize("name", sorted(cases("linear")))
    def test_linear(self, name, double):
        golden = cases("linear")[name]
        case = cast(golden, double)
        leaves = [leaf for leaf in ("W", "b", "A", "B", "Wg") if leaf in case]

        @partial(jit, static_argnums=4)
        def run(params, x, head, g, alpha):
            def linear(params, x, head):
                out = m.mole_linear(params, x, head, alpha=alpha, router="sparsegen")
                return out.y, out

            _, pull, out = jax.vjp(linear, params, x, head, has_aux=True)
            return out, pull(g)

        out, (dparams, dx, dhead) = run(
            {leaf: case[leaf] for leaf in leaves},
            case["x"],
            {leaf: case[leaf] for leaf in HEAD},
            case["g"],
            float(case["alpha"]),
        )
        for leaf in ("y", "p", "u", "lam"):
            close(getattr(out, leaf), golden[leaf], double)
        close(dx, golden["dx"], double)
        for leaf in leaves:
            if "d" + leaf in golden:
                close(dparams[leaf], golden["d" + leaf], double)
        for leaf in HEAD:
            close(dhead[leaf], golden["d" + leaf], double)

    @pytest.mark.parametrize("name", sorted(cases("loss")))
    def test_losses(self, name, double):
        golden = cases("loss")[name]
        case = cast(golden, double)
        u, lam, p = case["u"], case["lam"], case["p"]
        experts = u.shape[-1]

        @jit
        def run(u, lam, p, mask):
            value = jax.value_and_grad
            return {
                "load_balance": value(m.dynamic_load_balance)(p, mask),
                "z_loss": value(m.router_z_loss)(u),
                "sparse_k2": value(m.sparsity_loss)(lam, u, 2),
                "lam_sparse": value(m.lambda_penalty)(lam),
                "intervals": [m.lambda_interval(u[0], k) for k in range(1, experts)],
            }

        out = run(u, lam, p, case["mask"])
        for loss, wrt in (
            ("load_balance", "dp"),
            ("z_loss", "du"),
            ("sparse_k2", "dlam"),
            ("lam_sparse", "dlam"),
        ):
            close(out[loss][0], golden[loss], double)
            close(out[loss][1], golden[f"{loss}_{wrt}"], double)
        for k, (lower, upper) in enumerate(out["intervals"], 1):
            close(lower, golden[f"lower_{k}"], double)
            close(upper, golden[f"upper_{k}"], double)

    def test_baseline_routers(self, double):
        golden = cases("baseline")["baseline"]
        u = cast(golden, double)["u"]
        for k in (1, 2, 4):
            close(m.route(u, m.Router("topk", top_k=k)), golden[f"topk_{k}"], double)
        close(m.route(u, "relu"), golden["relu"], double)


ROW = np.array([1.0, 0.5, 0.0, -1.0], np.float32)


class TestProjection:
    @pytest.mark.parametrize(
        ("lam", "p", "tau", "k"),
        [
            (0.0, (0.75, 0.25, 0, 0), 0.25, 2),
            (0.5, (1, 0, 0, 0), 0.5, 1),
            (-1.0, (7 / 12, 1 / 3, 1 / 12, 0), -1 / 6, 3),
        ],
    )
    def test_values_of_the_sheet(self, lam, p, tau, k):
        np.testing.assert_allclose(m.sparsegen(ROW, lam), p, atol=1e-7)
        found, count = m.sparsegen_threshold(ROW, lam)
        assert float(found) == pytest.approx(tau, abs=1e-7) and int(count) == k

    def test_intervals_of_the_sheet(self):
        lower, upper = zip(
            *(map(float, m.lambda_interval(ROW, k)) for k in (1, 2, 3, 4)), strict=True
        )
        np.testing.assert_allclose(upper, (1, 0.5, -0.5, -3.5), atol=1e-6)
        np.testing.assert_allclose(lower, (0.5, -0.5, -3.5, -np.inf), atol=1e-6)
        assert upper[0] == 1

    def test_count_is_that_of_the_interval_and_falls_with_lambda(self):
        rng = np.random.default_rng(0)
        u = rng.normal(size=(40, 6)).astype(np.float32)
        grid = np.linspace(-8, 0.95, 60, dtype=np.float32)
        lam = np.broadcast_to(grid[:, None], (60, 40))
        wide = np.broadcast_to(u, (60, 40, 6))
        p = np.asarray(m.sparsegen(wide, lam))
        count = np.asarray(m.active_experts(p))
        assert count.min() >= 1 and np.all(np.diff(count, axis=0) <= 0)
        np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
        intervals = np.asarray([m.lambda_interval(u, k) for k in range(1, 7)])  # [k, 2, tokens]
        inside = (lam[:, None] >= intervals[:, 0]) & (lam[:, None] < intervals[:, 1])
        assert np.all(inside.sum(1) == 1)
        np.testing.assert_array_equal(inside.argmax(1) + 1, count)

    def test_equals_the_simplex_projection_of_a_library(self):
        import optax

        rng = np.random.default_rng(1)
        u, lam = rng.normal(size=(8, 7)).astype(np.float32), np.linspace(-3, 0.8, 8, dtype="f4")
        scaled = jnp.asarray(u / (1 - lam[:, None]))
        with jax.numpy_dtype_promotion("standard"):  # theirs divides floats by integers
            theirs = [optax.projections.projection_simplex(row) for row in scaled]
        np.testing.assert_allclose(m.sparsegen(u, lam), np.stack(theirs), atol=2e-6)

    @given(
        hnp.arrays(np.float32, (5, 6), elements=st.floats(-20, 20, width=32)),
        st.floats(-10, 0.875, width=32),
        st.permutations(range(6)),
    )
    @settings(max_examples=15)
    def test_laws(self, u, lam, order):
        p = np.asarray(project(u, lam))
        assert (p >= 0).all() and (p.max(-1) > 0).all()
        np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
        shifted = project(u + np.float32(8), lam)
        np.testing.assert_allclose(shifted, p, atol=2e-5 / (1 - lam) + 1e-6)
        np.testing.assert_allclose(project(u[:, order], lam), p[:, order], atol=1e-6)

    def test_extremes(self):
        assert np.all(np.asarray(m.sparsegen(np.ones((3, 1), np.float32), -2.0)) == 1)
        np.testing.assert_allclose(m.sparsegen(np.zeros(4, np.float32), 0.3), [0.25] * 4)
        huge = m.sparsegen(1e4 * ROW, np.float32(0.5))
        np.testing.assert_allclose(huge, [1, 0, 0, 0])
        np.testing.assert_allclose(m.sparsegen(ROW, -1e5), [0.25] * 4, atol=1e-4)
        np.testing.assert_allclose(m.sparsemax(ROW), m.sparsegen(ROW, 0.0))

    def test_jacobian(self):
        rng = np.random.default_rng(2)
        with jax.enable_x64(True):
            u, lam = jnp.asarray(rng.normal(size=6)), jnp.asarray(-0.7)
            du, dlam = jacobian(u, lam)
            p = np.asarray(project(u, lam))
            s, k, h = (p > 0).astype(float), (p > 0).sum(), 1e-6
            np.testing.assert_allclose(du, (np.diag(s) - np.outer(s, s) / k) / 1.7, atol=1e-12)
            np.testing.assert_allclose(dlam, s * (p - 1 / k) / 1.7, atol=1e-12)
            np.testing.assert_allclose(np.sum(du, 0), 0, atol=1e-12)
            for i in range(6):
                e = np.eye(6)[i] * h
                slope = (project(u + e, lam) - project(u - e, lam)) / (2 * h)
                np.testing.assert_allclose(du[:, i], slope, atol=1e-8)
            slope = (project(u, lam + h) - project(u, lam - h)) / (2 * h)
            np.testing.assert_allclose(dlam, slope, atol=1e-8)
            one_hot = jacobian(u, jnp.asarray(0.98))[1]
            equal = jacobian(jnp.zeros(6), lam)[1]
            assert np.all(np.asarray(one_hot) == 0)
            np.testing.assert_allclose(equal, 0, atol=1e-15)


class TestLosses:
    def test_sparsity_loss(self):
        rng = np.random.default_rng(3)
        u = rng.normal(size=(50, 6)).astype(np.float32)
        lam = rng.uniform(-3, 0.9, 50).astype(np.float32)
        active = np.asarray(m.active_experts(m.sparsegen(u, lam)))
        for k in (1, 3, 5):
            each = np.asarray(jit(jax.vmap(partial(m.sparsity_loss, k=k)))(lam, u))
            np.testing.assert_array_equal(each > 0, active > k)
            dlam, du = sparsity_gradient(lam, u, k)
            assert np.all(np.asarray(du) == 0)
            np.testing.assert_allclose(dlam, np.where(active > k, -1 / 50, 0), atol=1e-8)

    def test_masks_leave_padding_out(self):
        rng = np.random.default_rng(4)
        u = rng.normal(size=(3, 2, 5, 4)).astype(np.float32)
        lam = rng.uniform(-3, 0, (3, 2, 5)).astype(np.float32)
        mask = np.ones((2, 5), bool)
        mask[1, 2:] = False
        p = np.asarray(m.sparsegen(u, lam))
        junk = np.where(mask[..., None], 1, np.nan).astype(np.float32)
        kept = mask.reshape(-1)
        flat = lambda a: a.reshape(3, 10, *a.shape[3:])[:, kept]  # noqa: E731
        for loss, args in (
            (m.dynamic_load_balance, (p,)),
            (m.lambda_penalty, (lam,)),
            (partial(m.relu_l1_penalty, k=2), (p,)),
            (m.router_sparsity, (p,)),
        ):
            noisy = [a * (junk if a.ndim == 4 else junk[..., 0]) for a in args]
            short = [flat(a)[:, None] for a in args]
            whole = jit(loss)(*noisy, mask=mask)
            np.testing.assert_allclose(whole, jit(loss)(*short), rtol=1e-6)
        whole = m.sparsity_loss(lam * junk[..., 0], u, 2, mask)
        np.testing.assert_allclose(whole, m.sparsity_loss(flat(lam), flat(u), 2), rtol=1e-6)
        nothing = np.zeros((2, 5), bool)
        assert float(m.sparsity_loss(lam, u, 2, nothing)) == 0
        assert float(m.dynamic_load_balance(p, nothing)) == 0

    def test_load_balance_between_balance_and_collapse(self):
        assert float(m.dynamic_load_balance(np.full((7, 5), 0.2, np.float32))) == pytest.approx(1)
        one = np.eye(5, dtype=np.float32)[np.zeros(7, int)]
        assert float(m.dynamic_load_balance(one)) == pytest.approx(5)
        assert float(m.dynamic_load_balance(np.zeros((7, 5), np.float32))) == 0

    def test_remoe_coefficient(self):
        up = m.remoe_coefficient_update(1e-8, 0.5, 2, 8)
        down = m.remoe_coefficient_update(1e-8, 0.9, 2, 8)
        same = m.remoe_coefficient_update(1e-8, 0.75, 2, 8)
        np.testing.assert_allclose([up, down, same], [1.2e-8, 1e-8 / 1.2, 1e-8], rtol=1e-6)


def linear_params(rng, experts=4, rank=2, width=6, out=5, zero_b=False):
    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "W": draw(out, width),
        "b": draw(out),
        "A": draw(experts, rank, width),
        "B": draw(experts, out, rank) * (0 if zero_b else 1),
        "Wg": draw(experts, width),
    }
    return params, {"W1": draw(7, width), "b1": draw(7), "W2": draw(1, 7), "b2": draw(1)}


class TestLinear:
    def test_equals_the_base_layer_at_the_start(self):
        params, head = linear_params(np.random.default_rng(0), zero_b=True)
        x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
        base = x @ np.asarray(params["W"]).T + np.asarray(params["b"])
        np.testing.assert_allclose(mole_linear(params, x, head, alpha=4).y, base, atol=1e-5)
        gradient = jit(jax.grad(lambda p: jnp.sum(m.mole_linear(p, x, head, alpha=4).y ** 2)))(
            params
        )
        assert not np.any(gradient["A"]) and not np.any(gradient["Wg"]) and np.any(gradient["B"])

    def test_one_hot_routing_is_one_lora(self):
        params, head = linear_params(np.random.default_rng(2))
        x = np.random.default_rng(3).normal(size=(9, 6)).astype(np.float32)
        out = mole_linear(params, x, head, alpha=6, router=m.Router("topk", top_k=1))
        chosen = np.asarray(out.p).argmax(-1)
        assert out.lam is None and set(np.unique(out.p)) == {0.0, 1.0}
        base = x @ np.asarray(params["W"]).T + np.asarray(params["b"])
        for token, expert in enumerate(chosen):
            low = np.asarray(params["A"])[expert] @ x[token]
            expected = base[token] + 6 / 2 * np.asarray(params["B"])[expert] @ low
            np.testing.assert_allclose(out.y[token], expected, rtol=1e-4, atol=1e-4)

    def test_bfloat16_routes_in_float32(self):
        params, head = linear_params(np.random.default_rng(4))
        x = jnp.asarray(np.random.default_rng(5).normal(size=(3, 6)), jnp.bfloat16)
        out = mole_linear(params, x, head, alpha=4)
        exact = mole_linear(params, x.astype(jnp.float32), head, alpha=4)
        assert out.y.dtype == jnp.bfloat16
        assert out.p.dtype == out.u.dtype == out.lam.dtype == jnp.float32
        np.testing.assert_allclose(out.p, exact.p, atol=1e-6)
        assert m.sparsegen(x, -1.0).dtype == jnp.bfloat16

    @pytest.mark.parametrize("router", ["sparsegen", "topk", "relu", "softmax", "fixed_sparsegen"])
    def test_dropout_feeds_gate_head_and_experts(self, router):
        params, head = linear_params(np.random.default_rng(6))
        x = np.ones((4, 6), np.float32)
        still = mole_linear(params, x, head, alpha=4, router=router, dropout_rate=0.5)
        wet = mole_linear(
            params, x, head, alpha=4, router=router, dropout_rate=0.5, key=jax.random.key(0)
        )
        assert not np.allclose(wet.y, still.y)
        assert np.allclose(wet.u, still.u) == (router == "softmax")

    def test_head_values(self):
        head = m.LambdaHead(5, 3, key=jax.random.key(0))
        start = head(jnp.zeros((2, 3)))
        np.testing.assert_allclose(start, 0.99 + math.log(1 / (1 + math.exp(2.5))), atol=1e-6)
        big = m.lambda_head({**linear_params(np.random.default_rng(7))[1], "b2": jnp.full(1, 99.0)},
                            np.zeros((2, 6), np.float32))  # fmt: skip
        assert np.all(np.asarray(big) <= 0.99)
        for init, low, high in (("zeros", 0, 0), ("sparse", 0, 0.5), ("dense", -0.5, 0)):
            arrays = m.head_arrays(jax.random.key(1), 9, 4, init=init)
            assert low <= arrays["W1"].min() and arrays["W1"].max() <= high
            assert set(np.unique(arrays["b1"])) == {-2.0 if init == "zeros" else -2.5}
        assert float(m.head_arrays(jax.random.key(1), 9, 4, hidden_bias_init=0.0)["b1"].max()) == 0

    def test_layers_of_fewer_experts(self):
        u = np.array([[0.0, 1, 5, 9]], np.float32)
        for router in ("softmax", "sparsegen", "topk", "relu"):
            p = np.asarray(m.route(u, router, jnp.zeros(1), num_experts=2))
            assert np.all(p[:, 2:] == 0) and p[0, 1] > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: m.sparsegen(ROW, 1.0), "lam: got 1.0"),
        (lambda: m.sparsegen(np.zeros((2, 0), np.float32), 0.0), "at least one entry"),
        (lambda: m.sparsegen_threshold(ROW, 1.5), "below 1"),
        (lambda: m.lambda_interval(ROW, 0), "k is 0"),
        (lambda: m.lambda_interval(ROW, 5), r"1\.\.4"),
        (lambda: m.sparsity_loss(0.0, ROW, 4), r"1\.\.3"),
        (lambda: m.sparsity_loss(np.zeros(2), ROW, 1), "lam has shape"),
        (lambda: m.dynamic_load_balance(np.zeros((3, 4)), np.ones(2)), "mask has shape"),
        (lambda: m.lambda_head({}, np.ones(6), eps=1.0), "eps is 1.0"),
        (lambda: m.lambda_head({"W1": np.ones((2, 2))}, np.ones(2)), "lacks"),
        (lambda: m.lambda_head(linear_params(np.random.default_rng(0))[1], np.ones(5)), "width"),
        (lambda: m.Router("dense"), "expected one of"),
        (lambda: m.remoe_coefficient_update(1.0, 0.5, 9, 8), "k is 9"),
        (lambda: m.mola_layout("1468", 8), "layout"),
        (lambda: m.mola_layout("2468", 3), "num_layers"),
        (lambda: m.MoLEConfig(rank=0), "rank"),
        (lambda: m.MoLEConfig(num_experts=1), "num_experts"),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("sizes", "message"), [({"experts": 1}, "experts of A"), ({"rank": 0}, "rank of A")]
)
def test_linear_refuses(sizes, message):
    params, head = linear_params(np.random.default_rng(0), **sizes)
    with pytest.raises(ValueError, match=message):
        m.mole_linear(params, np.ones((2, 6), np.float32), head, alpha=4, router="sparsegen")


def test_unknown_router_and_wrong_shapes():
    params, head = linear_params(np.random.default_rng(0))
    x = np.ones((2, 6), np.float32)
    with pytest.raises(ValueError, match="router is 'best'"):
        m.mole_linear(params, x, head, alpha=4, router="best")
    with pytest.raises(ValueError, match="Wg has shape"):
        m.mole_linear(params | {"Wg": jnp.ones((3, 6))}, x, head, alpha=4, router="relu")
