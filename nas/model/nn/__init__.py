"""Layouts as torch modules: one file per block kind, and `model` that stacks them."""
