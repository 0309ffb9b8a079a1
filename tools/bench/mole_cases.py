"""Cases about LD-MoLE's routing, and about a LoRA step on a real language model."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.pretrained import find_model, load_pretrained, save_pretrained
from jaxlib_papers.moe.ld_mole import adapter_arrays, gate_and_head, head_arrays, route
from jaxlib_papers.nn.adapters import AdapterParam
from jaxlib_papers.nn.head import head_cross_entropy
from jaxlib_papers.nn.lora import LoRAConfig, inject_lora
from jaxlib_papers.train.optimizer import OptimizerConfig, global_norm, make_optimizer
from jaxlib_papers.train.sharding import model_axes
from jaxlib_papers.train.state import merge_model, split_model
from tools.bench.rival import Rival
from tools.bench.timing import Result, timed

__all__ = ["lora_step", "mole_routing"]

_TOKENS, _EXPERTS = 4096, 8
_ROWS, _LENGTH, _RANK = 4, 256, 8


def _routing_step(x: jax.Array, gate: jax.Array, head: dict[str, jax.Array], g: jax.Array) -> Any:
    """Weights of the experts, and the gradients of gate, head and input."""

    def weights(x: jax.Array, gate: jax.Array, head: dict[str, jax.Array]) -> jax.Array:
        u, lam = gate_and_head(x, gate, head)
        return route(u, "sparsegen", lam)

    p, pullback = jax.vjp(weights, x, gate, head)
    return p, pullback(g)


def mole_routing(turns: int = 25) -> Iterator[Result]:
    """Gate, lambda head and Sparsegen with their backward pass, against a sort in PyTorch."""
    for width, hidden in ((64, 32), (576, 64)):
        keys = jax.random.split(jax.random.key(0), 4)
        x = jax.random.normal(keys[0], (_TOKENS, width))
        gate = adapter_arrays(keys[1], _EXPERTS, 8, width, width)["Wg"]
        head = head_arrays(keys[2], hidden, width, hidden_bias_init=0.0)
        g = jax.random.normal(keys[3], (_TOKENS, _EXPERTS))
        step = partial(jax.jit(_routing_step), x, gate, head, g)
        jax.block_until_ready(step())
        best, theirs = float("inf"), float("inf")
        options = [str(_TOKENS), str(_EXPERTS), str(width), str(hidden)]
        with Rival("routing", script="mole_rival.py", options=options) as rival:
            for _ in range(turns):
                # The threads of either side wait busily for some milliseconds, longer than a step.
                time.sleep(0.02)
                best = min(best, *(timed(step) for _ in range(3)))
                time.sleep(0.02)
                if rival.ready:
                    theirs = min(theirs, *(rival.turn() for _ in range(3)))
        yield Result(
            case=f"mole_routing.{width}",
            seconds=best,
            rate=_TOKENS / best / 1e6,
            unit="M tokens/s",
            ratio=theirs / best if rival.ready else None,
            meaning=f"times faster, forward and backward, {_TOKENS} x {_EXPERTS}, hidden {hidden}",
            rival=rival.description,
            target=">= 3",
        )


class _LoRAStep:
    """Holds the trained arrays, which each step donates."""

    def __init__(self, model: Any, tokens: jax.Array):
        adapted = inject_lora(model, LoRAConfig(_RANK, 2.0 * _RANK), key=jax.random.key(0))
        graphdef, self.params, self.rest = split_model(adapted, AdapterParam)
        axes, _ = model_axes(graphdef, self.params, self.rest)
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4, total_steps=1000), axes)
        self.state, self.tokens = optimizer.init(self.params), tokens

        def loss(params: Any, rest: Any, tokens: jax.Array) -> jax.Array:
            model = merge_model(graphdef, params, rest)
            targets = jnp.roll(tokens, -1, axis=1)
            mask = jnp.ones(tokens.shape, bool).at[:, -1].set(False)
            hidden = model(tokens).hidden
            total, weight = head_cross_entropy(hidden, model.head_kernel(), targets, mask)
            return total / weight

        def step(params: Any, state: Any, rest: Any, tokens: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, rest, tokens)
            updates, state = optimizer.update(
                gradient, state, params, grad_norm=global_norm(gradient)
            )
            return jax.tree.map(jnp.add, params, updates), state, value

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> jax.Array:
        self.params, self.state, value = self.step(self.params, self.state, self.rest, self.tokens)
        return value


def lora_step(turns: int = 3) -> Iterator[Result]:
    """A LoRA step on SmolLM2-135M, all seven projections, against transformers and PEFT."""
    try:
        model, _, tokenizer = load_pretrained(find_model("smollm2"))
    except FormatError as error:
        yield Result(case="lora_step", rival=f"not run: {error}")
        return
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(3, 1000, (_ROWS, _LENGTH)), jnp.int32)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_pretrained(folder, model, tokenizer)
        step = _LoRAStep(model, tokens)
        jax.block_until_ready(step())
        options = [folder, str(_ROWS), str(_LENGTH), str(_RANK)]
        # As it is shipped, and with malloc set as this process has it.
        rivals = {
            name: stack.enter_context(
                Rival("lora", script="mole_rival.py", options=options, keep_freed_memory=keep)
            )
            for name, keep in (("", False), (".same_malloc", True))
        }
        ours, theirs = float("inf"), dict.fromkeys(rivals, float("inf"))
        for _ in range(turns):
            ours = min(ours, timed(step))
            for name, rival in rivals.items():
                if rival.ready:
                    theirs[name] = min(theirs[name], rival.turn())
    for name, rival in rivals.items():
        yield Result(
            case=f"lora_step{name}",
            seconds=ours,
            rate=_ROWS * _LENGTH / ours,
            unit="tokens/s",
            ratio=theirs[name] / ours if rival.ready else None,
            meaning=f"times faster, batch {_ROWS} x {_LENGTH}, rank {_RANK}, float32",
            rival=rival.description + (", given our malloc settings" if name else ""),
            target="" if name else ">= 1.15",
            detail={"rival_seconds": theirs[name] if rival.ready else None},
        )
