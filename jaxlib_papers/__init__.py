"""Methods of 38 ICLR 2026 papers in functional JAX.

Nothing heavy is imported here: `import jaxlib_papers` costs no JAX start-up. Import the module that
you use, e.g. ``from jaxlib_papers.moe import expert_divergence``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
