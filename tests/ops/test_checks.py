"""Argument checks: what passes, what is refused, and that the message helps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.ops import checks


def test_as_float_keeps_float64_and_lifts_the_rest():
    assert checks.as_float(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert checks.as_float(np.arange(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        a, b = checks.as_float(np.ones(2, np.float32), np.ones(2, np.float64))
        assert a.dtype == b.dtype == jnp.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: checks.check_shape("x", jnp.ones((2, 3)), (3, 2), "[a, b]"),
            r"x has shape \(2, 3",
        ),
        (lambda: checks.check_ndim("x", jnp.ones(2), (2, 3), "[a, b]"), r"x has shape .*\[a, b\]"),
        (lambda: checks.check_integer("ids", jnp.ones(2)), "ids has dtype float32"),
        (lambda: checks.check_count("k", 0, 1), "k is 0, expected an integer >= 1"),
        (lambda: checks.check_count("k", 5, 1, 4), r"k is 5, expected an integer in 1\.\.4"),
        (lambda: checks.check_count("k", True, 0), "k is True"),
        (lambda: checks.check_positive("eps", 0.0), "eps is 0.0"),
        (lambda: checks.check_positive("eps", float("nan")), "eps is nan"),
        (lambda: checks.check_nonnegative("beta", -1.0), "beta is -1.0"),
        (lambda: checks.check_nonnegative("beta", "1"), "beta is '1'"),
        (lambda: checks.check_nonnegative("beta", float("inf")), "beta is inf"),
        (lambda: checks.check_choice("how", "max", {"sum", "mean"}), r"\['mean', 'sum'\]"),
        (lambda: checks.check_labels("d", np.array([[0, 1], [2, 7]]), 3), r"d\[1, 1\] is 7"),
        (lambda: checks.check_labels("d", np.array([-2]), 3), r"d\[0\] is -2, expected -1"),
        (lambda: checks.check_labels("d", np.array([0.0]), 3), "d has dtype float"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_accepted():
    checks.check_count("k", np.int32(3), 1, 3)
    checks.check_nonnegative("beta", 0)
    checks.check_labels("d", np.array([-1, 0, 2]), 3)


def test_values_of_traced_labels_are_not_read():
    jax.jit(lambda d: checks.check_labels("d", d, 3))(jnp.array([99]))
