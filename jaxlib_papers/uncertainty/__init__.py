"""Papers on uncertainty, one module each."""
