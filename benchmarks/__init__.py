"""Benchmarks, and workloads shared with the tests."""
