"""Compares proposers on synthetic problems and on recorded studies: `python -m benchmarks.search`."""
