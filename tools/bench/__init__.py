"""Benchmarks: ratios against rivals taken in one run, one JSON object a line.

`python -m tools.bench [CASE ...] [--json]`; without names all cases for this machine run.
"""
