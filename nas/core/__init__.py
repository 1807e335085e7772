"""Value types and arithmetic on them: layouts, spaces, plans, measurements, scoring, fronts, statistics."""
