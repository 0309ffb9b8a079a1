"""Runs in the rival's environment: one training step of transformers' Qwen3-MoE a line of stdin.

Takes the fastest of the library's expert implementations on this machine.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

_ROWS, _LENGTH, _VOCAB = 8, 512, 8192


class _Step:
    def __init__(self, experts: str):
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=_VOCAB,
            hidden_size=256,
            intermediate_size=256,
            moe_intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=16,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            output_router_logits=True,
            router_aux_loss_coef=1e-3,
            max_position_embeddings=_LENGTH,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
        config._experts_implementation = experts
        self.model = Qwen3MoeForCausalLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)
        self.tokens = torch.randint(0, _VOCAB, (_ROWS, _LENGTH))

    def __call__(self) -> float:
        start = time.perf_counter()
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def _fastest() -> tuple[str, _Step]:
    seconds, steps = {}, {}
    # Not "batched_mm": it copies the weights of an expert for every token, 6 GiB here.
    for name in ("eager", "grouped_mm"):
        try:
            step = _Step(name)
            step()
            seconds[name] = min(step(), step())
        except (NotImplementedError, RuntimeError, ValueError, KeyError) as error:
            print(f"experts implementation {name}: {error}", file=sys.stderr)
            continue
        steps[name] = step
    best = min(seconds, key=seconds.get)
    return best, steps[best]


def main() -> None:
    """Warms up, says what it is, then answers each line with the seconds of one step."""
    name, step = _fastest()
    description = (
        f"transformers {transformers.__version__} Qwen3-MoE, experts={name}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(json.dumps({"description": description}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": step()}), flush=True)


if __name__ == "__main__":
    main()
