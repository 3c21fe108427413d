"""Density estimation on real tables, at equal time: `python -m benchmarks.tables`."""
