"""Leaves out the tests of kernels for Hopper on JAX versions without their interpreter, before 0.11."""

from jax.experimental.pallas import mosaic_gpu

INTERPRETED = ["test_hopper_ffn.py", "test_hopper_kernels.py"]

collect_ignore = [] if hasattr(mosaic_gpu, "force_gpu_interpret_mode") else INTERPRETED
