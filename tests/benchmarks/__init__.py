"""Benchmarks, run by `make bench`; see `__main__`. Not collected by pytest."""
