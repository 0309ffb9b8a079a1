"""What a pre-training run would need, from shapes alone: nothing is allocated, no device needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from experiments import pretrain_settings
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.partitioning import DEFAULT_RULES, logical_to_spec
from jaxlib_papers.train.flops import count_parameters, flops_per_token
from jaxlib_papers.train.mesh import MeshConfig, abstract_mesh
from jaxlib_papers.train.optimizer import make_optimizer
from jaxlib_papers.train.sharding import describe_shardings, format_rows
from jaxlib_papers.train.state import abstract_model

if TYPE_CHECKING:
    from experiments.pretrain import PretrainFlags
    from experiments.pretrain_settings import Settings

__all__ = ["check_batch_fits", "describe"]


def check_batch_fits(settings: Settings, mesh: Any) -> None:
    """Refuses a batch that the mesh cannot divide, before anything is compiled.

    Raises:
      ValueError: Rows or tokens of a micro-batch are no multiple of their mesh axes.
    """
    shape = (settings.micro_rows, settings.pipeline.seq_len)
    logical_to_spec(
        ("batch", "seq"), shape, DEFAULT_RULES, mesh, name="micro-batch (batch / accum_steps)"
    )


def describe(flags: PretrainFlags) -> str:
    """The plan as text: parameter counts, memory per device, sharding of each parameter.

    Args:
      flags: The command line; ``mesh`` may ask for any number of devices ("auto": those here).

    Raises:
      ValueError: The settings do not fit each other or the mesh.
    """
    settings = pretrain_settings.resolve(flags)
    config = MeshConfig.parse(flags.mesh)
    # A mesh that takes "the rest" can only mean the rest of the devices that are here.
    mesh = abstract_mesh(config, jax.device_count() if -1 in config.sizes else None)
    check_batch_fits(settings, mesh)
    spec = abstract_model(lambda key: DecoderLM(settings.model, key=key))
    opt_state = jax.eval_shape(make_optimizer(settings.optimizer, spec.axes).init, spec.params)

    parameters = describe_shardings(spec.params, spec.axes, mesh)
    moments = describe_shardings(opt_state, spec.axes, mesh, like=spec.params)
    of_params = sum(row.bytes_per_device for row in parameters)
    of_moments = sum(row.bytes_per_device for row in moments)
    # Accumulated gradients are float32 whatever the parameters are.
    accumulated = settings.pipeline.accum_steps > 1
    wide = {"float32": 1, "bfloat16": 2 if accumulated else 1}[settings.model.param_dtype]
    of_grads = of_params * wide

    top_k = settings.model.moe.top_k if settings.model.moe else None
    counts = count_parameters(spec.params, spec.axes, top_k=top_k)
    rows, seq_len = settings.pipeline.global_batch, settings.pipeline.seq_len
    sizes = {axis: size for axis, size in dict(mesh.shape).items() if size > 1}
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    lines = [
        f"preset {flags.preset}, mesh {shape or 'one device'} ({mesh.size} devices)",
        "",
        f"parameters        {counts.total:>18,}   ({_short(counts.total)})",
        f"active per token  {counts.active:>18,}   ({_short(counts.active)})",
        f"tokens per step   {rows * seq_len:>18,}   ({rows} rows x {seq_len})",
        f"FLOPs per token   {flops_per_token(settings.model, seq_len):>18.3e}",
        "",
        "memory per device",
        f"  parameters  {_size(of_params)}",
        f"  optimizer   {_size(of_moments)}",
        f"  gradients   {_size(of_grads)}",
        f"  sum         {_size(of_params + of_moments + of_grads)}   (activations come on top)",
        "",
        format_rows(parameters),
    ]
    return "\n".join(lines)


def _short(count: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.2f}{name}"
    return str(count)


def _size(count: int) -> str:
    return f"{count / 2**30:10.3f} GiB" if count >= 2**27 else f"{count / 2**20:10.3f} MiB"
