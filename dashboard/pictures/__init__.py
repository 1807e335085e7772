"""Pictures: pure functions from figures to inline SVG.

They carry classes and no styles, so that `assets/pictures.css` colours them, light or dark, under a strict
Content-Security-Policy. Whatever text they are given is escaped, and no script, link or foreign element is made.
"""
