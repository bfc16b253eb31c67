"""Benchmarks and the workloads they share with the tests."""
