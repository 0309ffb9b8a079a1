"""Does the expert divergence loss make experts specialise by domain?

Two small mixture-of-experts language models that differ in one coefficient: beta = 0 (baseline)
and beta = 1e-2, trained byte by byte on four domains of text (Python sources, English prose, C
headers, tables of numbers), eight sequences of each in a batch. Judged on held-out text, seed by
seed, and again on seeds that played no part in choosing anything.

The paper's language-modelling gain needs its scale and is not claimed here: the loss only must not
get worse.

Paper: Jiaang Li et al., ICLR 2026, arXiv 2603.00054. Exit status 0: reproduced; 3: not reproduced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import harness
from experiments.expert_divergence_data import DOMAINS, CorpusName, corpus, make_batch
from jaxlib_papers.moe.expert_divergence import (
    MoELossConfig,
    domain_router_sums,
    expert_divergence_objective,
    pairwise_js,
    router_permutation_delta_ppl,
    routing_diversity,
    sequence_router_mean,
)
from jaxlib_papers.nn.config import DecoderConfig, MoEConfig
from jaxlib_papers.nn.decoder import DecoderLM
from jaxlib_papers.nn.head import decoder_cross_entropy
from jaxlib_papers.ops.router import expert_counts
from jaxlib_papers.train.optimizer import OptimizerConfig, make_optimizer
from jaxlib_papers.train.state import abstract_model, init_state, merge_model
from jaxlib_papers.train.step import make_train_step

__all__ = ["Config", "judge", "main", "run"]

VARIANTS = ("baseline", "expert divergence")
NUM_DOMAINS = len(DOMAINS)


@dataclasses.dataclass(frozen=True)
class Config:
    """The setting of the experiment; the defaults are those of the judgement."""

    corpus: CorpusName = "science"
    """Files of scikit-learn and numpy, or those that every installation has (`embedded`)."""
    steps: int = 150
    """Training steps of each run."""
    beta: float = 1e-2
    """Coefficient of the expert divergence loss (the baseline has 0)."""
    alpha: float = 1e-2
    """Coefficient of the load-balancing loss, in both variants."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    router_std: float = 0.02
    """The same of the router."""
    experts: int = 8
    """Experts in each layer."""
    top_k: int = 2
    """Experts that each token goes to."""
    width: int = 48
    """Model width; also the width of each expert."""
    layers: int = 2
    """Transformer blocks."""
    context: int = 64
    """Bytes in a sequence."""
    sequences_per_domain: int = 8
    """Training sequences of each of the four domains in a batch."""
    learning_rate: float = 3e-3
    """Peak of AdamW's cosine schedule."""
    warmup: int = 50
    """Warm-up steps."""
    heldout_sequences: int = 256
    """Held-out sequences of each domain."""
    permutations: int = 16
    """Random permutations of the experts over which the rise of the loss is averaged."""

    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=256,
            num_layers=self.layers,
            embed_dim=self.width,
            num_heads=2,
            num_kv_heads=2,
            head_dim=self.width // 2,
            mlp_dim=0,
            max_positions=self.context,
            init_std=self.init_std,
            moe=MoEConfig(
                self.experts, self.top_k, expert_dim=self.width, router_std=self.router_std
            ),
        )

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            warmup_steps=min(self.warmup, self.steps // 2),
            total_steps=self.steps,
            min_lr_ratio=0.0,
        )


def permuted_routers(params: Any, permutations: jax.Array) -> Any:
    """The parameters with expert e of layer l renamed to permutations[l, e] in the router only."""
    order = jnp.argsort(permutations, axis=-1)

    def rename(path, leaf):
        if not any(getattr(key, "key", None) == "router" for key in path):
            return leaf
        return jnp.take_along_axis(leaf, order[:, None, :], axis=-1)

    return jax.tree_util.tree_map_with_path(rename, params)


