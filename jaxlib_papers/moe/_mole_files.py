"""LoRA experts on disk, in safetensors."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from jaxlib_papers.io.adapters import load_arrays, read_settings, save_arrays
from jaxlib_papers.io.errors import FormatError
from jaxlib_papers.moe._mole_inject import MoLEConfig, MoLEParams, inject_mole
from jaxlib_papers.moe._mole_routing import Router

__all__ = ["load_mole", "save_mole"]

_FORMAT = "jaxlib-papers.ld_mole/1"


def _named(params: MoLEParams) -> dict[str, Any]:
    found = {}
    for part, groups in params._asdict().items():
        for group, arrays in groups.items():
            found |= {f"{part}.{group}.{leaf}": array for leaf, array in arrays.items()}
    return found


def save_mole(path: str | os.PathLike[str], params: MoLEParams, cfg: MoLEConfig) -> None:
    """Writes experts, gates and lambda heads, and nothing of the base model.

    Args:
        path: a file ending in .safetensors.
        params: from `mole_params(model)` or training.
        cfg: their configuration; it is stored with them.

    Source: arXiv 2509.25684, what trains; the file's layout is this library's.
    """
    settings = dataclasses.asdict(dataclasses.replace(cfg, router=Router.of(cfg.router)))
    save_arrays(path, _named(params), format=_FORMAT, settings=settings)


def load_mole(path: str | os.PathLike[str], base_params: Any) -> tuple[MoLEParams, MoLEConfig]:
    """Reads what `save_mole` wrote, for the base model that it was trained on.

    Args:
        path: the file.
        base_params: the base model, as for `inject_mole`; only its shapes are looked at.

    Returns:
        (params, configuration), ready for `with_mole`.

    Raises:
        FormatError: no such file, a damaged one, or one for other widths, layers or projections;
            the message names the file and every tensor that differs.

    Source: arXiv 2509.25684, what trains; the file's layout is this library's.
    """
    settings = read_settings(path, _FORMAT)
    try:
        settings["router"] = Router(**settings["router"])
        for name in ("targets", "layout"):
            if isinstance(settings[name], list):
                settings[name] = tuple(settings[name])
        cfg = MoLEConfig(**settings)
        wanted = jax.eval_shape(lambda: inject_mole(base_params, cfg))
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{path}: does not fit this model: {error}") from error
    arrays = load_arrays(path, _named(wanted))
    tree = jax.tree.structure(wanted)
    order = jax.tree.leaves(
        MoLEParams(
            *(
                {
                    group: {leaf: f"{part}.{group}.{leaf}" for leaf in leaves}
                    for group, leaves in groups.items()
                }
                for part, groups in wanted._asdict().items()
            )
        )
    )
    return jax.tree.unflatten(tree, [arrays[name] for name in order]), cfg
