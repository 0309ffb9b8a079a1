"""Developer tools, run from the repository as ``python -m tools.<name>``."""
