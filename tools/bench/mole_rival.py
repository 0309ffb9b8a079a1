"""Runs in the rival's environment: a routing step in PyTorch, or a LoRA step of PEFT.

First argument "routing" (tokens, experts, width, hidden) or "lora" (folder, rows, length, rank);
answers each line of stdin with the seconds of one step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch


def _by_sorting(u: torch.Tensor, lam: torch.Tensor, eps: float = 1e-2) -> torch.Tensor:
    """Sparsegen as its paper states it: sort, running sums, support size, threshold; autograd."""
    slack = (1 - lam)[:, None]
    ranked, _ = torch.sort(u, dim=-1, descending=True)
    sums = torch.cumsum(ranked, dim=-1)
    rank = torch.arange(1, u.shape[-1] + 1, dtype=u.dtype)[None]
    support = (slack + rank * ranked > sums).sum(-1, keepdim=True).clamp(min=1)
    total = torch.gather(sums, -1, support - 1)
    tau = (total - slack) / support
    return torch.clamp(u - tau, min=0) / torch.clamp(slack, min=eps)


def _routing(tokens: int, experts: int, width: int, hidden: int) -> Callable[[], None]:
    torch.manual_seed(0)
    x = torch.randn(tokens, width, requires_grad=True)
    gate = torch.nn.Linear(width, experts, bias=False)
    head = torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
    )
    g = torch.randn(tokens, experts)
    leaves = [x, *gate.parameters(), *head.parameters()]

    def step() -> None:
        lam = torch.nn.functional.logsigmoid(head(x)[:, 0]) + 0.99
        torch.autograd.grad(_by_sorting(gate(x).float(), lam.float()), leaves, g)

    return step


def _lora(folder: str, rows: int, length: int, rank: int) -> tuple[str, Callable[[], None]]:
    import peft
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    names = [f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0)
    model = peft.get_peft_model(model, config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    tokens = torch.randint(3, 1000, (rows, length))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return f"transformers {transformers.__version__}, PEFT {peft.__version__}", step


def main() -> None:
    """Warms up, says what it is, then answers each line with the seconds of one step."""
    case, *options = sys.argv[1:]
    if case == "routing":
        name, step = "sort-based form under autograd", _routing(*map(int, options))
    else:
        name, step = _lora(options[0], *map(int, options[1:]))
    for _ in range(2):
        step()
    description = f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(json.dumps({"description": description}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
