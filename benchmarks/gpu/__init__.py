"""Checks of every claim about NVIDIA GPUs, for the first hour on one; see `__main__.py`."""
