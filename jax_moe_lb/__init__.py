"""Dropless mixture-of-experts layers for JAX with load-balanced expert parallelism.

`__init__.pyi` lists the public names. They are imported on first use, so planning on NumPy arrays
(`jax_moe_lb._planning`) does not import JAX.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