class Setup:
    """Compiled functions of one configuration; seeds share them."""

    def __init__(self, config: Config):
        self.config = config
        model_config = config.model()
        self.model_fn = lambda key: DecoderLM(model_config, key=key)
        spec = abstract_model(self.model_fn)
        self.optimizer = make_optimizer(config.optimizer(), spec.axes)
        self.steps = {}
        for variant, beta in zip(VARIANTS, (0.0, config.beta), strict=True):
            objective = expert_divergence_objective(
                MoELossConfig(alpha=config.alpha, beta=beta),
                num_domains=NUM_DOMAINS,
                top_k=config.top_k,
            )
            self.steps[variant] = make_train_step(spec.graphdef, objective, self.optimizer)

        def forward(params, batch):
            model = merge_model(spec.graphdef, params)
            out = model(
                batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
            )
            nll, tokens = decoder_cross_entropy(
                model, out.hidden, batch["targets"], batch["loss_mask"]
            )
            return out, nll, tokens

        self.nll = jax.jit(lambda params, batch: forward(params, batch)[1:])
        self.routing = jax.jit(lambda params, batch: self._routing(forward(params, batch), batch))

    def _routing(self, forward, batch) -> dict[str, jax.Array]:
        out, nll, tokens = forward
        domains = batch["domain_ids"][:, 0]
        upper = np.triu_indices(NUM_DOMAINS, 1)

        def of_layer(probs, logits):
            means = sequence_router_mean(probs)
            sums, counts = domain_router_sums(means, domains, NUM_DOMAINS)
            total, inter, _ = routing_diversity(means, domains, NUM_DOMAINS)
            load = jnp.stack(
                [
                    expert_counts(logits, self.config.top_k, batch["loss_mask"] & chosen[:, None])
                    for chosen in (
                        domains[None] == jnp.arange(NUM_DOMAINS, dtype=jnp.int32)[:, None]
                    )
                ]
            )
            return {
                "jsd": jnp.mean(pairwise_js(sums, counts)[upper]),
                "inter": inter,
                "total": total,
                "load": load / jnp.sum(load, axis=-1, keepdims=True),
            }

        layers = [of_layer(p, z) for p, z in zip(out.router_probs, out.router_logits, strict=True)]
        return {"loss": nll / tokens} | jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def run(setup: Setup, variant: str, seed: int) -> dict[str, Any]:
    """Trains one variant with one seed and measures it on the held-out documents."""
    config = setup.config
    train, heldout = corpus(config.corpus)
    state = init_state(setup.model_fn, setup.optimizer, jax.random.key(seed))
    step, curve = setup.steps[variant], []
    for number in range(config.steps):
        # The batch depends on seed and step only: both variants see the same data.
        rng = np.random.default_rng([seed, number])
        batch = make_batch(train, config.sequences_per_domain, config.context, rng)
        state, metrics = step(state, batch)
        curve.append((metrics["lm_loss"], metrics["mean_jsd"]))

    params = state.params
    batch = make_batch(heldout, config.heldout_sequences, config.context, np.random.default_rng(7))
    routing = jax.device_get(setup.routing(params, batch))

    def apply(batch, permutations):
        chosen = params if permutations is None else permuted_routers(params, permutations)
        return setup.nll(chosen, batch)

    ratio = router_permutation_delta_ppl(
        apply,
        batch,
        jax.random.key(seed),
        num_layers=config.layers,
        num_experts=config.experts,
        num_draws=config.permutations,
    )
    share = routing["load"].mean(axis=1)  # domains have equally many tokens
    curve = np.asarray(jax.device_get(curve))
    return {
        "heldout_loss": float(routing["loss"]),
        "mean_jsd": float(routing["jsd"].mean()),
        "inter_over_total": float(np.mean(routing["inter"] / routing["total"])),
        "inter": float(routing["inter"].mean()),
        "permutation_rise": float(np.log(ratio)),
        "max_load": float(share.max() * config.experts),
        "load_by_domain": np.round(routing["load"], 5),
        "train_loss": np.round(curve[:, 0], 5),
        "train_jsd": np.round(curve[:, 1], 6),
    }


def judge(results: dict[str, dict[int, dict]], seeds: tuple[int, ...], whose: str):
    """The five criteria on one set of seeds."""
    base, ours = ([results[variant][seed] for seed in seeds] for variant in VARIANTS)

    def pairs(name: str, digits: int = 3) -> str:
        both = zip(base, ours, strict=True)
        return ", ".join(f"{b[name]:.{digits}f} -> {o[name]:.{digits}f}" for b, o in both)

    def in_every_seed(name: str, factor: float) -> bool:
        both = zip(base, ours, strict=True)
        return all(o[name] >= factor * b[name] and o[name] > b[name] for b, o in both)

    loss = [statistics.fmean(r["heldout_loss"] for r in runs) for runs in (base, ours)]
    ratios = [o["mean_jsd"] / b["mean_jsd"] for b, o in zip(base, ours, strict=True)]
    return [
        harness.Criterion(
            f"{whose}: held-out pairwise JSD at least 4 times the baseline's in every seed",
            in_every_seed("mean_jsd", 4.0),
            f"{pairs('mean_jsd', 4)} (times {', '.join(f'{r:.1f}' for r in ratios)})",
        ),
        harness.Criterion(
            f"{whose}: share of diversity between domains higher in every seed",
            in_every_seed("inter_over_total", 1.0),
            f"{pairs('inter_over_total')} (diversity between domains: {pairs('inter')} nats)",
        ),
        harness.Criterion(
            f"{whose}: loss rises more when experts are permuted, in every seed",
            in_every_seed("permutation_rise", 1.0),
            f"{pairs('permutation_rise')} nats",
        ),
        harness.Criterion(
            f"{whose}: mean held-out loss not worse by more than 0.02 nats",
            loss[1] <= loss[0] + 0.02,
            f"{loss[0]:.4f} -> {loss[1]:.4f} nats ({loss[1] - loss[0]:+.4f})",
        ),
        harness.Criterion(
            f"{whose}: largest expert load at most the baseline's + 1.0 in every seed",
            all(o["max_load"] <= b["max_load"] + 1.0 for b, o in zip(base, ours, strict=True)),
            f"{pairs('max_load', 2)} (1 is balance)",
        ),
    ]


