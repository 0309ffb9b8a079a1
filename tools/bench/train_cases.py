"""Cases about the training step of a sparse mixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlib_papers.moe.expert_divergence import MoELossConfig, expert_divergence_objective
from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.moe import expert_mixture
from jaxlib_papers.train.flops import flops_per_token
from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
from jaxlib_papers.train.state import abstract_model, abstract_state, init_state
from jaxlib_papers.train.step import TrainStep, make_train_step
from tools.bench.rival import Rival
from tools.bench.timing import Result, compiled_seconds, paired, race, timed

__all__ = [
    "compile_depth",
    "edl_overhead",
    "import_time",
    "memory_length",
    "moe_layer",
    "train_step_moe16",
]

_VOCAB, _DOMAINS = 8192, 4


class _Setup(NamedTuple):
    config: DecoderConfig
    step: TrainStep
    optimizer: Any

    def model(self, key: jax.Array) -> DecoderLM:
        return DecoderLM(self.config, key=key)

    def state(self) -> Any:
        return init_state(self.model, self.optimizer, jax.random.key(0))

    def abstract_state(self) -> Any:
        return abstract_state(self.model, self.optimizer)


def _setup(*, num_layers: int = 4, beta: float = 1e-3, **changes: Any) -> _Setup:
    """The 4-layer, 256-wide, 16-expert, top-2 model of the targets, with its train step."""
    config = DecoderConfig(
        vocab_size=_VOCAB,
        num_layers=num_layers,
        embed_dim=256,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        qk_norm=True,
        max_positions=1 << 20,
        moe=MoEConfig(num_experts=16, top_k=2, expert_dim=256),
        **changes,
    )
    spec = abstract_model(lambda key: DecoderLM(config, key=key))
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=3e-4, warmup_steps=10, total_steps=1000), spec.axes
    )
    objective = expert_divergence_objective(MoELossConfig(beta=beta), num_domains=_DOMAINS, top_k=2)
    return _Setup(config, make_train_step(spec.graphdef, objective, optimizer), optimizer)


def _batch(rows: int, length: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape = (rows, length)
    return {
        "tokens": jnp.asarray(rng.integers(0, _VOCAB, shape), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, _VOCAB, shape), jnp.int32),
        "loss_mask": jnp.ones(shape, bool),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.tile(jnp.arange(length, dtype=jnp.int32), (rows, 1)),
        "domain_ids": (jnp.arange(rows, dtype=jnp.int32) % _DOMAINS)[:, None],
    }


class _Stepper:
    """Holds a state that each step donates."""

    def __init__(self, setup: _Setup, batch: dict[str, jax.Array]):
        self.step, self.state, self.batch = setup.step, setup.state(), batch

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics


def _matmuls() -> dict[float, Any]:
    """Square float32 matmuls by their FLOPs; the machine's rate is that of the best of them."""
    matmul = jax.jit(lambda a: a @ a)
    return {
        2.0 * size**3: partial(matmul, jax.random.normal(jax.random.key(0), (size, size)))
        for size in (512, 1024, 2048)
    }


def train_step_moe16(turns: int = 7) -> Iterator[Result]:
    """A training step against transformers' Qwen3-MoE and against the machine's matmul rate."""
    rows, length = 8, 512
    setup = _setup()
    ours = _Stepper(setup, _batch(rows, length))
    matmuls, matmul_rate = _matmuls(), 0.0
    best = dict.fromkeys(("ours", "shipped", "same_malloc"), float("inf"))
    with (
        Rival("train_step_moe16") as shipped,
        Rival("train_step_moe16", keep_freed_memory=True) as same_malloc,
    ):
        rivals = {"shipped": shipped, "same_malloc": same_malloc}
        for call in (ours, *matmuls.values()):
            jax.block_until_ready(call())
        for _ in range(turns):
            best["ours"] = min(best["ours"], timed(ours))
            for count, matmul in matmuls.items():
                matmul_rate = max(matmul_rate, count / timed(matmul))
            for name, rival in rivals.items():
                if rival.ready:
                    best[name] = min(best[name], rival.turn())
    flops = flops_per_token(setup.config, length) * rows * length
    for name, rival in rivals.items():
        yield Result(
            case="train_step_moe16" + ("" if name == "shipped" else f".{name}"),
            seconds=best["ours"],
            rate=rows * length / best["ours"],
            unit="tokens/s",
            ratio=best[name] / best["ours"] if rival.ready else None,
            meaning="tokens/s over the rival's"
            + ("" if name == "shipped" else ", which is given our malloc settings"),
            rival=rival.description,
            target=">= 1.3" if name == "shipped" else "",
            detail={"rival_seconds": best[name] if rival.ready else None},
        )
    yield Result(
        case="train_step_moe16.flops",
        seconds=best["ours"],
        rate=flops / best["ours"] / 1e9,
        unit="model GFLOP/s",
        ratio=flops / best["ours"] / matmul_rate,
        meaning="model FLOP/s over the measured float32 matmul rate",
        rival=f"best of jnp matmuls 512 to 2048 at {matmul_rate / 1e9:.0f} GFLOP/s",
        target=">= 0.55",
        detail={"model_gflop": flops / 1e9},
    )


