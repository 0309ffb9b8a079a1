"""Runs in the rival's environment: transformers on an exported model, a task a line of stdin.

Tasks: "prefill" (512 tokens to logits of the last), "decode" (greedy, 64 new tokens after a short
prompt). Answers with the seconds of one.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers

_NEW, _PREFILL = 64, 512


def main() -> None:
    """Loads the folder, warms up, says what it is, then answers each line."""
    folder = sys.argv[2]
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 2
    long = torch.randint(3, 1000, (1, _PREFILL), generator=torch.Generator().manual_seed(0))
    short = long[:, :16]
    tasks = {
        "prefill": lambda: model(long, logits_to_keep=1),
        "decode": lambda: model.generate(short, max_new_tokens=_NEW, do_sample=False),
    }

    def seconds(name: str) -> float:
        start = time.perf_counter()
        tasks[name]()
        return time.perf_counter() - start

    for name in tasks:
        seconds(name)
    description = (
        f"transformers {transformers.__version__}, {model.config._attn_implementation}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(json.dumps({"description": description}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds(line.strip())}), flush=True)


if __name__ == "__main__":
    main()
