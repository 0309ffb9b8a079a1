"""How one parameter is distributed, and the affine map to the variable of its polynomials.

Names of polynomials (legendre, hermite, laguerre, jacobi) take the parameter as it is. Names of
distributions (uniform, normal, exponential) map it first, by numbers that are given, as in
"uniform(20, 80)", or read off the sample. "empirical" orthonormalises Legendre polynomials of the
min-max scaled sample under the sample itself (reconstructed from OpenReview 4bnCXOtHTm).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlib_papers.ops._orthonormal import check_jacobi
from jaxlib_papers.ops.checks import is_concrete

__all__ = ["Family", "FamilySpec", "fit_families"]

DISTRIBUTIONS = {"uniform": "legendre", "normal": "hermite", "exponential": "laguerre"}
KNOWN = ("legendre", "hermite", "laguerre", "jacobi", *DISTRIBUTIONS, "empirical")
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Family:
    """One parameter's family with every number that its basis needs.

    Attributes:
        name: what was asked for: a polynomial's or a distribution's name, or "empirical".
        polynomial: the polynomials that are evaluated.
        a: Jacobi's exponent of 1 - x.
        b: Jacobi's exponent of 1 + x.
        loc: subtracted from the parameter, in its units.
        scale: by which the difference is divided, > 0.
        mix: "empirical" only: upper triangular [degree+1][degree+1] that turns Legendre's values
            into values orthonormal under the sample.
    """

    name: str
    polynomial: str
    a: float = 0.0
    b: float = 0.0
    loc: float = 0.0
    scale: float = 1.0
    mix: tuple[tuple[float, ...], ...] | None = None

    @property
    def domain(self) -> tuple[float, float]:
        """Least and largest value of the parameter that the measure supports, in its units."""
        low, high = {
            "hermite": (-np.inf, np.inf),
            "laguerre": (0.0, np.inf),
        }.get(self.polynomial, (-1.0, 1.0))
        return self.loc + self.scale * low, self.loc + self.scale * high

    def check_domain(self, values: Float[Array, " m"], where: str) -> None:
        """Raises ValueError where a value that is at hand is NaN or outside of the domain."""
        if not is_concrete(values):
            return
        numbers = np.asarray(values, np.float64)
        if not np.isfinite(numbers).all():
            row = int(np.argmin(np.isfinite(numbers)))
            raise ValueError(
                f"{where.format(row)} is {numbers[row]}; drop or impute rows without a finite value"
            )
        low, high = self.domain
        slack = TOLERANCE * self.scale
        outside = (numbers < low - slack) | (numbers > high + slack)
        if outside.any():
            row = int(np.argmax(outside))
            raise ValueError(
                f"{where.format(row)} is {numbers[row]:.6g}, outside of [{low:.6g}, {high:.6g}], "
                f"the domain of family {self.name!r}; map it into the domain, or name another "
                "family ('empirical' takes any values)"
            )

    def mixing(self, degree: int, dtype) -> np.ndarray | None:
        """The matrix that turns the polynomials' values into the basis; None: the identity."""
        if self.mix is None:
            return None
        if degree >= len(self.mix):
            raise ValueError(
                f"degree is {degree}, but this empirical family was fitted for degree "
                f"{len(self.mix) - 1}; fit it again with the higher degree"
            )
        return np.asarray(self.mix, dtype)[: degree + 1, : degree + 1]


FamilySpec = str | tuple | Family


def _parse(spec: FamilySpec) -> tuple[str, tuple[float, ...]]:
    """Name and numbers of "uniform(0, 10)" or ("jacobi", 1, 2)."""
    if isinstance(spec, tuple) and spec and isinstance(spec[0], str):
        name, numbers = spec[0].lower(), spec[1:]
    elif isinstance(spec, str):
        match = re.fullmatch(r"\s*([A-Za-z]+)\s*(?:\(([^()]*)\))?\s*", spec)
        if match is None:
            raise ValueError(f"family {spec!r} cannot be read; write it like 'uniform(0, 10)'")
        name, numbers = match[1].lower(), (match[2] or "").split(",") if match[2] else ()
    else:
        raise ValueError(f"family is {spec!r}, expected a name, (name, numbers...) or a Family")
    if name not in KNOWN:
        raise ValueError(f"family {name!r} is unknown, expected one of {sorted(KNOWN)}")
    try:
        return name, tuple(float(v) for v in numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"family {spec!r}: its numbers cannot be read") from error


