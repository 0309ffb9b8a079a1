"""Settings that every test runs under."""

from __future__ import annotations

import os

# Before JAX is imported: tests are written for the CPU unless the caller chose a platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402

# Both errors catch what silently costs accuracy or memory: a float32 that became float64 or
# bfloat16 on the way, and a [n] + [n, 1] that became [n, n].
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in each run (a red test stays red), and no deadline: compiling is slow.
hypothesis.settings.register_profile(
    "repository",
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("repository")