def picture(results: dict[str, dict[int, dict]], seed: int, config: Config) -> Any:
    """Heat maps of one seed, and the divergence over training of all seeds."""
    figure, axes = harness.new_figure(
        2, config.layers + 1, figsize=(3.4 * (config.layers + 1), 5.6), squeeze=False
    )
    loads = {variant: np.asarray(results[variant][seed]["load_by_domain"]) for variant in VARIANTS}
    top = max(load.max() for load in loads.values())
    colours = dict(zip(VARIANTS, ("tab:gray", "tab:red"), strict=True))
    for row, variant in enumerate(VARIANTS):
        for layer in range(config.layers):
            ax = axes[row, layer]
            image = ax.imshow(loads[variant][layer], vmin=0, vmax=top, cmap="magma", aspect="auto")
            ax.set_title(f"{variant}, layer {layer}", fontsize=9)
            ax.set_yticks(range(NUM_DOMAINS), DOMAINS if layer == 0 else [])
            ax.set_xlabel("expert", fontsize=8)
        figure.colorbar(image, ax=axes[row, : config.layers].tolist(), label="share of tokens")
    for variant, runs in results.items():
        for index, result in enumerate(runs.values()):
            label = variant if index == 0 else None
            for ax, name in zip(axes[:, -1], ("train_jsd", "train_loss"), strict=True):
                ax.plot(result[name], color=colours[variant], lw=0.8, label=label)
    axes[0, -1].set_title("mean pairwise JSD (nats), each seed", fontsize=9)
    axes[1, -1].set_title("training loss (nats per byte)", fontsize=9)
    axes[1, -1].set_xlabel("step", fontsize=8)
    axes[0, -1].legend(fontsize=8)
    return figure


def make_report(config: Config, results, seeds: tuple[int, ...], fresh: tuple[int, ...]):
    rows = []
    columns = {
        "JSD (nats)": ("mean_jsd", 4),
        "inter / total": ("inter_over_total", 3),
        "rise, permuted": ("permutation_rise", 3),
        "held-out loss": ("heldout_loss", 4),
        "max load": ("max_load", 2),
    }
    for variant in VARIANTS:
        for name, chosen in (("seeds", seeds), ("fresh seeds", fresh)):
            if chosen:
                runs = [results[variant][seed] for seed in chosen]
                cells = (
                    harness.mean_and_spread([r[key] for r in runs], digits)
                    for key, digits in columns.values()
                )
                rows.append((f"{variant}, {name} {harness.seeds_in_words(chosen)}", *cells))
    criteria = judge(results, seeds, f"seeds {harness.seeds_in_words(seeds)}")
    if fresh:
        criteria += judge(results, fresh, f"fresh seeds {harness.seeds_in_words(fresh)}")
    return harness.Report(
        slug="expert_divergence",
        title=f"Expert divergence: {config.layers} layers x {config.experts} experts, "
        f"{config.steps} steps",
        config={"config": config, "seeds": seeds, "fresh_seeds": fresh},
        columns=("variant", *columns),
        rows=rows,
        criteria=criteria,
        results=results,
        notes=(
            f"Mean and standard deviation over seeds; held-out text of corpus {config.corpus!r}.",
            "The little diversity that the baseline has lies mostly between domains already, so "
            "the share can fall where diversity between domains grows.",
        ),
    )


def main(
    config: Annotated[Config, tyro.conf.arg(name="")] = Config(),
    seeds: tuple[int, ...] = (0, 1, 2),
    fresh_seeds: tuple[int, ...] = (60, 61, 62),
    out: Path = Path("reports/expert_divergence"),
    quick: bool = False,
    rerun: bool = False,
) -> int:
    """Train both variants with every seed, judge them, and write table, JSON and PNG.

    Args:
        config: The setting.
        seeds: Seeds of the judgement.
        fresh_seeds: Seeds that were not looked at while the setting was chosen; judged alike.
        out: Directory of the report.
        quick: Some steps of one seed, to see that everything runs; proves nothing.
        rerun: Train again what an earlier call has finished.

    Returns:
        0 if every criterion held, 3 otherwise.
    """
    if quick:
        config = dataclasses.replace(
            config, steps=min(config.steps, 20), heldout_sequences=16, permutations=1
        )
        seeds, fresh_seeds = seeds[:1], ()
    if not seeds or set(seeds) & set(fresh_seeds):
        raise ValueError(f"seeds={seeds} must not be empty nor share one with {fresh_seeds=}")
    setup = Setup(config)
    results = harness.run_grid(
        functools.partial(run, setup),
        VARIANTS,
        tuple(itertools.chain(seeds, fresh_seeds)),
        config=config,
        cache=harness.ResultCache(None if rerun else out / "runs"),
        say=lambda line: print(line, flush=True),
    )
    report = make_report(config, results, seeds, fresh_seeds)
    harness.write_report(report, out, picture(results, seeds[0], config))
    return 0 if report.passed else 3


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
