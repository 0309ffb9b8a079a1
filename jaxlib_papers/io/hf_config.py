"""config.json of Llama, Qwen3 and Qwen3-MoE, as transformers 4 and 5 write it, and back.

Version 4 keeps ``rope_theta`` and ``rope_scaling`` at the top, version 5 puts both into
``rope_parameters``, once more nested by layer type in some models. A setting that is not understood
is an error: a default in its place gives a model that speaks, and wrongly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.io.limits import MAX_HEAD_DIM, MAX_LAYERS
from jaxlib_papers.nn.config import DecoderConfig, MoEConfig, RopeScaling

__all__ = ["ARCHITECTURES", "config_from_json", "config_to_json"]

ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""model_type of the families that can be read, with the class that transformers has for each."""

# What these families' classes assume where the file says nothing.
_DEFAULT_THETA = 1e4
_DEFAULT_EPS = 1e-6


def _is_sane(value: float) -> bool:
    """No number of a model is larger; host arrays are made of some of them."""
    return math.isfinite(value) and abs(value) < 2**40


class _Reader:
    """A config.json whose errors name the file and the setting."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.where}: {what}")

    def number(self, name: str, default: Any = None, *, kind: type = int) -> Any:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{name} is missing")
        allowed = (int,) if kind is int else (int, float)
        wanted = "an integer" if kind is int else "a finite number"
        if isinstance(value, bool) or not isinstance(value, allowed) or not _is_sane(value):
            raise self.fail(f"{name} is {value!r}, expected {wanted}")
        return kind(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{name} is {value!r}, expected true or false")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """An error if the setting is there with a value that changes the model."""
        value = self.config.get(name)
        if value is not None and value not in allowed:
            raise self.fail(f"{name} is {value!r}, which is not implemented (only {allowed[0]!r})")


def _layer_types(reader: _Reader) -> list[str] | None:
    kinds = reader.config.get("layer_types")
    if kinds is None or (isinstance(kinds, list) and all(isinstance(k, str) for k in kinds)):
        return kinds
    raise reader.fail(f"layer_types are {str(kinds)[:80]}, expected a list of names")


def _rope(reader: _Reader, max_positions: int) -> tuple[float, RopeScaling | None]:
    config = reader.config
    parameters = config.get("rope_parameters")
    theta = config.get("rope_theta")
    if parameters is None:
        parameters = config.get("rope_scaling")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise reader.fail(f"rope parameters are {parameters!r}, expected an object")
    nested = [v for v in parameters.values() if isinstance(v, Mapping)]
    if nested:
        kinds = _layer_types(reader) or list(parameters)
        chosen = [parameters.get(kind) for kind in sorted(set(kinds))]
        if any(not isinstance(entry, Mapping) for entry in chosen):
            raise reader.fail("rope_parameters have no entry for some of layer_types")
        if any(entry != chosen[0] for entry in chosen):
            raise reader.fail(
                "rope_parameters differ between layer types, which is not implemented"
            )
        parameters = chosen[0]
    if parameters.get("rope_theta") is not None:
        theta = parameters["rope_theta"]
    theta = _DEFAULT_THETA if theta is None else theta
    if (
        isinstance(theta, bool)
        or not isinstance(theta, int | float)
        or not (theta > 1 and math.isfinite(theta))
    ):
        raise reader.fail(f"rope_theta is {theta!r}, expected a number > 1")
    return float(theta), _scaling(_Reader(parameters, f"{reader.where}: rope"), max_positions)


def _scaling(reader: _Reader, max_positions: int) -> RopeScaling | None:
    parameters = reader.config
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    reader.require("partial_rotary_factor", 1, 1.0)
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise reader.fail(
            f"scaling type {kind!r} is not implemented; expected default, linear, llama3 or yarn"
        )
    reader.require("mscale", None)
    reader.require("mscale_all_dim", None)
    factor = reader.number("factor", kind=float)
    if kind == "linear":
        return _made(reader, kind="linear", factor=factor)
    original = reader.number("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low = reader.number("low_freq_factor", kind=float)
        high = reader.number("high_freq_factor", kind=float)
        return _made(
            reader,
            kind="llama3",
            factor=factor,
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    attention = parameters.get("attention_factor")
    return _made(
        reader,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=_positive(reader, "beta_fast", 32.0),
        beta_slow=_positive(reader, "beta_slow", 1.0),
        attention_factor=None
        if attention is None
        else reader.number("attention_factor", kind=float),
        truncate=reader.flag("truncate", True),
    )


def _positive(reader: _Reader, name: str, default: float) -> float:
    value = reader.number(name, default, kind=float)
    if not value > 0:
        raise reader.fail(f"{name} is {value}, expected a number > 0")
    return value


def _made(reader: _Reader, **values: Any) -> RopeScaling:
    try:
        return RopeScaling(**values)
    except ValueError as error:
        raise reader.fail(str(error)) from error


def _window(reader: _Reader, num_layers: int) -> int | None:
    config = reader.config
    window = config.get("sliding_window")
    kinds = _layer_types(reader)
    if kinds is None and config.get("use_sliding_window") and window is not None:
        # In version 4 the first max_window_layers layers see everything.
        whole = min(reader.number("max_window_layers", num_layers), num_layers)
        kinds = ["full_attention"] * whole + ["sliding_attention"] * (num_layers - whole)
    kinds = set(kinds or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise reader.fail(
            f"layer_types hold {sorted(kinds)}; only one kind of attention in all layers "
            "is implemented"
        )
    return reader.number("sliding_window") if "sliding_attention" in kinds else None


def _mixture(reader: _Reader) -> MoEConfig:
    reader.require("decoder_sparse_step", 1)
    reader.require("mlp_only_layers", [])
    # Version 5 writes the second name and reads both.
    name = "num_experts" if reader.config.get("num_experts") is not None else "num_local_experts"
    return MoEConfig(
        num_experts=reader.number(name),
        top_k=reader.number("num_experts_per_tok"),
        expert_dim=reader.number("moe_intermediate_size"),
        renormalize=reader.flag("norm_topk_prob"),
    )


def config_from_json(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The decoder that a config.json of Hugging Face describes.

    Args:
      config: The file's object, of either style.
      where: The file, for messages.

    Raises:
      FormatError: An architecture, rope scaling or other setting that is not implemented, a missing
        or impossible number.
    """
    reader = _Reader(config, where)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise reader.fail(
            f"model_type is {kind!r}, expected one of {', '.join(ARCHITECTURES)}; other "
            "architectures have to be converted by hand (io.names)"
        )
    if config.get("quantization_config") is not None:
        raise reader.fail("the weights are quantised (quantization_config); save them unquantised")
    reader.require("hidden_act", "silu", "swish")
    reader.require("mlp_bias", False)
    reader.require("partial_rotary_factor", 1, 1.0)
    sparse = kind == "qwen3_moe"
    embed, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    layers = reader.number("num_hidden_layers")
    positions = reader.number("max_position_embeddings")
    if heads < 1 or (config.get("head_dim") is None and embed % heads):
        raise reader.fail(f"hidden_size {embed} is no multiple of num_attention_heads {heads}")
    head_dim = reader.number("head_dim", embed // heads)
    for name, value, most in (
        ("num_hidden_layers", layers, MAX_LAYERS),
        ("head_dim", head_dim, MAX_HEAD_DIM),
    ):
        if not 1 <= value <= most:
            raise reader.fail(f"{name} is {value}, expected 1..{most}")
    theta, scaling = _rope(reader, positions)
    try:
        return DecoderConfig(
            vocab_size=reader.number("vocab_size"),
            num_layers=layers,
            embed_dim=embed,
            num_heads=heads,
            num_kv_heads=reader.number("num_key_value_heads", heads),
            head_dim=head_dim,
            mlp_dim=0 if sparse else reader.number("intermediate_size"),
            max_positions=positions,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=reader.number("rms_norm_eps", _DEFAULT_EPS, kind=float),
            qk_norm=kind != "llama",
            tie_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=reader.flag("attention_bias"),
            sliding_window=None if kind == "llama" else _window(reader, layers),
            moe=_mixture(reader) if sparse else None,
        )
    except FormatError:
        raise
    except ValueError as error:
        raise reader.fail(str(error)) from error


def _rope_to_json(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        out["low_freq_factor"] = scaling.low_freq_factor
        out["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        out |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        out["truncate"] = scaling.truncate
        if scaling.attention_factor is not None:
            out["attention_factor"] = scaling.attention_factor
    if scaling.kind != "linear":
        out["original_max_position_embeddings"] = scaling.original_max_positions
    return out


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder, readable by transformers 4 and 5.

    Args:
      config: The decoder's configuration.

    Raises:
      ValueError: The decoder has something that none of Llama, Qwen3 and Qwen3-MoE has.
    """
    for name in ("attention_softcap", "logit_softcap"):
        if getattr(config, name) is not None:
            raise ValueError(f"config.{name} is set; Llama, Qwen3 and Qwen3-MoE have none")
    kind = "qwen3_moe" if config.moe else "qwen3" if config.qk_norm else "llama"
    if config.moe is not None and not config.qk_norm:
        raise ValueError("config.moe is set and qk_norm is not; a Qwen3-MoE has both")
    if config.sliding_window is not None and kind == "llama":
        raise ValueError("config.sliding_window is set and qk_norm is not; Llama has no window")
    rope = _rope_to_json(config)
    dtype = config.param_dtype
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim or (config.moe.expert_dim if config.moe else 0),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "initializer_range": config.init_std,
        # Version 4 reads the first two, version 5 the third.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if kind != "llama":
        window = config.sliding_window
        layer = "full_attention" if window is None else "sliding_attention"
        out |= {"use_sliding_window": window is not None, "sliding_window": window}
        out |= {"max_window_layers": config.num_layers if window is None else 0}
        out |= {"layer_types": [layer] * config.num_layers}
    if config.moe is not None:
        moe = dataclasses.asdict(config.moe)
        if moe["capacity_factor"] is not None:
            raise ValueError(
                "config.moe.capacity_factor drops tokens, a Qwen3-MoE drops none; replace it by "
                "None"
            )
        out |= {
            "num_experts": moe["num_experts"],
            "num_experts_per_tok": moe["top_k"],
            "moe_intermediate_size": moe["expert_dim"],
            "norm_topk_prob": moe["renormalize"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return out
