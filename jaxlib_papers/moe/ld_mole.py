"""LD-MoLE: Learnable Dynamic Routing for Mixture of LoRA Experts.

Yuan Zhuang, Yi Shen et al., ICLR 2026, arXiv 2509.25684. Code: eshentw/LD-MoLE.

Every linear layer of a frozen language model gets E LoRA experts and a router. The router is
Sparsegen, a closed-form projection on the simplex whose sparsity is set by a scalar lambda that a
small MLP, shared by all layers of one input width, predicts for each token:

    p = argmin over the simplex of ||p - u||^2 - lambda ||p||^2,
    y = W x + (alpha / r) sum_i p_i B_i A_i x,   lambda = logsigmoid(f(x)) + 1 - eps.

The number of active experts varies by token and layer, is never 0, and all is differentiable
almost everywhere. An analytic penalty bounds it: lambda below `lambda_interval(u, k)[0]` means more
than k active experts.

Here: the projection, its threshold and intervals, the lambda head, the MoLE linear (fused form),
the other routers that the paper compares with, the losses, injection into a model (by shapes or
into a `DecoderLM`), labels for optax, and the loss for a language model.

Reconstructed, since the paper (as far as it was seen) leaves it open: the coefficients of the
tables, warm-up, masks in the penalties, details of the MoLA and ReMoE baselines, and that a local
lambda head serves one input width of one layer.
"""

from __future__ import annotations

from jaxlib_papers.moe._mole_decoder import MoLEProjection, MoLERouting, mole_params, with_mole
from jaxlib_papers.moe._mole_files import load_mole, save_mole
from jaxlib_papers.moe._mole_inject import (
    MoLEConfig,
    MoLEParams,
    inject_mole,
    mola_layout,
    mole_partition,
)
from jaxlib_papers.moe._mole_linear import (
    LambdaHead,
    MoLELinear,
    MoLEOutput,
    adapter_arrays,
    head_arrays,
    mole_delta,
    mole_linear,
)
from jaxlib_papers.moe._mole_losses import (
    dynamic_load_balance,
    lambda_penalty,
    relu_l1_penalty,
    remoe_coefficient_update,
    router_sparsity,
    sparsity_loss,
)
from jaxlib_papers.moe._mole_objective import MoLELossConfig, mole_auxiliary, mole_objective
from jaxlib_papers.moe._mole_routing import (
    Router,
    gate_and_head,
    lambda_head,
    lambda_interval,
    route,
    sparsegen,
    sparsegen_threshold,
    sparsemax,
)
from jaxlib_papers.ops.router import active_experts, router_z_loss

__all__ = [
    "LambdaHead",
    "MoLEConfig",
    "MoLELinear",
    "MoLELossConfig",
    "MoLEOutput",
    "MoLEParams",
    "MoLEProjection",
    "MoLERouting",
    "Router",
    "active_experts",
    "adapter_arrays",
    "dynamic_load_balance",
    "gate_and_head",
    "head_arrays",
    "inject_mole",
    "lambda_head",
    "lambda_interval",
    "lambda_penalty",
    "load_mole",
    "mola_layout",
    "mole_auxiliary",
    "mole_delta",
    "mole_linear",
    "mole_objective",
    "mole_params",
    "mole_partition",
    "relu_l1_penalty",
    "remoe_coefficient_update",
    "route",
    "router_sparsity",
    "router_z_loss",
    "save_mole",
    "sparsegen",
    "sparsegen_threshold",
    "sparsemax",
    "sparsity_loss",
    "with_mole",
]
