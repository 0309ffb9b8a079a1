"""Weights and formats from outside: Hugging Face folders and GGUF files."""
