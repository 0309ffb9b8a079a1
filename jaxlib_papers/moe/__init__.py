"""Papers on mixtures of experts, one module each."""
