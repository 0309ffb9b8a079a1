"""Rotary embedding: closed form, what it promises to attention, and the context extensions."""

from __future__ import annotations

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_papers.ops.rope import RopeScaling, apply_rope, rope_angles, rope_frequencies


def test_closed_form_with_half_split_pairs():
    """Channels i and i + dim / 2 are one complex number, turned by position * theta^(-2i/dim)."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 7]], np.int32)
    got = np.asarray(apply_rope(jnp.asarray(x), *rope_angles(jnp.asarray(positions), 8, 100.0)))
    for b, t, h, i in np.ndindex(2, 5, 3, 4):
        angle = positions[b, t] * 100.0 ** (-2 * i / 8)
        turned = complex(x[b, t, h, i], x[b, t, h, i + 4]) * cmath.exp(1j * angle)
        assert got[b, t, h, i] == pytest.approx(turned.real, abs=1e-5)
        assert got[b, t, h, i + 4] == pytest.approx(turned.imag, abs=1e-5)


def test_products_depend_on_the_difference_of_positions():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(i, j):
        turned = (
            apply_rope(a, *rope_angles(jnp.full((1, 1), p), 16, 1e4)) for a, p in ((q, i), (k, j))
        )
        return float(jnp.sum(jnp.multiply(*turned)))

    for shift in (1, 9, 200):
        assert product(5 + shift, 2 + shift) == pytest.approx(product(5, 2), abs=1e-4)
    assert product(6, 2) != pytest.approx(product(5, 2), abs=1e-2)


def test_lengths_are_kept_and_position_zero_is_the_identity():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 3, 2, 6)), jnp.float32)
    turned = apply_rope(x, *rope_angles(jnp.array([[0, 3, 4000]]), 6, 1e4))
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])
    norms = (np.linalg.norm(a, axis=-1) for a in (turned, x))
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_bfloat16_is_turned_in_float32():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 4, 2, 8)), jnp.bfloat16)
    angles = rope_angles(jnp.array([[0, 100, 2000, 30000]]), 8, 1e4)
    assert angles[0].dtype == angles[1].dtype == jnp.float32
    y = apply_rope(x, *angles)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(apply_rope(x.astype(jnp.float32), *angles))
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-8)


def test_long_contexts_keep_their_angles():
    """Float32 angles: at position 131071 they are right to 0.01 radian."""
    position = 131071
    cos, _ = rope_angles(jnp.array([position]), 8, 5e5)
    exact = [math.cos(position * 5e5 ** (-2 * i / 8)) for i in range(4)]
    np.testing.assert_allclose(cos[0], exact, atol=1e-2)


# Scaling, against formulas written per channel in terms of wavelengths.
def llama3(wavelength, factor, low, high, original):
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return 1 / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) / factor + smooth


def yarn(channel, dim, theta, factor, original, fast, slow, truncate):
    def at(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = at(fast), at(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = min(max((channel - low) / (high - low), 0), 1)
    return stretched / factor + (1 - stretched)


def test_linear_scaling():
    got, factor = rope_frequencies(16, 1e4, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(got, 1e4 ** (-np.arange(8) / 8) / 4, rtol=1e-12)
    assert factor == 1.0
    # Position 4 p with scaling 4 is position p without.
    long = rope_angles(jnp.array([40]), 16, 1e4, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(long, rope_angles(jnp.array([10]), 16, 1e4), atol=1e-5)


def test_llama3_scaling():
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    got, factor = rope_frequencies(128, 5e5, scaling)
    plain = 5e5 ** (-np.arange(64) / 64)
    ratios = [llama3(2 * math.pi / f, 8.0, 1.0, 4.0, 8192) for f in plain]
    np.testing.assert_allclose(got / plain, ratios, rtol=1e-12)
    assert len(set(np.round(ratios, 6))) > 3 and {ratios[0], ratios[-1]} == {1.0, 1 / 8}
    assert factor == 1.0


@pytest.mark.parametrize("truncate", (False, True))
def test_yarn_scaling(truncate):
    scaling = RopeScaling("yarn", 4.0, 4096, truncate=truncate)
    got, factor = rope_frequencies(128, 1e4, scaling)
    plain = 1e4 ** (-np.arange(64) / 64)
    ratios = [yarn(i, 128, 1e4, 4.0, 4096, 32.0, 1.0, truncate) for i in range(64)]
    np.testing.assert_allclose(got / plain, ratios, rtol=1e-12)
    assert len(set(np.round(ratios, 6))) > 3 and {ratios[0], ratios[-1]} == {1.0, 1 / 4}
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1)


def test_yarn_factor_on_the_angles():
    cos, sin = rope_angles(jnp.array([0, 3]), 8, 1e4, RopeScaling("yarn", 4.0, attention_factor=2))
    np.testing.assert_allclose(cos**2 + sin**2, np.full((2, 4), 4.0), rtol=1e-6)
    assert rope_frequencies(8, 1e4, RopeScaling("yarn", 1.0))[1] == 1.0


def test_under_jit_and_vmap():
    positions = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    call = jax.jit(jax.vmap(lambda p: rope_angles(p, 8, 1e4)))
    for a, b in zip(call(positions), rope_angles(positions, 8, 1e4), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_bad_arguments():
    for dim in (7, 0, -2):
        with pytest.raises(ValueError, match="head_dim"):
            rope_frequencies(dim, 1e4)
    with pytest.raises(ValueError, match="theta"):
        rope_frequencies(8, 1.0)
    with pytest.raises(ValueError, match=r"RopeScaling.kind.*llama3"):
        RopeScaling("dynamic", 2.0)
    with pytest.raises(ValueError, match="RopeScaling.factor"):
        RopeScaling("linear", 0.0)
    with pytest.raises(ValueError, match="high_freq_factor"):
        RopeScaling("llama3", 8.0, low_freq_factor=4.0, high_freq_factor=4.0)
    with pytest.raises(ValueError, match="expected half of 8"):
        apply_rope(jnp.zeros((1, 2, 1, 8)), jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 3)))