def fit_family(spec: FamilySpec, sample: Float[Array, " m"], degree: int, where: str) -> Family:
    """The family with its numbers, read off the sample where they were not given."""
    if isinstance(spec, Family):
        return spec
    name, numbers = _parse(spec)
    wanted = {"jacobi": (0, 2), "uniform": (0, 2), "normal": (0, 2), "exponential": (0, 2)}
    if len(numbers) not in wanted.get(name, (0,)):
        raise ValueError(
            f"family {name!r} has {len(numbers)} numbers, expected {wanted.get(name, (0,))}"
        )
    if name == "jacobi":
        a, b = numbers or (0.0, 0.0)
        check_jacobi(a, b)
        return Family(name, "jacobi", a=a, b=b)
    if name not in DISTRIBUTIONS and name != "empirical":
        return Family(name, name)
    if numbers:
        first, second = numbers
        if name == "uniform":
            loc, scale = (first + second) / 2, (second - first) / 2
        else:
            loc, scale = first, second
        if not scale > 0:
            meaning = "low < high" if name == "uniform" else "a positive second number"
            raise ValueError(f"family {spec!r}: expected {meaning}")
        return Family(name, DISTRIBUTIONS[name], loc=loc, scale=scale)
    if not is_concrete(sample):
        raise ValueError(
            f"family {name!r} reads its numbers off the sample, which is traced here; fit the "
            "families outside of jit (fit_families) and pass the result, or give the numbers"
        )
    return _from_sample(name, np.asarray(sample, np.float64), degree, where)


def _from_sample(name: str, sample: np.ndarray, degree: int, where: str) -> Family:
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError(
            f"{where.format(':')} has no rows or non-finite values; drop or impute those rows"
        )
    low, high = float(sample.min()), float(sample.max())
    if not high > low:
        raise ValueError(
            f"{where.format(':')} is constant ({low:.6g}): a parameter that does not vary cannot "
            "drive anything; drop the column"
        )
    if name == "normal":
        return Family(name, "hermite", loc=float(sample.mean()), scale=float(sample.std()))
    if name == "exponential":
        return Family(name, "laguerre", loc=low, scale=float(sample.mean()) - low)
    middle, half = (low + high) / 2, (high - low) / 2
    if name == "uniform":
        return Family(name, "legendre", loc=middle, scale=half)
    distinct = len(np.unique(sample))
    if distinct <= degree:
        raise ValueError(
            f"{where.format(':')} takes {distinct} distinct values, but degree {degree} needs at "
            f"least {degree + 1}; lower the degree to {distinct - 1}"
        )
    # Gram-Schmidt as QR in float64 with the sample's measure 1/m, signs as Legendre's.
    x = (sample - middle) / half
    values = np.polynomial.legendre.legvander(x, degree) * np.sqrt(2 * np.arange(degree + 1) + 1)
    r = np.linalg.qr(values / np.sqrt(len(x)), mode="r")
    r = r * np.sign(np.diag(r))[:, None]
    mix = np.linalg.solve(r, np.eye(degree + 1))
    rows = tuple(tuple(float(v) for v in row) for row in np.triu(mix))
    return Family(name, "legendre", loc=middle, scale=half, mix=rows)


def fit_families(
    xi: Float[Array, "m d"], families: FamilySpec | Sequence[FamilySpec], degree: int | np.ndarray
) -> tuple[Family, ...]:
    """The families of all parameters, with the numbers that were not given read off the sample.

    Args:
        xi: sample of the parameters, in their own units; a concrete array where a family has to
            read it.
        families: one name for all parameters or one for each: a polynomial ("legendre",
            "hermite", "laguerre", "jacobi(a, b)": the parameter is used as it is), a distribution
            ("uniform", "normal", "exponential", or with numbers: "uniform(low, high)",
            "normal(mean, sd)", "exponential(loc, scale)"), "empirical", a tuple like
            ("jacobi", 1.0, 2.0), or a `Family`.
        degree: highest degree that the basis will ask for (of each parameter, or one for all);
            "empirical" needs it.

    Returns:
        One `Family` a parameter.

    Raises:
        ValueError: xi is not [m, d], the number of families differs from d, an unknown name,
            numbers that make no distribution, or a sample that is constant, not finite, or has too
            few distinct values.

    Source: OpenReview 4bnCXOtHTm, Wiener-Askey table; reading off the sample (reconstructed).
    """
    if jnp.ndim(xi) != 2:
        raise ValueError(f"xi has shape {jnp.shape(xi)}, expected [rows, parameters]")
    d = jnp.shape(xi)[1]
    alone = isinstance(families, (str, Family)) or (
        isinstance(families, tuple)
        and bool(families)
        and any(isinstance(f, int | float) for f in families)
    )
    chosen = [families] * d if alone else list(families)
    if len(chosen) != d:
        raise ValueError(
            f"families has {len(chosen)} entries, expected one for each of {d} columns"
        )
    degrees = np.broadcast_to(np.asarray(degree), (d,))
    return tuple(
        fit_family(spec, xi[:, k], int(degrees[k]), f"xi[{{}}, {k}]")
        for k, spec in enumerate(chosen)
    )
