"""Benchmarks of training data: tokenizing, its memory, and reading samples."""
