"""Measurements of the quality score: what tells layouts apart, and how surely."""
