"""Mixture-of-Experts layers for JAX whose load stays level when routing is skewed.

The public names are listed in `__init__.pyi` and imported when they are first used, so
that planning on NumPy arrays alone (`jax_moe_lb._planning`) does not import JAX.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
