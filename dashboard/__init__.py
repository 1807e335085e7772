"""HTML pages over the database: routes, templates, SVG, and which browsers may look and act."""
