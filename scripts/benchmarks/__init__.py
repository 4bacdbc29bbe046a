"""Benchmarks against peers: every figure is a ratio of two servers measured in one run on one machine."""
