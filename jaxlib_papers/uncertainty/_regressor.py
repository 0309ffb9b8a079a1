"""`JapanRegressor`: density, score and threshold as one estimator with scikit-learn habits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxlib_papers.nn.flows.autoregressive import ConditionalMAF
from jaxlib_papers.nn.flows.base import Flow, StandardisedFlow
from jaxlib_papers.nn.flows.training import FitConfig, fit_flow
from jaxlib_papers.nn.flows.trajectory import TrajectoryFlow
from jaxlib_papers.ops.checks import as_float
from jaxlib_papers.ops.conformal import conformal_threshold
from jaxlib_papers.uncertainty import _scores
from jaxlib_papers.uncertainty._habits import FLOWS
from jaxlib_papers.uncertainty._region_queries import RegionQueries
from jaxlib_papers.uncertainty._volumes import NotCalibratedError, score_rows

__all__ = ["JapanRegressor"]


class _Linear:
    """Least squares with an intercept, the base predictor where none is given."""

    def __init__(self, x: Array, y: Array):
        design = jnp.concatenate([jnp.ones_like(x[:, :1]), x], axis=1)
        self.weights = jnp.linalg.lstsq(design, y)[0]

    def __call__(self, x: Array) -> Array:
        return jnp.concatenate([jnp.ones_like(x[:, :1]), x], axis=1) @ self.weights


class JapanRegressor(RegionQueries):
    """Prediction regions that hold a vector (or a trajectory) with probability >= 1 - eps.

    Fits a density on the training split, scores the calibration split, and keeps every y whose
    score is at least a low quantile of those scores, at its exact rank. Coverage holds for any
    density, however bad, if calibration and test points are exchangeable; a good one makes regions
    small. Coverage is over all x together, not at each x.

    Follows scikit-learn's habits (`get_params`, `set_params`, `clone`, last step of a `Pipeline`)
    without importing it. The constructor stores its arguments and nothing else.

    Args:
        flow: "realnvp", "spline", "maf" or "trajectory" (y is [n, H, m]); a `Flow`, which is
            trained from its parameters on standardised data; or any object with
            `log_prob(y, x) -> [B]` and `sample(key, x, n) -> [n, B, d]`, which is fitted by its
            own `fit(x, y)` if it has one and used as it is otherwise. A single target makes a
            spline of "realnvp", whose couplings degenerate there.
        score: a name of `SCORES`, or a function (x, y) -> [B], higher is more conforming.
        eps: miscoverage in (0, 1).
        predictor: fitted function or object with `predict`, x -> y, for the scores
            "base_prediction" and "residual"; it must not have seen the calibration split. None is
            least squares on the training split.
        fit_config: a `FitConfig`; None is its defaults.
        num_samples: draws for a volume.
        score_samples: M, draws at each x for the score "hpd".
        calibration_fraction: share of the rows given to `fit` that calibrates at once; None
            leaves that to `calibrate`.
        standardise: fit flows on (y - mean) / std and (x - mean) / std of the training split.
        prefit: take `flow` as it is; `fit` then only fits what a score needs besides.
        chunk_size: rows of density evaluations at once, which bounds memory; a chunk holds
            chunk_size / num_samples test points, at least one.
        random_state: seed of everything random.

    Attributes:
        flow_: the fitted density, in the units of y.
        threshold_: of the scores; -inf is the whole space.
        calibration_scores_: scores of the calibration split.
        log_scale_: sum of log std of the targets on the training split: subtract it from a
            log-volume for standardised units.

    Source: arXiv 2505.23196 (JAPAN); details marked reconstructed in `jaxlib_papers.catalog`.
    """

    def __init__(
        self,
        flow: str | Any = "realnvp",
        score: str | Callable[[Any, Any], Any] = "conditional",
        eps: float = 0.1,
        *,
        predictor: Any = None,
        fit_config: FitConfig | None = None,
        num_samples: int = 1000,
        score_samples: int = 100,
        calibration_fraction: float | None = None,
        standardise: bool = True,
        prefit: bool = False,
        chunk_size: int = 65536,
        random_state: int = 0,
    ):
        self.flow = flow
        self.score = score
        self.eps = eps
        self.predictor = predictor
        self.fit_config = fit_config
        self.num_samples = num_samples
        self.score_samples = score_samples
        self.calibration_fraction = calibration_fraction
        self.standardise = standardise
        self.prefit = prefit
        self.chunk_size = chunk_size
        self.random_state = random_state

    # Fitting.

    def _key(self, use: int) -> Array:
        return jax.random.fold_in(jax.random.key(self.random_state), use)

    def _new_flow(self, dim: int, context: int, key: Array) -> Flow:
        name = self.flow if isinstance(self.flow, str) and self.flow in FLOWS else "realnvp"
        if name == "maf":
            return ConditionalMAF(dim, context, hidden=max(64, dim), key=key)
        return FLOWS["spline" if dim == 1 else name](dim, context, key=key)

    def _fit_density(self, flow: Flow, y: Array, x: Array | None, key: Array) -> Flow:
        config = FitConfig() if self.fit_config is None else self.fit_config
        if config.steps == 0:
            return flow
        if self.standardise:
            scale = jnp.std(y, axis=0)
            location = (jnp.mean(y, axis=0), scale)
            if x is not None:
                spread = jnp.std(x, axis=0)
                location += (jnp.mean(x, axis=0), jnp.where(spread > 0, spread, 1))
            flow = StandardisedFlow(flow, *location)
        return fit_flow(flow, y, x, config, key=key)[0]

    def _context(self, x: Array) -> Array:
        """What the density is conditioned on."""
        return self._predict_base(x) if self.score == "base_prediction" else x

    def _predict_base(self, x: Array) -> Array:
        call = getattr(self.base_, "predict", self.base_)
        predicted = as_float(call(np.asarray(x)) if call is not self.base_ else call(x))
        return predicted[:, None] if predicted.ndim == 1 else predicted

    def fit(self, x: ArrayLike, y: ArrayLike) -> JapanRegressor:
        """Fits the density (and what the score needs besides) on the training split.

        Args:
            x: features [n, c], or for trajectories also histories [n, T, F].
            y: targets [n, d] or [n], or trajectories [n, H, m].

        Returns:
            self.

        Raises:
            ValueError: settings out of range, NaN or infinite numbers, a constant target, one
                long series in place of trajectories, shapes that do not fit.
        """
        self._check_settings()
        for name in ("context_shape_", "event_shape_", "parts_", "threshold_"):
            if hasattr(self, name):
                delattr(self, name)
        x = self._features(x)
        y = self._targets(y, x.shape[0])
        self._check_exchangeable(y)
        held = None
        if self.calibration_fraction is not None:
            order = jax.random.permutation(self._key(9), x.shape[0])
            size = max(1, round(self.calibration_fraction * x.shape[0]))
            held = (x[order[:size]], y[order[:size]])
            x, y = x[order[size:]], y[order[size:]]
        spread = np.asarray(jnp.std(y, axis=0))
        level = np.asarray(jnp.max(jnp.abs(y), axis=0))
        constant = np.argwhere(spread <= 1e-6 * level)
        if constant.size:
            raise ValueError(
                f"y is constant in column {constant[0].tolist()}: a density has no width there; "
                "drop the column"
            )
        self.context_shape_, self.event_shape_ = x.shape[1:], y.shape[1:]
        self.n_features_in_ = int(x.shape[-1])
        self.log_scale_ = float(np.log(spread).sum())
        self.parts_ = self._fit_parts(x, y)
        self.flow_ = self.parts_.get("flow", self.parts_.get("marginal"))
        half = 0.5 * (jnp.max(y, axis=0) - jnp.min(y, axis=0))
        self.box_ = (jnp.min(y, axis=0) - half, jnp.max(y, axis=0) + half)
        return self if held is None else self.calibrate(*held)

    def _fit_parts(self, x: Array, y: Array) -> dict[str, Any]:
        kind, parts = self.score, {}
        if kind in ("base_prediction", "residual"):
            self.base_ = _Linear(x, y) if self.predictor is None else self.predictor
        context = self._context(x)
        if kind in ("unconditional", "residual"):
            target = y - self._predict_base(x) if kind == "residual" else y
            flow = self._new_flow(y.shape[1], 0, self._key(1))
            return {"marginal": self._fit_density(flow, target, None, self._key(2))}
        takes = self.flow.context_shape if isinstance(self.flow, Flow) else context.shape[1:]
        if takes is not None and takes != context.shape[1:]:
            raise ValueError(
                f"flow takes contexts of shape {takes}, but score {kind!r} conditions on "
                f"{'the prediction' if kind == 'base_prediction' else 'x'} of shape "
                f"{context.shape[1:]}; make the flow for that width"
            )
        if self.prefit and not isinstance(self.flow, str):
            parts["flow"] = self.flow
        elif isinstance(self.flow, Flow):
            parts["flow"] = self._fit_density(self.flow, y, context, self._key(2))
        elif self.flow == "trajectory":
            if x.ndim == 2:
                options = dict(context_dim=x.shape[1])
            elif x.ndim == 3:
                options = dict(steps=x.shape[1], features=x.shape[2])
            else:
                raise ValueError(
                    f"x has shape {x.shape}, expected histories [n, steps, features] or contexts "
                    "[n, features]"
                )
            flow = TrajectoryFlow(*y.shape[1:], **options, key=self._key(1))
            parts["flow"] = self._fit_density(flow, y, context, self._key(2))
        elif isinstance(self.flow, str):
            flow = self._new_flow(y.shape[1], context.shape[1], self._key(1))
            parts["flow"] = self._fit_density(flow, y, context, self._key(2))
        else:
            parts["flow"] = self.flow
            if hasattr(self.flow, "fit"):
                self.flow.fit(np.asarray(context), np.asarray(y))
        if kind == "posterior":
            flow = self._new_flow(x.shape[1], y.shape[1], self._key(3))
            parts["reverse"] = self._fit_density(flow, x, y, self._key(4))
        if kind == "tau_adaptive":
            config = FitConfig() if self.fit_config is None else self.fit_config
            run = score_rows if isinstance(parts["flow"], nnx.Module) else score_rows.__wrapped__
            log_prob = self._by_chunks(
                lambda a, b: run("conditional", parts, b, a, self._key(6), samples=1),
                context,
                y,
                rows=1,
            )
            parts["head"] = _scores.fit_quantile_head(
                context, log_prob, self.eps, config, key=self._key(5)
            )
        return parts

    # Scores and the threshold.

    @property
    def _compiled(self) -> bool:
        return all(isinstance(part, nnx.Module) for part in self.parts_.values())

    def _by_chunks(self, call: Callable, *arrays: Array, rows: int) -> Array:
        """`call` on blocks of rows of one size (the last one padded), joined along axis 0."""
        total = arrays[0].shape[0]
        size = min(max(1, self.chunk_size // rows), total)
        out = []
        for start in range(0, total, size):
            block = [a[start : start + size] for a in arrays]
            short = size - block[0].shape[0]
            if short:
                block = [jnp.concatenate([b, jnp.repeat(b[-1:], short, axis=0)]) for b in block]
            out.append(call(*block))
        return jnp.concatenate(out)[:total]

    def _need(self, attribute: str, first: str) -> None:
        if not hasattr(self, attribute):
            raise NotCalibratedError(f"this JapanRegressor is not ready: call {first} first")

    def score_samples_of(self, x: ArrayLike, y: ArrayLike) -> Float[Array, " batch"]:
        """Scores of pairs, higher is more conforming.

        Args:
            x: as in `fit`.
            y: one candidate a row.

        Raises:
            ValueError: not fitted, shapes that do not fit, NaN or infinite numbers.
        """
        self._need("parts_", "fit")
        x = self._features(x)
        y = self._targets(y, x.shape[0])
        if callable(self.score):
            values = as_float(self.score(x, y))
            if values.shape != x.shape[:1]:
                raise ValueError(f"score gave shape {values.shape}, expected [{x.shape[0]}]")
            return values
        if self.score == "residual":
            y = y - self._predict_base(x)
        context = self._context(x)
        key = self._key(6)
        run = score_rows if self._compiled else score_rows.__wrapped__

        def one(x: Array, y: Array) -> Array:
            return run(self.score, self.parts_, y, x, key, samples=self.score_samples)

        return self._by_chunks(one, context, y, rows=self._rows_per_score())

    def _rows_per_score(self) -> int:
        return self.score_samples if self.score == "hpd" else 1

    def calibrate(self, x: ArrayLike, y: ArrayLike) -> JapanRegressor:
        """Takes the threshold from rows that took no part in `fit`.

        Args:
            x: as in `fit`.
            y: as in `fit`.

        Returns:
            self. Fewer than ceil(1 / eps) - 1 rows: a warning, and the whole space.

        Raises:
            ValueError: not fitted, shapes that do not fit, NaN among numbers or scores.
        """
        self._need("parts_", "fit")
        self._check_settings()
        scores = self.score_samples_of(x, y)
        threshold = conformal_threshold(scores, self.eps)
        if np.isneginf(float(threshold)):
            warnings.warn(
                f"{scores.shape[0]} calibration points at eps = {self.eps} allow no finite region: "
                f"it is the whole space; expected at least {math.ceil(1 / self.eps - 1e-9) - 1}",
                UserWarning,
                stacklevel=2,
            )
        self.calibration_scores_, self.threshold_ = scores, threshold
        return self
