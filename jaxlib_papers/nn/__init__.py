"""Shared Flax NNX building blocks; import from the modules, e.g. `jaxlib_papers.nn.decoder`."""
