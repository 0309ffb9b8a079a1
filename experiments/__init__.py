"""Experiments, run from the repository as ``python -m experiments.<name>``."""