def moe_layer(turns: int = 9) -> Iterator[Result]:
    """Experts forward and backward, dispatch included, against dense matmuls of equal FLOPs."""
    tokens, embed, hidden, top_k = 4096, 256, 256, 2
    for num_experts in (16, 64):
        keys = jax.random.split(jax.random.key(0), 5)
        x = jax.random.normal(keys[0], (tokens, embed))
        gate_up = 0.05 * jax.random.normal(keys[1], (num_experts, embed, 2, hidden))
        down = 0.05 * jax.random.normal(keys[2], (num_experts, hidden, embed))
        _, indices = jax.lax.top_k(jax.random.normal(keys[3], (tokens, num_experts)), top_k)
        weights = jnp.full((tokens, top_k), 0.5)
        dy = jax.random.normal(keys[4], x.shape)

        # The indices are an argument: as a constant XLA would sort them at compile time.
        def sparse(x, weights, gate_up, down, dy, indices):
            def layer(x, weights, gate_up, down):
                return expert_mixture(x, indices, weights, gate_up, down)[0]

            return jax.vjp(layer, x, weights, gate_up, down)[1](dy)

        def dense(rows, first, second, dy):
            # The matmuls of the sparse layer with one expert, and nothing between them.
            def layer(rows, first, second):
                return (rows @ first)[:, :hidden] @ second

            return jax.vjp(layer, rows, first, second)[1](dy)

        rows = jnp.repeat(x, top_k, axis=0)
        sparse_args = (x, weights, gate_up, down, dy, indices)
        dense_args = (
            rows,
            gate_up[0].reshape(embed, 2 * hidden),
            down[0],
            jnp.repeat(dy, top_k, axis=0),
        )
        best = race(
            {
                "sparse": partial(jax.jit(sparse), *sparse_args),
                "dense": partial(jax.jit(dense), *dense_args),
            },
            turns,
        )
        flops = 3 * 2.0 * tokens * top_k * embed * hidden * 3
        yield Result(
            case=f"moe_layer.{num_experts}",
            seconds=best["sparse"],
            rate=flops / best["sparse"] / 1e9,
            unit="GFLOP/s",
            ratio=best["sparse"] / best["dense"],
            meaning="time over dense matmuls of the same FLOPs, forward and backward",
            rival="dense matmuls of the same shapes and FLOPs",
            target="<= 1.6",
            detail={"dense_seconds": best["dense"]},
        )


def edl_overhead(turns: int = 40) -> Iterator[Result]:
    """A step with the expert divergence term against the same step without, turn by turn."""
    batch = _batch(8, 512)
    with_term = _Stepper(_setup(beta=1e-3), batch)
    without = _Stepper(_setup(beta=0.0), batch)
    found = paired(with_term, without, turns)
    yield Result(
        case="edl_overhead",
        seconds=found.seconds,
        rate=8 * 512 / found.seconds,
        unit="tokens/s",
        ratio=found.ratio,
        meaning=f"time of a step with beta > 0 over beta = 0, median of {turns} pairs",
        rival="the same step without the term",
        target="<= 1.01",
        detail={"without_seconds": found.rival_seconds, "ratio_error": found.error},
    )


def memory_length() -> Iterator[Result]:
    """Temporary memory of a step at 1k, 4k and 16k tokens a row, from XLA's own analysis."""
    setup = _setup()
    state = setup.abstract_state()
    sizes = {}
    for length in (1024, 4096, 16384):
        batch = jax.eval_shape(lambda n=length: _batch(1, n))
        analysis = setup.step.lower(state, batch).compile().memory_analysis()
        sizes[length] = analysis.temp_size_in_bytes / 2**20
    slope = (sizes[16384] - sizes[4096]) / (sizes[4096] - sizes[1024])
    yield Result(
        case="memory_length",
        rate=sizes[16384],
        unit="MiB at 16k",
        ratio=slope / 4,
        meaning="growth from 4k to 16k over four times the growth from 1k to 4k (1 is linear)",
        target="<= 1.1",
        detail={f"{n}_mib": round(size, 1) for n, size in sizes.items()},
    )


def compile_depth() -> Iterator[Result]:
    """Compile time of the step at 4 and at 32 layers."""
    batch = jax.eval_shape(lambda: _batch(2, 256))
    seconds = {}
    for depth in (4, 32, 4, 32):
        setup = _setup(num_layers=depth)
        jax.clear_caches()
        lowered = setup.step.lower(setup.abstract_state(), batch)
        seconds[depth] = min(seconds.get(depth, float("inf")), compiled_seconds(lowered))
    yield Result(
        case="compile_depth",
        seconds=seconds[32],
        ratio=seconds[32] / seconds[4],
        meaning="compile time of 32 layers over 4",
        target="<= 1.3",
        detail={"4_layers_seconds": seconds[4]},
    )


def import_time(turns: int = 5) -> Iterator[Result]:
    """Whole-process time of `import jaxlib_papers`."""
    command = [sys.executable, "-c", "import jaxlib_papers"]
    seconds = min(timed(lambda: subprocess.run(command, check=True)) for _ in range(turns))
    yield Result(
        case="import_time",
        seconds=seconds,
        ratio=seconds,
        meaning="seconds, interpreter included",
        target="<= 2",
    )
