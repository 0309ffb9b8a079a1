"""Evaluation per domain against plain numpy on a model whose outputs are known."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlib_papers.train import evaluate

VOCAB, EXPERTS, LAYERS, TOP_K = 7, 4, 2, 2


class Lookup(nnx.Module):
    """Logits and router logits are rows of tables, chosen by the token."""

    def __init__(self, *, dense: bool, key: jax.Array):
        self.config = types.SimpleNamespace(logit_softcap=None)
        self.dense = dense
        one, two = jax.random.split(key)
        self.table = nnx.Param(
            jax.random.normal(one, (VOCAB, VOCAB)), logical_axes=("vocab", "embed")
        )
        self.router = nnx.Param(
            jax.random.normal(two, (LAYERS, VOCAB, EXPERTS)),
            logical_axes=("layers", "vocab", "experts"),
        )

    def head_kernel(self):
        return jnp.eye(VOCAB)

    def __call__(self, tokens, *, positions=None, segment_ids=None, key=None):
        logits = self.router[...][:, tokens]
        probs = jax.nn.softmax(logits, axis=-1)
        if self.dense:
            logits = probs = None
        return types.SimpleNamespace(
            hidden=self.table[...][tokens], router_logits=logits, router_probs=probs
        )


def make_batch(seed, rows=3, seq=8):
    """Rows of two segments of uneven length and padding at the end."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((rows, seq), np.int32)
    for row in segments:
        cut, end = sorted(rng.choice(np.arange(1, seq), 2, replace=False))
        row[:cut], row[cut:end] = 1, 2
    return {
        "tokens": rng.integers(0, VOCAB, (rows, seq)).astype(np.int32),
        "targets": rng.integers(0, VOCAB, (rows, seq)).astype(np.int32),
        "loss_mask": (segments > 0) & (rng.random((rows, seq)) < 0.7),
        "segment_ids": segments,
        "positions": np.zeros((rows, seq), np.int32),
        "domain_ids": np.zeros((rows, 3), np.int32),
    }


def run(batches, dense=False):
    model = Lookup(dense=dense, key=jax.random.key(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    step = evaluate.make_domain_eval_step(graphdef, top_k=None if dense else TOP_K)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    return model, evaluate.evaluate_domains(step, params, rest, batches)


BATCHES = {"b": [make_batch(1), make_batch(2)], "a": [make_batch(3)]}


def test_losses_are_token_means_over_all_batches_of_the_domain():
    model, got = run(BATCHES)
    table = np.asarray(model.table[...], np.float64)
    logp = table - np.log(np.exp(table).sum(-1, keepdims=True))
    assert got.domains == ("b", "a"), "the given order is kept"
    for name, batches in BATCHES.items():
        rows = [(logp[b["tokens"], b["targets"]], b["loss_mask"]) for b in batches]
        nll = -sum(float((values * mask).sum()) for values, mask in rows)
        tokens = sum(int(mask.sum()) for _, mask in rows)
        assert got.losses[name] == pytest.approx(nll / tokens, rel=1e-5)
        assert got.tokens[name] == tokens
    assert got.loss == pytest.approx((got.losses["a"] + got.losses["b"]) / 2)


def test_routing_is_a_mean_of_segment_means_and_load_counts_top_k_choices():
    model, got = run(BATCHES)
    logits = np.asarray(model.router[...], np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.zeros((LAYERS, EXPERTS))
    for index, batches in enumerate(BATCHES.values()):
        means = []
        for batch in batches:
            for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
                means += [probs[:, tokens[segments == g]].mean(1) for g in (1, 2)]
                for token in tokens[segments > 0]:
                    best = np.argsort(-logits[:, token], axis=-1)[:, :TOP_K]
                    for layer in range(LAYERS):
                        chosen[layer, best[layer]] += 1
        np.testing.assert_allclose(got.routing[:, index], np.mean(means, 0), rtol=1e-5)
    np.testing.assert_allclose(
        got.expert_load, chosen / chosen.sum(-1, keepdims=True) * EXPERTS, rtol=1e-6
    )


def test_pairwise_divergence_and_its_record():
    _, got = run(BATCHES)
    p, q = got.routing[:, 0], got.routing[:, 1]
    m = (p + q) / 2
    expected = ((p * np.log(p / m)).sum(-1) + (q * np.log(q / m)).sum(-1)) / 2
    np.testing.assert_allclose(got.pairwise_jsd[:, 0, 1], expected, rtol=1e-3)
    np.testing.assert_allclose(got.pairwise_jsd, got.pairwise_jsd.swapaxes(1, 2), rtol=1e-6)
    assert np.all(np.diagonal(got.pairwise_jsd, axis1=1, axis2=2) == 0)
    assert got.mean_jsd == pytest.approx(expected.mean(), rel=1e-3)
    record = got.record()
    assert record["loss/a"] == got.losses["a"] and record["mean_jsd"] == got.mean_jsd
    assert record["layer_jsd"] == pytest.approx(expected, rel=1e-3)
    assert np.shape(record["pairwise_jsd"]) == (2, 2)
    assert np.shape(record["expert_load"]) == (LAYERS, EXPERTS)


def test_dense_model_has_losses_only_and_one_domain_has_no_divergence():
    _, sparse = run(BATCHES)
    _, dense = run(BATCHES, dense=True)
    assert dense.losses == sparse.losses
    assert dense.routing is None and dense.mean_jsd is None and set(dense.record()) == {
        "loss", "loss/a", "loss/b",
    }  # fmt: skip
    _, single = run({"a": BATCHES["a"]})
    assert single.mean_jsd is None and "mean_jsd" not in single.record()
    assert single.record()["layer_jsd"] == [0.0] * LAYERS


def test_padding_and_rows_without_a_segment_change_nothing():
    _, got = run({"a": [make_batch(3)]})
    batch = make_batch(3)
    wider = {
        name: np.pad(value, ((0, 2), (0, 5 if name != "domain_ids" else 2)))
        for name, value in batch.items()
    }
    _, same = run({"a": [wider]})
    for field in dataclasses.fields(got):
        one, two = getattr(got, field.name), getattr(same, field.name)
        if isinstance(one, np.ndarray):
            np.testing.assert_allclose(one, two, rtol=1e-6)
        else:
            assert one == pytest.approx(two, rel=1e-6)


def test_domain_without_held_out_text_is_named():
    with pytest.raises(ValueError, match="domain 'c' has no held-out batch"):
        run(BATCHES | {"c": []})
    empty = make_batch(1) | {"loss_mask": np.zeros((3, 8), bool)}
    with pytest.raises(ValueError, match="domain 'c' has no held-out token"):
        run(BATCHES | {"c": [empty]})
