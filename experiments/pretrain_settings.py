"""From flags and preset to the settings of a pre-training run, checked before anything is built."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from experiments.presets import get_preset
from jaxlib_papers.data.pipeline import PipelineConfig
from jaxlib_papers.data.tokenizers import Tokenizer, check_vocabulary, make_tokenizer
from jaxlib_papers.moe.expert_divergence import MoELossConfig
from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.train.loop import LoopConfig
from jaxlib_papers.train.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from experiments.pretrain import ModelFlags, PretrainFlags

__all__ = ["Settings", "parse_weights", "resolve"]

_VOCABULARY_MULTIPLE = 32  # so that a tensor axis of usual size divides it


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does, with nothing left to a default.

    Attributes:
      model: Architecture.
      optimizer: AdamW and its schedule.
      loss: Coefficients of the objective.
      pipeline: Batches.
      loop: Lengths and intervals.
      eval_batches: Held-out batches per domain.
      exact_statistics: Auxiliary losses of the whole batch under accumulation.
      tokenizer: The tokenizer.
      seed: Of initialisation and dropout.
    """

    model: DecoderConfig
    optimizer: OptimizerConfig
    loss: MoELossConfig
    pipeline: PipelineConfig
    loop: LoopConfig
    eval_batches: int
    exact_statistics: bool
    tokenizer: Tokenizer
    seed: int

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch over all devices."""
        return self.pipeline.global_batch // self.pipeline.accum_steps

    def identity(self, corpus_fingerprint: str) -> dict[str, Any]:
        """What has to be equal for a run to be resumed: all that decides its numbers.

        Mesh, intervals of reports, read-ahead and recomputation may change between attempts.
        """
        model = dataclasses.asdict(self.model)
        pipeline = dataclasses.asdict(self.pipeline)
        model.pop("remat")
        for name in ("num_threads", "prefetch", "vocab_size"):
            pipeline.pop(name)
        return {
            "model": model,
            "optimizer": dataclasses.asdict(self.optimizer),
            "loss": dataclasses.asdict(self.loss) | {"exact_statistics": self.exact_statistics},
            "data": pipeline | {"corpus": corpus_fingerprint},
            "tokenizer": self.tokenizer.fingerprint,
            "seed": self.seed,
        }


def resolve(flags: PretrainFlags) -> Settings:
    """Fills in the preset's defaults and checks that the parts fit each other.

    Args:
      flags: The command line.

    Returns:
      The settings.

    Raises:
      ValueError: Unknown preset, or a value that is out of range or does not fit another; the
        message names the flag's field and what to do.
    """
    preset = get_preset(flags.preset)
    data, train, report = flags.data, flags.train, flags.report

    def pick(given: Any, default: Any) -> Any:
        return default if given is None else given

    tokenizer = make_tokenizer(data.tokenizer)
    rows = -(-tokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    vocab_size = pick(flags.model.vocab_size, pick(preset.vocab_size, rows))
    check_vocabulary(tokenizer, vocab_size)
    model = _model(preset.model, flags.model, vocab_size)
    seq_len = pick(data.seq_len, preset.seq_len)
    if seq_len > model.max_positions:
        raise ValueError(
            f"seq_len: got {seq_len}, but the model has max_positions={model.max_positions}; "
            f"use --seq-len {model.max_positions} or --max-positions {seq_len}"
        )
    steps = pick(train.steps, preset.steps)
    if steps < 1:
        raise ValueError(f"steps: got {steps}, expected at least 1")
    eval_batches = pick(report.eval_batches, preset.eval_batches)
    if eval_batches < 1:
        raise ValueError(f"eval_batches: got {eval_batches}, expected at least 1")
    return Settings(
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=pick(train.learning_rate, preset.learning_rate),
            warmup_steps=pick(train.warmup_steps, min(preset.warmup_steps, steps // 10)),
            total_steps=steps,
            schedule=train.schedule,
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
        ),
        loss=MoELossConfig(
            alpha=pick(train.alpha, preset.alpha),
            beta=pick(train.beta, preset.beta),
            gamma_z=train.gamma_z,
        ),
        pipeline=PipelineConfig(
            seq_len=seq_len,
            global_batch=pick(data.batch, preset.batch),
            accum_steps=data.accum_steps,
            weights=parse_weights(data.weights),
            seed=train.seed,
            chunks_per_row=data.chunks_per_row,
            vocab_size=vocab_size,
        ),
        loop=LoopConfig(
            total_steps=steps,
            log_every=pick(report.log_every, preset.log_every),
            eval_every=pick(report.eval_every, preset.eval_every),
            save_every=pick(report.save_every, preset.save_every),
            max_skipped_in_a_row=report.max_skipped,
        ),
        eval_batches=eval_batches,
        exact_statistics=train.exact_statistics,
        tokenizer=tokenizer,
        seed=train.seed,
    )


def _model(config: DecoderConfig, flags: ModelFlags, vocab_size: int) -> DecoderConfig:
    renamed = {"layers": "num_layers", "dtype": "compute_dtype"}
    of_experts = ("num_experts", "top_k", "receive_factor")
    given = {k: v for k, v in dataclasses.asdict(flags).items() if v is not None}
    given.pop("vocab_size", None)
    experts = {name: given.pop(name) for name in of_experts if name in given}
    changes: dict[str, Any] = {renamed.get(name, name): value for name, value in given.items()}
    if experts:
        assert config.moe is not None, "all presets are sparse"
        changes["moe"] = dataclasses.replace(config.moe, **experts)
    return dataclasses.replace(config, vocab_size=vocab_size, **changes)


def parse_weights(text: str | None) -> dict[str, float] | None:
    """Reads ``"code=2,prose=1"``.

    Raises:
      ValueError: The text is not of that form.
    """
    if text is None:
        return None
    weights = {}
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"weights: got {part.strip()!r}, expected domain=number,domain=number")
    return weights
