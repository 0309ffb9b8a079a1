"""Trains a tiny language model in parts, each from the checkpoint of the part before.

Arguments: folder with text, cache folder, parts as JSON (a list of objects with `mesh`, `directory`
and `steps`), then those of the harness. A part takes up the last checkpoint of its directory if
there is one, and writes one at its end. Prints a list of what each part did: its first step, the
losses, a hash of each global batch, and (where one process holds it all) a hash of the whole state.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json

import jax
import numpy as np

ROWS, SEQ = 8, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("cache")
    parser.add_argument("parts", type=json.loads)
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.processes, args.process)

    # Only now: nothing may use a device before the processes know each other.
    from jax.experimental import multihost_utils

    from jaxlib_papers.data import make_pipeline, open_corpus
    from jaxlib_papers.data.pipeline import PipelineConfig
    from jaxlib_papers.data.tokenizers import ByteTokenizer
    from jaxlib_papers.moe.expert_divergence import MoELossConfig, expert_divergence_objective
    from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
    from jaxlib_papers.nn.decoder import DecoderLM
    from jaxlib_papers.train.checkpoint import Checkpointer
    from jaxlib_papers.train.mesh import host_slot, make_mesh, to_global
    from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
    from jaxlib_papers.train.state import abstract_model, abstract_state, init_state
    from jaxlib_papers.train.step import make_train_step

    corpus = open_corpus(f"text:{args.text}", cache_dir=args.cache)
    tokenizer = ByteTokenizer()
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=16)
    config = DecoderConfig(
        vocab_size=288,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        moe=moe,
        dropout=0.1,
    )

    def model(key: jax.Array) -> DecoderLM:
        return DecoderLM(config, key=key)

    spec = abstract_model(model)
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1e-2, warmup_steps=2, total_steps=20), spec.axes
    )
    objective = expert_divergence_objective(
        MoELossConfig(alpha=1e-2, beta=1e-2), num_domains=len(corpus.domains), top_k=moe.top_k
    )

    @functools.cache
    def program(text: str):
        size = np.prod([int(part.split("=")[1]) for part in text.split(",")])
        mesh = make_mesh(text, jax.devices()[:size])
        return mesh, make_train_step(spec.graphdef, objective, optimizer, mesh=mesh, seed=3)

    def train(part: dict) -> dict:
        mesh, step = program(part["mesh"])
        index, count = host_slot(mesh) if args.processes > 1 else (0, 1)
        pipeline = make_pipeline(
            corpus,
            tokenizer,
            PipelineConfig(seq_len=SEQ, global_batch=ROWS, seed=5),
            process_index=index,
            process_count=count,
        )
        data, losses, hashes = pipeline.iterator(), [], []
        with Checkpointer(part["directory"]) as saved:
            first = saved.latest_step() or 0
            if first:
                restored = saved.restore(abstract_state(model, optimizer, mesh=mesh))
                state = restored.state
                data.set_state(restored.data_state)
            else:
                state = init_state(model, optimizer, jax.random.key(0), mesh=mesh)
            for _ in range(part["steps"]):
                batch = to_global(next(data), mesh)
                tokens = batch["tokens"]
                if args.processes > 1:
                    tokens = multihost_utils.process_allgather(tokens, tiled=True)
                hashes.append(hashlib.sha256(np.asarray(tokens).tobytes()).hexdigest()[:16])
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
            saved.save(first + part["steps"], state, data_state=data.get_state())
        digest = ""
        if args.processes == 1:
            whole = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
            digest = hashlib.sha256(whole).hexdigest()
        return {"first": first, "losses": losses, "batches": hashes, "digest": digest}

    print(json.dumps([train(part) for part in args.parts]))


if __name__ == "__main__":
    main()
