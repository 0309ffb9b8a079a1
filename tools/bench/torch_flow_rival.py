"""Runs in the rival's environment: flows as PyTorch packages formulate them, timed turn by turn.

Two cases, each written from its definition: the fit of a conditional affine RealNVP, and forward
plus gradient of a rational-quadratic spline with search, gather and masked assignment.
"""

from __future__ import annotations

import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional

_ROWS, _STEPS, _BATCH = 1200, 600, 256


class _Coupling(nn.Module):
    """One affine coupling on masked input."""

    def __init__(self, dim: int, context: int, hidden: int, parity: int):
        super().__init__()
        keep = (torch.arange(dim) + parity) % 2 == 0
        self.register_buffer("keep", keep.float())
        self.net = nn.Sequential(
            nn.Linear(dim + context, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 2 * dim),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, y, x):
        raw, shift = self.net(torch.cat([y * self.keep, x], dim=-1)).chunk(2, dim=-1)
        moved = 1 - self.keep
        scale = 2 * torch.tanh(raw / 2) * moved
        return y * torch.exp(scale) + shift * moved, scale.sum(-1)


class Fit:
    """600 steps of Adam with a cosine schedule and clipping, batch 256."""

    def __init__(self, layers: int = 6, hidden: int = 64):
        torch.manual_seed(0)
        self.layers, self.hidden = layers, hidden
        self.x = torch.rand(_ROWS, 1) * 2 - 1
        self.y = torch.randn(_ROWS, 2)
        self.description = f"torch {torch.__version__}, {torch.get_num_threads()} threads, eager"

    def __call__(self) -> float:
        flow = nn.ModuleList([_Coupling(2, 1, self.hidden, i) for i in range(self.layers)])
        optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3, foreach=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        start = time.perf_counter()
        for _ in range(_STEPS):
            rows = torch.randint(0, _ROWS, (_BATCH,))
            z, x = self.y[rows], self.x[rows]
            total = torch.zeros(_BATCH)
            for layer in flow:
                z, logdet = layer(z, x)
                total = total + logdet
            loss = (0.5 * (z**2).sum(-1) + math.log(2 * math.pi) - total).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(flow.parameters(), 5.0, foreach=True)
            optimizer.step()
            schedule.step()
        return time.perf_counter() - start


def spline(x, widths, heights, slopes, bound: float):
    """Monotone rational-quadratic spline with linear tails: search for the bin, gather, assign."""
    inside = (x >= -bound) & (x <= bound)
    y, logdet = torch.zeros_like(x), torch.zeros_like(x)
    y[~inside] = x[~inside]
    edge = math.log(math.expm1(1 - 1e-3))
    slopes = functional.pad(slopes, (1, 1), value=edge)
    v, w, h, d = x[inside], widths[inside], heights[inside], slopes[inside]
    bins = w.shape[-1]

    def knots(raw):
        share = 1e-3 + (1 - 1e-3 * bins) * torch.softmax(raw, dim=-1)
        at = functional.pad(torch.cumsum(share, dim=-1), (1, 0)) * 2 * bound - bound
        return at, at[..., 1:] - at[..., :-1]

    xs, w = knots(w)
    ys, h = knots(h)
    d = 1e-3 + functional.softplus(d)
    index = torch.searchsorted(xs.detach()[..., 1:-1].contiguous(), v[..., None], right=True)
    x0, y0, w, h = (t.gather(-1, index)[..., 0] for t in (xs, ys, w, h))
    left, right = d.gather(-1, index)[..., 0], d.gather(-1, index + 1)[..., 0]
    mean, theta = h / w, (v - x0) / w
    mixed = theta * (1 - theta)
    below = mean + (left + right - 2 * mean) * mixed
    y[inside] = y0 + h * (mean * theta**2 + left * mixed) / below
    slope = mean**2 * (right * theta**2 + 2 * mean * mixed + left * (1 - theta) ** 2)
    logdet[inside] = torch.log(slope) - 2 * torch.log(below)
    return y, logdet


class Spline:
    """Forward and gradient at [65536, 8] with 8 bins."""

    def __init__(self):
        torch.manual_seed(0)
        self.arrays = [
            (scale * torch.randn(65536, 8, *bins)).requires_grad_()
            for scale, bins in ((2.0, ()), (1.0, (8,)), (1.0, (8,)), (1.0, (7,)))
        ]
        self.description = f"torch {torch.__version__}, {torch.get_num_threads()} threads, eager"

    def __call__(self) -> float:
        start = time.perf_counter()
        y, logdet = spline(*self.arrays, 5.0)
        torch.autograd.grad((y**2).sum() + logdet.sum(), self.arrays)
        return time.perf_counter() - start


def main() -> None:
    """Warms up, says what it is, then answers each line with the seconds of one turn."""
    case = {"flow_fit": Fit, "spline": Spline}[sys.argv[1]]()
    case()
    print(json.dumps({"description": case.description}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": case()}), flush=True)


if __name__ == "__main__":
    main()
