"""The objective on a toy model: padding, packing, micro-batches, exact statistics; its parts."""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.moe import expert_divergence as ed
from jaxlib_papers.train.step import Objective

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
ROWS, SEQ, WIDTH, VOCAB, LAYERS, EXPERTS, DOMAINS = 8, 10, 6, 11, 2, 4, 3
COEF = ed.MoELossConfig(alpha=0.1, beta=0.2, gamma_z=0.05, layer_reduction="sum")


class ToyOutput(NamedTuple):
    hidden: jax.Array
    router_logits: jax.Array | None
    router_probs: jax.Array | None
    dropped_fraction: jax.Array | None


class ToyModel(NamedTuple):
    """What the objective needs of a decoder: called on tokens, with a head."""

    embedding: jax.Array
    router: jax.Array
    head: jax.Array

    config = SimpleNamespace(logit_softcap=None)

    def head_kernel(self):
        return self.head

    def __call__(self, tokens, *, positions, segment_ids, key):
        hidden = self.embedding[tokens] + 0.01 * positions[..., None].astype(jnp.float32)
        if key is not None:
            hidden = hidden * (1 + 0.1 * jax.random.normal(key, hidden.shape))
        logits = jnp.einsum("btd,lde->lbte", hidden, self.router)
        dropped = jnp.full(LAYERS, 0.25)
        return ToyOutput(hidden, logits, jax.nn.softmax(logits, axis=-1), dropped)


def toy_model(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (VOCAB, WIDTH), (LAYERS, WIDTH, EXPERTS), (WIDTH, VOCAB)
    return ToyModel(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes))


def toy_batch(seed=0, pad=0):
    """Rows of one or two segments with a ragged end; every fourth row holds one domain only."""
    rng = np.random.default_rng(seed)
    seq = SEQ + pad
    ends = rng.integers(2, SEQ, (ROWS, 1)), rng.integers(SEQ - 3, SEQ + 1, (ROWS, 1))
    at = np.arange(seq)
    segment_ids = np.where(at < ends[0], 1, np.where(at < ends[1], 2, 0)).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
    tokens = np.pad(tokens, ((0, 0), (0, pad)), constant_values=3)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "loss_mask": (segment_ids > 0) & (segment_ids == np.roll(segment_ids, -1, axis=1)),
        "segment_ids": segment_ids,
        "positions": np.where(segment_ids == 2, at - ends[0], at).astype(np.int32),
        "domain_ids": rng.integers(0, DOMAINS, (ROWS, 2)).astype(np.int32),
    }


@cache
def compiled(objective):
    step = jax.value_and_grad(objective.loss, has_aux=True)
    return jit(step), jit(objective.statistics)


def run(objective, model, batch, *, parts=1, exact=False, key=None):
    """What a trainer does: totals, perhaps statistics, then the sum over micro-batches."""
    micro = [{k: v[a::parts] for k, v in batch.items()} for a in range(parts)]
    add = lambda trees: jax.tree.map(lambda *x: sum(x), *trees)  # noqa: E731
    totals = add([objective.count(m) for m in micro])
    keys = [None if key is None else jax.random.fold_in(key, a) for a in range(parts)]
    step, statistics = compiled(objective)
    whole = None
    if exact:
        whole = add([statistics(model, m, k) for m, k in zip(micro, keys, strict=True)])
    return add([step(model, m, k, totals, whole) for m, k in zip(micro, keys, strict=True)])


OBJECTIVE = ed.expert_divergence_objective(COEF, num_domains=DOMAINS, top_k=2)


def assert_close(found, expected, rtol=1e-5):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * (np.abs(b).max() + 1e-3))

    jax.tree.map(compare, found, expected)


def test_is_the_sum_of_its_public_parts():
    model, batch = toy_model(), toy_batch()
    (loss, metrics), _ = run(OBJECTIVE, model, batch)
    assert isinstance(OBJECTIVE, Objective)
    valid = batch["segment_ids"] > 0

    @jit
    def parts(model):
        out = model(batch["tokens"], positions=batch["positions"], segment_ids=None, key=None)
        log_probs = jax.nn.log_softmax(out.hidden @ model.head, axis=-1)
        divergence, more = ed.expert_divergence_from_logits(
            out.router_logits,
            batch["domain_ids"],
            DOMAINS,
            eps=COEF.eps,
            segment_ids=batch["segment_ids"],
            layer_reduction="sum",
        )
        lb = ed.load_balancing_loss(logits=out.router_logits, top_k=2, mask=valid)
        return (
            log_probs,
            divergence,
            more["mean_jsd"],
            lb,
            ed.router_z_loss(out.router_logits, valid),
        )

    log_probs, divergence, mean_jsd, lb, z = parts(model)
    nll = -np.take_along_axis(np.asarray(log_probs), batch["targets"][..., None], -1)[..., 0]
    expected = {
        "lm_loss": nll[batch["loss_mask"]].mean(),
        "load_balance": lb,
        "expert_divergence": divergence,
        "router_z": z,
        "mean_jsd": mean_jsd,
        "num_domains_present": 3.0,
        "dropped_fraction": 0.25,
    }
    assert set(metrics) == {*expected, "expert_load"}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics["expert_load"].sum(-1), 1, rtol=1e-6)
    weighted = [expected[k] for k in ("lm_loss", "load_balance", "expert_divergence", "router_z")]
    total = np.dot([1, 0.1, 0.2, 0.05], [float(x) for x in weighted])
    assert float(loss) == pytest.approx(total, rel=1e-5)


