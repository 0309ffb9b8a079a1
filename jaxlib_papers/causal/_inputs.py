"""What a table must be before anything is fitted to it: named errors instead of broken algebra."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

__all__ = ["check_basis", "check_observations", "check_table"]


def _matrix(name: str, values) -> Float[np.ndarray, "m k"]:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} holds something that is no number; encode or drop it") from error
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}, expected [rows, columns]")
    return array


def _check_finite(name: str, array: np.ndarray, columns: Sequence[str]) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        row, column = (int(v) for v in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} has {int(bad.sum())} values that are not finite, the first at row {row}, "
            f"column {columns[column]!r}; drop those rows or impute them"
        )


def check_observations(
    name: str, X: Float[np.ndarray, "m n"], columns: Sequence[str] | None = None
) -> Float[np.ndarray, "m n"]:
    """X as float64, or ValueError for NaN, constant or linearly dependent columns, too few rows."""
    X = _matrix(name, X)
    m, n = X.shape
    columns = [str(k) for k in range(n)] if columns is None else columns
    if n < 2:
        raise ValueError(f"{name} has {n} columns, expected at least 2 variables")
    _check_finite(name, X, columns)
    if m <= n + 1:
        raise ValueError(f"{name} has {m} rows for {n} columns; bring at least {n + 2} rows")
    spread = X.std(axis=0)
    flat = spread <= 1e-12 * np.maximum(np.abs(X).max(axis=0), 1e-300)
    if flat.any():
        raise ValueError(
            f"{name} column {columns[int(flat.argmax())]!r} is constant; drop it: what does not "
            "vary has no visible causes or effects"
        )
    unit = (X - X.mean(axis=0)) / spread
    correlation = unit.T @ unit / m
    close = np.argwhere(np.triu(np.abs(correlation) > 1 - 1e-10, 1))
    if close.size:
        i, j = close[0]
        raise ValueError(
            f"{name} columns {columns[i]!r} and {columns[j]!r} are duplicates (up to scale): no "
            "method can tell which of them causes what; drop one"
        )
    values, vectors = np.linalg.eigh(correlation)
    if values[0] < 1e-10 * n:
        part = [columns[k] for k in np.flatnonzero(np.abs(vectors[:, 0]) > 0.05)]
        raise ValueError(
            f"{name} columns {part} are linearly dependent; drop one of them (sums and balances "
            "of other columns carry nothing new)"
        )
    return X


def check_table(X, xi, names: Sequence[str], parameters: Sequence[str]):
    """(X, xi) as float64 matrices with equally many rows; errors name columns."""
    xi = _matrix("xi", xi)
    X = _matrix("X", X)
    if len(X) != len(xi):
        raise ValueError(f"X has {len(X)} rows and xi {len(xi)}, expected the same rows in both")
    _check_finite("xi", xi, parameters)
    X = check_observations("X", X, names)
    for k, name in enumerate(parameters):
        if np.ptp(xi[:, k]) <= 1e-12 * max(float(np.abs(xi[:, k]).max()), 1e-300):
            raise ValueError(
                f"xi column {name!r} is constant ({xi[0, k]:.6g}): a parameter that does not vary "
                "cannot drive an edge; drop it"
            )
    return X, xi


def check_basis(psi: Float[np.ndarray, "m P"], xi, index, parameters: Sequence[str]) -> None:
    """ValueError unless the basis functions are linearly independent on the sample."""
    values, vectors = np.linalg.eigh(psi.T @ psi / len(psi))
    if values[0] > 1e-8 * max(values[-1], 1.0):
        return
    degrees = index.max(axis=0)
    for k, name in enumerate(parameters):
        distinct = len(np.unique(xi[:, k]))
        if distinct <= degrees[k]:
            raise ValueError(
                f"xi column {name!r} takes {distinct} distinct values, but degree {degrees[k]} "
                f"needs at least {degrees[k] + 1}; lower the degree to {distinct - 1}"
            )
    terms = np.flatnonzero(np.abs(vectors[:, 0]) > 0.1)
    part = [parameters[k] for k in range(len(parameters)) if index[terms, k].any()]
    raise ValueError(
        f"the basis functions of parameters {part} are linearly dependent on these {len(psi)} rows "
        "(parameters that determine each other, or too few distinct settings); drop one parameter "
        "or lower the degree"
    )
