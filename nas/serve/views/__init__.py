"""View models: what a page and its JSON twin show of a study, candidate, layout or family."""
