"""The baseline: layouts of the space at random, without heuristic seeds and without learning."""

from __future__ import annotations

from nas.core.layout import Layout
from nas.search.sampling import Rng
from nas.search.state import BaseProposer, Child


class RandomSearch(BaseProposer):
    """Draws of `Sampler.draw`. What it is told only keeps it from proposing a layout twice."""

    engine = "random/1"
    screened = True

    def seeds(self) -> list[Layout]:
        """None: a baseline starts from nothing."""
        return []

    def propose(self, rng: Rng) -> Child:
        return self.sampler.draw(rng), "random", ()
