"""Readers of recorded expert loads and YAML files, with limits on untrusted input."""
