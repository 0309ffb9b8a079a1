"""What a calibrated estimator tells of its regions: membership, volume, picture, points."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxlib_papers.ops.checks import as_float, check_choice, check_count
from jaxlib_papers.ops.conformal import conformal_threshold
from jaxlib_papers.ops.regions import connected_components_2d
from jaxlib_papers.uncertainty._habits import Estimator
from jaxlib_papers.uncertainty._volumes import (
    RegionMask,
    RegionSamples,
    importance,
    importance_jit,
    in_box,
    in_box_jit,
)

__all__ = ["RegionQueries"]


class RegionQueries(Estimator):
    """Questions to an estimator that has `parts_`, `threshold_` and `calibration_scores_`."""

    def _tau(self, eps: float | None) -> Array:
        self._need("parts_", "fit")
        self._need("threshold_", "calibrate")
        return (
            self.threshold_ if eps is None else conformal_threshold(self.calibration_scores_, eps)
        )

    def contains(
        self, x: ArrayLike, y: ArrayLike, *, eps: float | None = None
    ) -> Bool[Array, " batch"]:
        """Whether each y lies in the region at its x.

        Args:
            x: as in `fit`.
            y: one candidate a row.
            eps: another miscoverage than that of the constructor; regions nest.

        Raises:
            ValueError: not fitted or calibrated, shapes that do not fit, non-finite numbers.
        """
        tau = self._tau(eps)
        return self.score_samples_of(x, y) >= tau

    def log_volume(
        self,
        x: ArrayLike,
        *,
        method: str = "importance",
        num_samples: int | None = None,
        box: tuple[ArrayLike, ArrayLike] | None = None,
        eps: float | None = None,
        standardised: bool = False,
    ) -> Float[Array, " batch"]:
        """Log-volume of the region at each x, in nats of units of y (units^d).

        Args:
            x: as in `fit`.
            method: "importance" draws from the density; its error is bounded for density scores,
                and can be large for "latent" and "posterior", whose sets reach low density. "box"
                draws uniformly from a box.
            num_samples: draws a point; None is the constructor's.
            box: (low, high) for "box"; None is the training range with half of it on each side.
            eps: another miscoverage.
            standardised: volume of (y - mean) / std.

        Returns:
            +inf for the whole space, -inf where no draw fell inside.

        Raises:
            ValueError: not fitted or calibrated, "importance" with a score of one's own, "box"
                with trajectories, settings out of range.
        """
        check_choice("method", method, ("importance", "box"))
        draws = self.num_samples if num_samples is None else num_samples
        check_count("num_samples", draws, 1)
        tau = self._tau(eps)
        x = self._features(x)
        if np.isneginf(float(tau)):
            return jnp.full(x.shape[0], jnp.inf, x.dtype)
        if callable(self.score) or (method == "box" and len(self.event_shape_) != 1):
            raise ValueError(
                "volumes need a named score, and a box vector targets; for a score of your own "
                "draw points and use ops.regions.volume_box or log_volume_importance"
            )
        context = self._context(x)
        shift = self._predict_base(x) if self.score == "residual" else jnp.zeros((x.shape[0], 1))
        low, high = (as_float(b) for b in (self.box_ if box is None else box))
        options = dict(samples=self.score_samples, draws=draws)
        count = iter(range(10**9))
        seed, score_key = self._key(7), self._key(6)

        def one(x: Array, shift: Array) -> Array:
            key = jax.random.fold_in(seed, next(count))
            if method == "box":
                run = in_box_jit if self._compiled else in_box
                return run(
                    self.score, self.parts_, x, tau, shift, low, high, key, score_key, **options
                )
            run = importance_jit if self._compiled else importance
            return run(self.score, self.parts_, x, tau, shift, key, score_key, **options)

        rows = draws + (self.score_samples if self.score == "hpd" else 0)
        result = self._by_chunks(one, context, shift, rows=rows)
        return result - self.log_scale_ if standardised else result

    def region_mask_2d(
        self,
        x: ArrayLike,
        *,
        grid: int = 100,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
        eps: float | None = None,
    ) -> RegionMask:
        """The regions on a grid, for one or two targets, with their separate parts counted.

        Args:
            x: as in `fit`.
            grid: cells along each target.
            low: lower corner; None is the training range with half of it on each side.
            high: upper corner.
            eps: another miscoverage.

        Raises:
            ValueError: more than two targets, not calibrated, high not above low.
        """
        check_count("grid", grid, 2)
        tau = self._tau(eps)
        x = self._features(x)
        if len(self.event_shape_) != 1 or self.event_shape_[0] > 2:
            raise ValueError(
                f"targets have shape {self.event_shape_}, expected one or two numbers for a grid; "
                "use sample_region"
            )
        dim = self.event_shape_[0]
        low = self.box_[0] if low is None else jnp.broadcast_to(as_float(low), (dim,))
        high = self.box_[1] if high is None else jnp.broadcast_to(as_float(high), (dim,))
        if not bool(jnp.all(high > low)):
            raise ValueError(f"high {high} is not above low {low} in every target")
        axes = [jnp.linspace(low[i], high[i], grid) for i in range(dim)]
        points = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, dim)
        masks = []
        for point in x:  # one picture each
            rows = jnp.broadcast_to(point[None], (len(points), *point.shape))
            masks.append(np.asarray(self.score_samples_of(rows, points) >= tau))
        first = np.asarray(axes[0]) if dim == 2 else np.zeros(1, np.float32)
        mask = np.stack(masks).reshape(len(masks), len(first), grid)
        parts = np.array([connected_components_2d(m) for m in mask])
        return RegionMask(mask, first, np.asarray(axes[-1]), parts)

    def sample_region(
        self, x: ArrayLike, n: int = 100, *, eps: float | None = None, max_rounds: int = 20
    ) -> RegionSamples:
        """Points of each region: draws of the density, kept where they lie inside.

        Args:
            x: as in `fit`.
            n: points of each region.
            eps: another miscoverage.
            max_rounds: draws of 2 n points each, until every region has n.

        Raises:
            ValueError: not fitted or calibrated, counts below 1.
        """
        check_count("n", n, 1)
        check_count("max_rounds", max_rounds, 1)
        tau = self._tau(eps)
        x = self._features(x)
        context, batch = self._context(x), x.shape[0]
        shift = self._predict_base(x) if self.score == "residual" else None
        free = self.score in ("unconditional", "residual")
        y = inside = None
        for turn in range(max_rounds):
            key = jax.random.fold_in(self._key(8), turn)
            if free:
                draws = self.parts_["marginal"].sample(key, None, 2 * n * batch)
                draws = draws.reshape(2 * n, batch, *self.event_shape_)
                draws = draws if shift is None else draws + shift[None]
            else:
                draws = as_float(self.parts_["flow"].sample(key, context, 2 * n))
            rows = jnp.repeat(x[None], 2 * n, axis=0).reshape(2 * n * batch, *x.shape[1:])
            flat = draws.reshape(-1, *self.event_shape_)
            good = (self.score_samples_of(rows, flat) >= tau).reshape(2 * n, batch)
            y = draws if y is None else jnp.concatenate([y, draws])
            inside = good if inside is None else jnp.concatenate([inside, good])
            order = jnp.argsort(~inside, axis=0, stable=True)[:n]
            wide = order.reshape(*order.shape, *(1,) * len(self.event_shape_))
            y = jnp.take_along_axis(y, wide, axis=0)
            inside = jnp.take_along_axis(inside, order, axis=0)
            if bool(jnp.all(inside)):
                break
        else:
            warnings.warn(
                f"{int(jnp.sum(~jnp.all(inside, axis=0)))} regions gave fewer than {n} points in "
                f"{max_rounds} rounds; see `valid`",
                UserWarning,
                stacklevel=2,
            )
        return RegionSamples(y, inside)

    def predict(self, x: ArrayLike) -> Float[Array, "batch *event"]:
        """Mean of the density at each x (of `score_samples` draws); a point, not a region.

        Raises:
            ValueError: not fitted, shapes that do not fit.
        """
        self._need("parts_", "fit")
        x = self._features(x)
        if self.score in ("unconditional", "residual"):
            centre = jnp.mean(self.parts_["marginal"].sample(self._key(10), None, 1000), axis=0)
            shift = self._predict_base(x) if self.score == "residual" else 0
            return jnp.broadcast_to(centre, (x.shape[0], *self.event_shape_)) + shift
        draws = self.parts_["flow"].sample(self._key(10), self._context(x), self.score_samples)
        return jnp.mean(as_float(draws), axis=0)
