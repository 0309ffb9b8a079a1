from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.nn.config import DecoderConfig, MoEConfig, RopeScaling
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.generate import (
    decode_step,
    generate,
    pad_prompts,
    prefill,
    unstack_layers,
)
from jaxlib_papers.nn.sampling import SamplingConfig, restrict_logits, sample_token

DENSE = DecoderConfig(
    vocab_size=23,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    max_positions=32,
)
QWEN = dataclasses.replace(
    DENSE,
    qk_norm=True,
    attention_bias=True,
    tie_embeddings=True,
    sliding_window=4,
    attention_softcap=2.0,
    logit_softcap=4.0,
    rope_scaling=RopeScaling("yarn", 4.0, 8),
)
SPARSE = dataclasses.replace(
    DENSE, mlp_dim=0, moe=MoEConfig(4, 2, expert_dim=8, capacity_factor=1.0)
)
CONFIGS = {"dense": DENSE, "everything": QWEN, "mixture": SPARSE}


def make(config, seed=0):
    """A model drawn by NumPy: nothing to compile."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: DecoderLM(config, key=jax.random.key(0)))
    return jax.tree.map(lambda a: jnp.asarray(0.4 * rng.normal(size=a.shape), a.dtype), shapes)


def prompt(rows, length, seed=0):
    return np.random.default_rng(seed).integers(1, 23, (rows, length)).astype(np.int32)


def whole_pass(model):
    """Logits of whole sequences, with nothing dropped, as generation has it."""
    if model.config.moe is not None:
        moe = dataclasses.replace(model.config.moe, capacity_factor=None)
        bare = jax.eval_shape(
            lambda: DecoderLM(dataclasses.replace(model.config, moe=moe), key=jax.random.key(0))
        )
        model = jax.tree.unflatten(jax.tree.structure(bare), jax.tree.leaves(model))
    return jax.jit(lambda t: model.logits(model(t).hidden))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_equals_whole_passes(name):
    """What the cache gives is what reading the whole text again at each token gives."""
    model = make(CONFIGS[name])
    ids = prompt(2, 5)
    got = generate(model, ids, max_new_tokens=8)
    full = whole_pass(model)
    text = np.concatenate([ids, np.asarray(got.tokens)], 1)
    logits = np.asarray(full(text))[:, 4:-1]
    np.testing.assert_array_equal(logits.argmax(-1), got.tokens)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    want = np.take_along_axis(log_probs, np.asarray(got.tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(got.log_probs, want, atol=2e-5)
    assert got.lengths.tolist() == [8, 8] and not got.stopped.any()
    assert len(set(map(tuple, got.tokens.tolist()))) == 2  # the rows differ, so they are not mixed


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_prompts_of_different_lengths(name):
    """Each row of a padded batch is what it would be alone."""
    model = make(CONFIGS[name])
    prompts = [prompt(1, n, seed=n)[0] for n in (2, 7, 4)]
    tokens, lengths = pad_prompts(prompts, pad_id=3, multiple=8)
    assert tokens.shape == (3, 8) and lengths.tolist() == [2, 7, 4]
    together = generate(model, tokens, lengths, max_new_tokens=6)
    other_padding, _ = pad_prompts(prompts, pad_id=9, multiple=8)
    again = generate(model, other_padding, lengths, max_new_tokens=6)
    np.testing.assert_array_equal(together.log_probs, again.log_probs)
    # Each length is a compilation: the shortest row, with most padding, has to do for some.
    for row, ids in enumerate(prompts if name == "everything" else prompts[:1]):
        alone = generate(model, ids[None], max_new_tokens=6)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        np.testing.assert_allclose(together.log_probs[row], alone.log_probs[0], atol=2e-5)


def test_stacked_and_separate_layers_agree():
    model = make(QWEN)
    ids = prompt(2, 5)
    a = generate(model, ids, max_new_tokens=8)  # compiled for the test above already
    b = generate(unstack_layers(model), ids, max_new_tokens=8)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


def test_steps_by_hand_are_pure():
    model = make(DENSE)
    ids = prompt(2, 4)
    logits, cache = jax.jit(prefill, static_argnames="slots")(model, ids, slots=6)
    step = jax.jit(decode_step)
    kept = jax.tree.map(np.asarray, cache)
    first = step(model, logits.argmax(-1), cache)
    second = step(model, logits.argmax(-1), cache)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, cache))
    assert int(first[1].length) == 5 and first[0].dtype == jnp.float32
    np.testing.assert_array_equal(first[1].keys[..., :4, :], kept.keys[..., :4, :])
    assert not np.asarray(first[1].keys[..., 5:, :]).any()


def test_bfloat16_computes_and_reports_in_float32():
    model = make(dataclasses.replace(DENSE, compute_dtype="bfloat16", param_dtype="bfloat16"))
    got = generate(model, prompt(1, 4), max_new_tokens=4)
    assert got.log_probs.dtype == jnp.float32 and np.isfinite(got.log_probs).all()
    full = jax.jit(lambda t: jax.nn.log_softmax(wide.logits(wide(t).hidden)[0, -1]))
    wide = make(DENSE)
    want = full(prompt(1, 4))[got.tokens[0, 0]]
    np.testing.assert_allclose(got.log_probs[0, 0], want, atol=0.1)


class TestStop:
    def test_rows_end_each_at_its_own_stop(self):
        model = make(DENSE)
        ids = prompt(3, 5, seed=4)
        free = np.asarray(generate(model, ids, max_new_tokens=10, pad_id=17).tokens)
        stop = int(free[0, 3])
        ends = [row.tolist().index(stop) + 1 if stop in row else 10 for row in free]
        assert ends[0] <= 4 and len(set(ends)) > 1
        got = generate(model, ids, max_new_tokens=10, stop_ids=(stop, 22), pad_id=17)
        for row, end in enumerate(ends):
            if 22 in free[row, :end]:
                end = free[row].tolist().index(22) + 1
            np.testing.assert_array_equal(got.tokens[row, :end], free[row, :end])
            assert (np.asarray(got.tokens[row, end:]) == 17).all()
            assert not np.asarray(got.log_probs[row, end:]).any()
            assert int(got.lengths[row]) == end
            assert bool(got.stopped[row]) == (int(free[row, end - 1]) in (stop, 22))

    def test_padding_that_is_a_stop_token_ends_nothing_twice(self):
        model = make(DENSE)
        ids = prompt(1, 5)
        stop = int(generate(model, ids, max_new_tokens=1).tokens[0, 0])
        got = generate(model, ids, max_new_tokens=6, stop_ids=[stop], pad_id=stop)
        assert got.lengths.tolist() == [1] and got.stopped.tolist() == [True]


class TestSampling:
    LOGITS = jnp.log(jnp.array([[0.5, 0.05, 0.3, 0.15], [0.05, 0.5, 0.15, 0.3]]))

    def kept(self, **options):
        config = SamplingConfig(temperature=1.0, **options)
        return np.isfinite(restrict_logits(self.LOGITS, config)).tolist()

    @pytest.mark.parametrize(
        ("options", "first_row"),
        [
            (dict(), [1, 1, 1, 1]),
            (dict(top_k=1), [1, 0, 0, 0]),
            (dict(top_k=3), [1, 0, 1, 1]),
            (dict(top_k=99), [1, 1, 1, 1]),
            (dict(top_p=0.4), [1, 0, 0, 0]),
            (dict(top_p=0.51), [1, 0, 1, 0]),
            (dict(top_p=0.9), [1, 0, 1, 1]),
            (dict(top_p=1e-6), [1, 0, 0, 0]),
            (dict(top_k=2, top_p=0.6), [1, 0, 0, 0]),  # 0.5 of 0.8 is 0.625 already
        ],
    )
    def test_what_is_left(self, options, first_row):
        row = [bool(x) for x in first_row]
        assert self.kept(**options) == [row, [row[1], row[0], row[3], row[2]]]

    def test_frequencies(self):
        config = SamplingConfig(temperature=2.0, top_k=3)
        logits = jnp.tile(self.LOGITS[:1], (20_000, 1))
        tokens, log_probs = jax.jit(sample_token, static_argnums=1)(
            logits, config, jax.random.key(0)
        )
        weights = np.sqrt([0.5, 0, 0.3, 0.15])
        share = np.bincount(np.asarray(tokens), minlength=4) / 20_000
        np.testing.assert_allclose(share, weights / weights.sum(), atol=0.015)
        # Log-probabilities are the model's own: no temperature, nothing left out.
        np.testing.assert_allclose(log_probs, logits[0][tokens], atol=1e-6)

    def test_temperature_0_is_greedy_and_needs_no_key(self):
        tokens, _ = sample_token(self.LOGITS, SamplingConfig(top_k=2), None)
        assert tokens.tolist() == [0, 1]
        with pytest.raises(ValueError, match="key is None"):
            sample_token(self.LOGITS, SamplingConfig(temperature=0.5), None)

    def test_draws_follow_the_key(self):
        model, ids = make(DENSE), prompt(2, 4)
        config = SamplingConfig(temperature=3.0, top_p=0.95)

        def draw(seed):
            key = jax.random.key(seed)
            return generate(model, ids, max_new_tokens=8, sampling=config, key=key).tokens.tolist()

        assert draw(0) == draw(0) != draw(1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(temperature=-1.0), "temperature is -1.0, expected a finite number >= 0"),
            (dict(top_k=0), "top_k is 0, expected an integer >= 1"),
            (dict(top_p=0.0), r"top_p is 0.0, expected a number in \(0, 1\]"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ValueError, match=message):
            SamplingConfig(**options)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (prompt(1, 30), dict(max_new_tokens=3), "model's context of 32; shorten the prompt"),
        (prompt(1, 0), dict(max_new_tokens=3), "a prompt needs at least one"),
        (prompt(1, 3)[0], dict(max_new_tokens=3), r"expected \[batch, seq\]"),
        (prompt(1, 3).astype(np.float32), dict(max_new_tokens=3), "expected integers"),
        (prompt(1, 3), dict(max_new_tokens=0), "max_new_tokens is 0"),
        (prompt(2, 3), dict(max_new_tokens=1, lengths=np.array([3])), "one number a prompt"),
        (prompt(1, 3), dict(max_new_tokens=1, lengths=np.array([4])), r"lengths is 4.*1\.\.3"),
        (prompt(1, 3), dict(max_new_tokens=1, lengths=np.array([0])), "lengths is 0"),
    ],
)
def test_bad_arguments(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(make(DENSE), tokens, **options)


def test_pad_prompts_refuses_nothing():
    for prompts in ([], [[1, 2], []]):
        with pytest.raises(ValueError, match="at least one token"):
            pad_prompts(prompts)
