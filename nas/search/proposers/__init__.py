"""Proposes the layouts that a study tries next.

    sampler = Sampler(load_space("lfm2"), supported)
    proposer = make_proposer(sampler)
    for proposal in proposer.ask(2):
        ...  # measure and train proposal.layout
        proposer.tell(Observation(proposal.layout, "complete", objectives, constraints, rung=2))

`__all__` is the public interface; it imports no Ray, no database and no torch. See docs/explanation/search-engine.md.
"""

from nas.search.proposers.api import PROPOSERS, Observation, Proposal, Proposer, ProposerFactory, Status
from nas.search.proposers.features import Features
from nas.search.proposers.heuristics import seed_layouts
from nas.search.proposers.mutation import crossover, mutate
from nas.search.proposers.sampling import Sampler
from nas.search.proposers.state import BaseProposer, SearchState
from nas.search.proposers.stopping import Volume, is_exhausted, volume

__all__ = [
    "PROPOSERS",
    "BaseProposer",
    "Features",
    "Observation",
    "Proposal",
    "Proposer",
    "ProposerFactory",
    "Sampler",
    "SearchState",
    "Status",
    "Volume",
    "crossover",
    "is_exhausted",
    "make_proposer",
    "mutate",
    "seed_layouts",
    "volume",
]


def make_proposer(sampler: Sampler, name: str | None = None, seed: int | None = None) -> Proposer:
    """Returns the proposer that the sampler's space names, or another one of `PROPOSERS`.

    Raises:
        UnknownName: no such proposer is registered.
    """
    settings = sampler.space.search
    return PROPOSERS[name or settings.proposer](sampler, settings.seed if seed is None else seed)
