"""Cases about running a real language model: SmolLM2-135M-Instruct, float32, batch 1."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.pretrained import find_model, load_pretrained, save_pretrained
from jaxlib_papers.nn.generate import generate, prefill, unstack_layers
from tools.bench.rival import Rival
from tools.bench.timing import Result, timed

__all__ = ["language_model"]

_NEW, _PREFILL = 64, 512


def language_model(turns: int = 5) -> Iterator[Result]:
    """Loading, prefill of 512 tokens and greedy decoding of 64, against transformers in turns."""
    try:
        path = find_model("smollm2")
    except FormatError as error:
        yield Result(case="language_model", rival=f"not run: {error}")
        return
    best = {"load": float("inf")}
    for _ in range(2):
        seconds = timed(lambda: load_pretrained(path).model)
        best["load"] = min(best["load"], seconds)
    yield Result(
        case="language_model.load",
        seconds=best["load"],
        ratio=best["load"],
        meaning="seconds from a GGUF file to float32 parameters and tokenizer",
        target="<= 12",
    )
    model, _, tokenizer = load_pretrained(path)
    run = jax.jit(prefill, static_argnames="slots")
    long = np.random.default_rng(0).integers(3, 1000, (1, _PREFILL)).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_pretrained(folder, model, tokenizer)
        fast = unstack_layers(model)
        tasks = {
            "prefill": lambda: run(fast, long, slots=_PREFILL),
            "decode": lambda: generate(fast, long[:, :16], max_new_tokens=_NEW),
        }
        for task in tasks.values():
            jax.block_until_ready(task())
        rival = stack.enter_context(Rival("language_model", script="lm_rival.py", options=[folder]))
        ours = dict.fromkeys(tasks, float("inf"))
        theirs = dict(ours)
        for _ in range(turns):
            for name, task in tasks.items():
                ours[name] = min(ours[name], timed(task))
                if rival.ready:
                    theirs[name] = min(theirs[name], rival.turn(name))
        tokens = {"prefill": _PREFILL, "decode": _NEW}
        for name, target in (("prefill", ">= 1.0"), ("decode", ">= 1.5")):
            yield Result(
                case=f"language_model.{name}",
                seconds=ours[name],
                rate=tokens[name] / ours[name],
                unit="tokens/s",
                ratio=theirs[name] / ours[name] if rival.ready else None,
                meaning="tokens/s over the rival's",
                rival=rival.description,
                target=target,
                detail={"rival_seconds": theirs[name] if rival.ready else None},
            )
