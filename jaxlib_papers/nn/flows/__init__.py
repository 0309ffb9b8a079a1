"""Normalising flows: invertible maps with a density, conditional on a context.

Import from the modules: `base` (the contract, chains, standardising), `coupling` (affine and
spline), `autoregressive` (masked), `trajectory` (causal transformer over time), `training` (fitting
by maximum likelihood).
"""
