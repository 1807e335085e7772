"""Parts of `benchmarks/real_study.py`: proposers compared on real studies of one space."""
