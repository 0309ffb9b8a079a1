"""What `JapanRegressor` shares with every estimator: parameters by name, checks of its input."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxlib_papers.nn.flows.autoregressive import ConditionalMAF
from jaxlib_papers.nn.flows.coupling import ConditionalRealNVP, ConditionalSplineFlow
from jaxlib_papers.ops.checks import as_float, check_choice, check_count
from jaxlib_papers.uncertainty import _scores

__all__ = ["FLOWS", "Estimator"]

FLOWS = {
    "realnvp": ConditionalRealNVP,
    "spline": ConditionalSplineFlow,
    "maf": ConditionalMAF,
}


class Estimator:
    """Scikit-learn's habits without scikit-learn, and the checks of settings and rows."""

    flow: Any
    score: Any
    eps: Any

    @classmethod
    def _parameter_names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Constructor arguments by name.

        Args:
            deep: as in scikit-learn; there is nothing nested here.
        """
        return {name: getattr(self, name) for name in self._parameter_names()}

    def set_params(self, **params: Any) -> Any:
        """Sets constructor arguments; what was fitted stays until the next `fit`.

        Raises:
            ValueError: an argument that does not exist.
        """
        for name, value in params.items():
            if name not in self._parameter_names():
                raise ValueError(
                    f"{name!r} is no parameter of JapanRegressor; known: {self._parameter_names()}"
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        changed = {
            name: value
            for name, value in self.get_params().items()
            if value is not defaults[name].default and value != defaults[name].default
        }
        inner = ", ".join(
            f"{n}={v!r}" if not isinstance(v, nnx.Module) else f"{n}={type(v).__name__}"
            for n, v in changed.items()
        )
        return f"JapanRegressor({inner})"

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import RegressorTags, Tags, TargetTags

        target = TargetTags(required=True, multi_output=True, single_output=True)
        return Tags(estimator_type="regressor", target_tags=target, regressor_tags=RegressorTags())

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "parts_")

    def _check_settings(self) -> None:
        if not callable(self.score):
            check_choice("score", self.score, _scores.SCORES)
        if not isinstance(self.eps, float | int | np.floating) or not 0 < self.eps < 1:
            raise ValueError(f"eps is {self.eps!r}, expected a miscoverage in (0, 1), e.g. 0.1")
        check_count("num_samples", self.num_samples, 1)
        check_count("score_samples", self.score_samples, 1)
        check_count("chunk_size", self.chunk_size, 1)
        share = self.calibration_fraction
        if share is not None and not 0 < share < 1:
            raise ValueError(f"calibration_fraction is {share}, expected a share in (0, 1) or None")
        if isinstance(self.flow, str):
            check_choice("flow", self.flow, (*FLOWS, "trajectory"))
            if self.prefit:
                raise ValueError(
                    f"prefit is set, but flow is the name {self.flow!r}; pass a density"
                )
        elif not (hasattr(self.flow, "log_prob") and hasattr(self.flow, "sample")):
            raise ValueError(
                f"flow is a {type(self.flow).__name__}, expected a name, a Flow, or an object with "
                "log_prob(y, x) and sample(key, x, n)"
            )

    @property
    def _temporal(self) -> bool:
        events = getattr(self.flow, "event_shape", ())
        return self.flow == "trajectory" if isinstance(self.flow, str) else len(events) == 2

    def _features(self, x: ArrayLike) -> Array:
        x = jnp.asarray(as_float(x))
        if x.ndim < 2:
            raise ValueError(f"x has shape {x.shape}, expected [n, features]")
        self._check_finite("x", x)
        wanted = getattr(self, "context_shape_", None)
        if wanted is not None and x.shape[1:] != wanted:
            raise ValueError(
                f"x has shape {x.shape}, expected [n, {', '.join(map(str, wanted))}] as in fit"
            )
        return x

    def _targets(self, y: ArrayLike, rows: int) -> Array:
        y = jnp.asarray(as_float(y))
        if self._temporal:
            if y.ndim != 3 or (y.shape[0] == 1 and not hasattr(self, "parts_")):
                raise ValueError(
                    f"y has shape {y.shape}, expected [trajectories, steps, channels] with several "
                    "trajectories: the guarantee needs exchangeable items, which the steps of one "
                    "long series are not; collect independent series"
                )
        else:
            y = y[:, None] if y.ndim == 1 else y
            if y.ndim != 2 or y.shape[1] == 0:
                raise ValueError(f"y has shape {y.shape}, expected [n, targets]")
        self._check_finite("y", y)
        if y.shape[0] != rows:
            raise ValueError(f"y has {y.shape[0]} rows and x {rows}; expected the same number")
        wanted = getattr(self, "event_shape_", None)
        if wanted is not None and y.shape[1:] != wanted:
            raise ValueError(f"y has shape {y.shape}, expected [n, {wanted}] as in fit")
        return y

    @staticmethod
    def _check_finite(name: str, array: Array) -> None:
        wrong = ~np.isfinite(np.asarray(array))
        if wrong.any():
            at = [int(i) for i in np.argwhere(wrong)[0]]
            raise ValueError(f"{name}{at} is {float(array[tuple(at)])}, expected finite numbers")

    def _check_exchangeable(self, y: Array) -> None:
        if self._temporal and y.shape[1] > 1 and bool(jnp.all(y[1:, :-1] == y[:-1, 1:])):
            warnings.warn(
                "y holds overlapping windows of one series: they are not exchangeable, and the "
                "coverage guarantee does not hold for them",
                UserWarning,
                stacklevel=3,
            )
