"""The decoder once more in NumPy and float64: loops over layers, heads, queries and experts."""

from __future__ import annotations

import numpy as np
from flax import nnx

from jaxlib_papers.nn.config import DecoderConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.ops.rope import rope_frequencies


def parameters(model: DecoderLM) -> dict[str, np.ndarray]:
    """Float64 parameters by dotted path; those of the layers are stacked."""
    flat = nnx.to_flat_state(nnx.split(model)[1])
    return {".".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in flat}


def norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def turn(x, positions, config):
    """Rotary embedding of [seq, heads, dim]."""
    frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    z = x[..., : config.head_dim // 2] + 1j * x[..., config.head_dim // 2 :]
    z = z * factor * np.exp(1j * positions[:, None, None] * frequencies)
    return np.concatenate([z.real, z.imag], -1)


def attend(p, x, positions, segments, config: DecoderConfig):
    """Self-attention of one row, query by query."""
    parts = {}
    for name in ("query", "key", "value"):
        parts[name] = np.einsum("td,dhk->thk", x, p[name])
        if config.attention_bias:
            parts[name] = parts[name] + p[f"{name}_bias"]
    if config.qk_norm:
        for name in ("query", "key"):
            parts[name] = norm(parts[name], p[f"{name}_norm.scale"], config.norm_eps)
    q, k = (turn(parts[name], positions, config) for name in ("query", "key"))
    out = np.zeros_like(q)
    group = config.num_heads // config.num_kv_heads
    for t in range(len(x)):
        start = 0 if config.sliding_window is None else max(0, t + 1 - config.sliding_window)
        seen = [s for s in range(start, t + 1) if segments[s] == segments[t]]
        for head in range(config.num_heads):
            logits = k[seen, head // group] @ q[t, head] / np.sqrt(config.head_dim)
            if config.attention_softcap is not None:
                cap = config.attention_softcap
                logits = cap * np.tanh(logits / cap)
            out[t, head] = softmax(logits) @ parts["value"][seen, head // group]
    y = np.einsum("thk,hkd->td", out, p["out"])
    return y + p["out_bias"] if config.attention_bias else y


def feed_forward(p, x, prefix=""):
    gate, up, down = (p[prefix + name] for name in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


def mixture(p, x, moe):
    """One token and one expert at a time; returns the result and the router's logits."""
    logits = x @ p["router"]
    y = np.zeros_like(x)
    for t, probs in enumerate(softmax(logits)):
        chosen = np.argsort(-probs, kind="stable")[: moe.top_k]
        total = probs[chosen].sum() if moe.renormalize else 1.0
        for e in chosen:
            gate, up = x[t] @ p["gate_up"][e, :, 0], x[t] @ p["gate_up"][e, :, 1]
            y[t] += probs[e] / total * ((silu(gate) * up) @ p["down"][e])
    if moe.shared_expert_dim:
        y = y + feed_forward(p, x, "shared.")
    return y, logits


def below(p, prefix, layer):
    return {n[len(prefix) :]: v[layer] for n, v in p.items() if n.startswith(prefix)}


def forward(model: DecoderLM, tokens, positions, segments):
    """Final hidden states [batch, seq, dim], router logits [layers, batch, seq, experts] or []."""
    config, p = model.config, parameters(model)
    hidden, routers = [], []
    for row, position, segment in zip(tokens, positions, segments, strict=True):
        x, logits = p["embedding"][row], []
        for layer in range(config.num_layers):
            here = below(p, "layers.", layer)

            def inner(name, here=here):
                return {n[len(name) :]: v for n, v in here.items() if n.startswith(name)}

            y = norm(x, here["attention_norm.scale"], config.norm_eps)
            x = x + attend(inner("attention."), y, position, segment, config)
            y = norm(x, here["feed_forward_norm.scale"], config.norm_eps)
            if config.moe is None:
                x = x + feed_forward(inner("feed_forward."), y)
            else:
                y, router = mixture(inner("feed_forward."), y, config.moe)
                x = x + y
                logits.append(router)
        hidden.append(norm(x, p["final_norm.scale"], config.norm_eps))
        routers.append(logits)
    return np.stack(hidden), np.swapaxes(np.array(routers), 0, 1)
