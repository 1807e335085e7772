"""The search: what to try next.

    sampler = Sampler(load_space("lfm2"), supported)
    proposer = make_proposer(sampler)
    for proposal in proposer.ask(2):
        ...  # measure and train proposal.layout
        proposer.tell(Observation(proposal.layout, "complete", objectives, constraints, rung=2))

What stands in `__all__` is the public interface; it knows no Ray, no database and no torch. docs/search-engine.md shows
the whole of it.
"""

from nas.search.api import PROPOSERS, Observation, Proposal, Proposer, ProposerFactory, Status
from nas.search.features import Features
from nas.search.heuristics import seed_layouts
from nas.search.mutation import crossover, mutate
from nas.search.sampling import Sampler
from nas.search.state import BaseProposer, SearchState
from nas.search.stopping import Volume, is_exhausted, volume

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
    """The proposer that the sampler's space asks for.

    Args:
        sampler: of the space.
        name: in `PROPOSERS`, instead of the space's own choice.
        seed: instead of the space's own.

    Raises:
        UnknownName: nobody registered it.
    """
    settings = sampler.space.search
    return PROPOSERS[name or settings.proposer](sampler, settings.seed if seed is None else seed)
