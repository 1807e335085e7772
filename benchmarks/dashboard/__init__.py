"""Benchmark of the dashboard with many trials: its server, and a browser."""
