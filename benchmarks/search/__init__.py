"""Search engines on synthetic problems, and on recorded studies: `python -m benchmarks.search`."""