def test_padding_changes_nothing_c6():
    model = toy_model()
    assert_close(run(OBJECTIVE, model, toy_batch(pad=10)), run(OBJECTIVE, model, toy_batch()))


def test_exact_statistics_do_not_depend_on_micro_batches_c7_c9():
    model, batch = toy_model(), toy_batch()
    whole = run(OBJECTIVE, model, batch)
    for parts in (1, 2, 4):
        assert_close(run(OBJECTIVE, model, batch, parts=parts, exact=True), whole)


def test_exact_statistics_with_randomness_in_the_model():
    """The second pass draws what the first one drew, so the value is that of one big batch."""
    model, batch = toy_model(), toy_batch()
    key = jax.random.key(0)
    (loss, _), grad = run(OBJECTIVE, model, batch, parts=4, exact=True, key=key)
    step = 1e-2  # a directional derivative of the summed value, statistics recomputed
    along = jax.tree.map(lambda g: g / jnp.linalg.norm(g), grad)
    moved = [
        run(
            OBJECTIVE,
            jax.tree.map(lambda p, d, s=sign: p + s * step * d, model, along),
            batch,
            parts=4,
            exact=True,
            key=key,
        )[0][0]
        for sign in (1, -1)
    ]
    numeric = float(moved[0] - moved[1]) / (2 * step)
    expected = sum(float(jnp.vdot(g, d)) for g, d in zip(grad, along, strict=True))
    assert numeric == pytest.approx(expected, rel=1e-2)


def test_default_averages_the_micro_batches_own_values_c9():
    model, batch = toy_model(), toy_batch()
    (loss, metrics), _ = run(OBJECTIVE, model, batch, parts=4)
    _, whole = run(OBJECTIVE, model, batch)[0]
    for name in ("lm_loss", "router_z", "expert_load", "dropped_fraction"):
        np.testing.assert_allclose(metrics[name], whole[name], rtol=1e-5, err_msg=name)
    alone = [run(OBJECTIVE, model, {k: v[a::4] for k, v in batch.items()})[0][1] for a in range(4)]
    for name in ("load_balance", "expert_divergence", "mean_jsd", "num_domains_present"):
        mean = np.mean([part[name] for part in alone])
        np.testing.assert_allclose(metrics[name], mean, rtol=1e-5, err_msg=name)
    assert abs(float(metrics["expert_divergence"] - whole["expert_divergence"])) > 1e-3


def test_statistics_are_those_of_the_whole_batch():
    model, batch = toy_model(), toy_batch()
    statistics = compiled(OBJECTIVE)[1](model, batch, None)
    assert statistics["domain_sums"].shape == (LAYERS, DOMAINS, EXPERTS)
    segments = sum((batch["segment_ids"] == g).any(axis=1).sum() for g in (1, 2))
    assert float(statistics["domain_counts"].sum()) == segments
    np.testing.assert_allclose(
        statistics["domain_sums"].sum(-1),
        np.tile(statistics["domain_counts"], (LAYERS, 1)),
        rtol=1e-5,
    )
    tokens = float((batch["segment_ids"] > 0).sum())
    np.testing.assert_allclose(statistics["expert_counts"].sum(-1), 2 * tokens)


def test_a_batch_of_padding_is_finite():
    batch = {k: np.zeros_like(v) for k, v in toy_batch().items()}
    (loss, _), grad = run(OBJECTIVE, toy_model(), batch)
    assert loss == 0
    assert not any(np.any(g) for g in grad)


def test_only_beta_moves_the_gradient_of_the_divergence():
    """With beta = 0 the divergence is reported and pulls at nothing."""
    model, batch = toy_model(), toy_batch()
    plain = ed.MoELossConfig(alpha=0.0, beta=0.0)
    (loss, metrics), grad = run(
        ed.expert_divergence_objective(plain, num_domains=DOMAINS, top_k=2), model, batch
    )
    assert loss == metrics["lm_loss"]
    assert metrics["expert_divergence"] > 0
    assert not grad.router.any()


def test_refused():
    with pytest.raises(ValueError, match="1 domain"):
        ed.expert_divergence_objective(num_domains=1, top_k=2)
    with pytest.raises(ValueError, match="top_k is 0"):
        ed.expert_divergence_objective(num_domains=2, top_k=0)
    ed.expert_divergence_objective(ed.MoELossConfig(beta=0.0), num_domains=1, top_k=2)

    def dense(tokens, **_):
        return ToyOutput(jnp.zeros((*tokens.shape, WIDTH)), None, None, None)

    with pytest.raises(ValueError, match="the model has no experts"):
        OBJECTIVE.loss(dense, toy_batch(), None, OBJECTIVE.count(toy_batch()), None)


