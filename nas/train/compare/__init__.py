"""Members of a family compared with published models on one device."""
