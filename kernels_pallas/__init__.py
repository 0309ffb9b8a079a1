"""Pallas kernels for TPU and GPU, each with an XLA reference and a custom VJP."""
