"""Benchmarks of real processes on rate-limited links: network namespaces of one machine. See docs/networks.md."""
