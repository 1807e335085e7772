"""Engines compared on real studies of one space: what `benchmarks/real_study.py` is made of."""
