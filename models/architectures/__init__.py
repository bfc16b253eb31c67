"""Supported architectures: one file each maps a `config.json` to sizes and checkpoint tensors to parameters."""
