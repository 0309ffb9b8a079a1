"""Papers on causal structure, one module each, and the classical methods beside them."""
