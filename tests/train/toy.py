"""A model and an objective that are small enough to check by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlib_papers.train.step import Objective

VOCAB, WIDTH, HIDDEN, SEQ = 16, 8, 12, 6


class ToyLM(nnx.Module):
    """Embedding, one residual layer with optional dropout, untied head."""

    def __init__(self, *, key: jax.Array, dropout: float = 0.0):
        keys = jax.random.split(key, 4)

        def param(key, shape, axes):
            return nnx.Param(0.3 * jax.random.normal(key, shape), logical_axes=axes)

        self.embed = param(keys[0], (VOCAB, WIDTH), ("vocab", "embed"))
        self.up = param(keys[1], (WIDTH, HIDDEN), ("embed", "mlp"))
        self.down = param(keys[2], (HIDDEN, WIDTH), ("mlp", "embed"))
        self.bias = nnx.Param(jnp.zeros(WIDTH), logical_axes=("norm",))
        self.head = param(keys[3], (WIDTH, VOCAB), ("embed", "vocab"))
        self.dropout = dropout

    def __call__(self, tokens: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        x = self.embed[...][tokens]
        hidden = jnp.tanh(x @ self.up[...])
        if key is not None and self.dropout:
            keep = jax.random.bernoulli(key, 1.0 - self.dropout, hidden.shape)
            hidden = jnp.where(keep, hidden / (1.0 - self.dropout), 0.0)
        x = x + hidden @ self.down[...] + jnp.expand_dims(self.bias[...], (0, 1))
        return x @ self.head[...]


def model_fn(key: jax.Array) -> ToyLM:
    return ToyLM(key=key)


def token_nll(logits: jax.Array, batch) -> jax.Array:
    scores = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.where(batch["loss_mask"], nll, 0.0)


def _count(batch):
    return {"tokens": jnp.sum(batch["loss_mask"], dtype=jnp.float32), "microbatches": 1.0}


def _mean_probs(model, batch, key):
    probs = jax.nn.softmax(model(batch["tokens"], key=key))
    return jnp.sum(jnp.where(batch["loss_mask"][..., None], probs, 0.0), axis=(0, 1))


def _loss(model, batch, key, totals, statistics):
    logits = model(batch["tokens"], key=key)
    nll = jnp.sum(token_nll(logits, batch)) / totals["tokens"]
    return nll, {"nll": nll, "logit": jnp.mean(logits) / totals["microbatches"]}


def _entropy_loss(model, batch, key, totals, statistics):
    """A function of batch-wide means: minus the entropy of the mean prediction."""
    own = _mean_probs(model, batch, key)
    stop = jax.lax.stop_gradient
    whole = own if statistics is None else stop(statistics) + own - stop(own)
    mean = whole / jnp.sum(stop(whole))
    value = jnp.sum(mean * jnp.log(mean))
    if statistics is None:
        value = value / totals["microbatches"]
    else:
        value = stop(value) / totals["microbatches"] + value - stop(value)
    return value, {}


OBJECTIVE = Objective(_count, _loss)
ENTROPY_OBJECTIVE = Objective(_count, _entropy_loss, _mean_probs)


def batch(rows: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows with very unequal numbers of masked-in tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, SEQ + 1), dtype=np.int32)
    lengths = rng.permutation(np.linspace(1, SEQ, rows).astype(int))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.arange(SEQ)[None, :] < lengths[:, None],
    }