class TestObjectiveParts:
    def test_weighted_sum_and_parts(self):
        coef = ed.MoELossConfig(alpha=0.1, beta=0.01, gamma_z=0.001)
        total, parts = ed.moe_objective(*(jnp.float32(x) for x in (2, 1, 5, 9)), coef)
        assert float(total) == pytest.approx(2 + 0.1 + 0.05 + 0.009)
        assert sum(float(p) for p in parts.values()) == pytest.approx(float(total))
        assert set(parts) == {"lm", "lb", "ed", "z"}

    def test_a_term_with_coefficient_zero_is_left_out(self):
        coef = ed.MoELossConfig(beta=0.0)
        total, parts = ed.moe_objective(
            jnp.float32(2), jnp.float32(1), jnp.float32(jnp.nan), jnp.float32(9), coef
        )
        assert float(total) == pytest.approx(2.001)
        assert parts["ed"] == parts["z"] == 0

    def test_defaults(self):
        assert ed.MoELossConfig() == ed.MoELossConfig(1e-3, 1e-3, 0.0, 1e-8, "mean")
        with pytest.raises(dataclasses.FrozenInstanceError):
            ed.MoELossConfig().alpha = 1.0

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"alpha": -1.0}, "alpha is -1.0"),
            ({"beta": float("nan")}, "beta is nan"),
            ({"gamma_z": -1e-9}, "gamma_z is"),
            ({"eps": 0.0}, "eps is 0.0"),
            ({"layer_reduction": "max"}, "layer_reduction is 'max'"),
        ],
    )
    def test_refused_coefficients(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            ed.MoELossConfig(**wrong)

    def test_negative_coefficient_at_the_sum(self):
        coef = SimpleNamespace(alpha=1.0, beta=-1.0, gamma_z=0.0)
        with pytest.raises(ValueError, match="coefficient of ed is -1.0"):
            ed.moe_objective(*(jnp.float32(0),) * 4, coef)

    def test_one_domain_is_refused_only_with_beta(self):
        ed.check_domains_for_objective(ed.MoELossConfig(beta=0.0), 1)
        ed.check_domains_for_objective(ed.MoELossConfig(), 2)
        with pytest.raises(ValueError, match="the data has 1 domain"):
            ed.check_domains_for_objective(ed.MoELossConfig(), 1)


class TestRouterPermutation:
    """A tiny model: token t needs expert t mod N of each layer; a wrong one costs 1 nat."""

    sizes = {"num_layers": 3, "num_experts": 5}

    def apply(self, batch, permutations):
        if permutations is None:
            return 0.0, len(batch)
        permutations = np.asarray(permutations)
        assert permutations.shape == (3, 5)
        np.testing.assert_array_equal(np.sort(permutations, axis=1), np.tile(np.arange(5), (3, 1)))
        wrong = permutations != np.arange(5)
        return np.sum(wrong[:, batch % 5]), len(batch)

    def test_ratio_is_the_exponential_of_the_rise(self):
        key = jax.random.key(0)
        ratio = ed.router_permutation_delta_ppl(self.apply, np.arange(5), key, **self.sizes)
        again = ed.router_permutation_delta_ppl(self.apply, np.arange(5), key, **self.sizes)
        assert isinstance(ratio, float)
        assert ratio == again
        assert 1 < ratio <= math.exp(3)

    def test_sizes_are_read_from_the_routing(self):
        key, tokens = jax.random.key(3), np.arange(7)

        def with_routing(batch, permutations):
            return *self.apply(batch, permutations), np.zeros((3, len(batch), 5))

        ratio = ed.router_permutation_delta_ppl(with_routing, tokens, key)
        assert ratio == ed.router_permutation_delta_ppl(self.apply, tokens, key, **self.sizes)
        with pytest.raises(ValueError, match="num_layers or num_experts is None"):
            ed.router_permutation_delta_ppl(self.apply, tokens, key)

    def test_chosen_layers_only(self):
        key, tokens = jax.random.key(1), np.arange(5)
        ratios = [
            ed.router_permutation_delta_ppl(
                self.apply, tokens, key, layers=layers, num_draws=2, **self.sizes
            )
            for layers in ([0], [1], [2], None)
        ]
        assert math.log(ratios[3]) == pytest.approx(sum(math.log(r) for r in ratios[:3]))
        with pytest.raises(ValueError, match=r"layers is 3, expected an integer in 0\.\.2"):
            ed.router_permutation_delta_ppl(self.apply, tokens, key, layers=[3], **self.sizes)

    def test_indifferent_model_and_empty_batch(self):
        key = jax.random.key(2)
        ratio = ed.router_permutation_delta_ppl(lambda b, p: (3.0, 2.0), None, key, **self.sizes)
        assert ratio == 1.0
        with pytest.raises(ValueError, match="0.0 tokens"):
            ed.router_permutation_delta_ppl(lambda b, p: (0.0, 0.0), None, key, **self.sizes)
