"""What only this repository's tests and benchmarks use; kits for extenders are in `nas.testing`."""
