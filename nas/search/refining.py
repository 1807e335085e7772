"""When a candidate at the top is worth a further seed, or a further measurement.

Neither finds anything new: they make it surer what is on the front. What a candidate adds to the front is a claim, and
its uncertainty is so much hypervolume that may not be there. A refinement is worth what it takes from that uncertainty,
in the same unit as a new candidate's gain, so both are bought by the second at the same rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from nas.core.hypervolume import hypervolume

Kind = Literal["seed", "measure"]
_DRAWS = 128


@dataclass(frozen=True)
class Refinement:
    """Something that could be done about a candidate.

    Args:
        kind: what.
        seconds: that it takes.
        sd: [M] standard deviations of the candidate's coordinates afterwards.
    """

    kind: Kind
    seconds: float
    sd: Sequence[float]


def best_refinement(
    point: Sequence[float],
    sd: Sequence[float],
    front: ArrayLike,
    reference: Sequence[float],
    options: Sequence[Refinement],
    rate: float,
) -> Refinement | None:
    """The refinement that is worth most beyond its seconds; None where none is worth them.

    Args:
        point: [M] minimised coordinates of the candidate.
        sd: [M] their standard deviations.
        front: [F, M] the other complete candidates.
        reference: [M] the worst corner.
        options: what could be done.
        rate: hypervolume that a second earns elsewhere.
    """
    now = doubt(point, sd, front, reference)
    worth = [now - doubt(point, each.sd, front, reference) - rate * each.seconds for each in options]
    best = max(range(len(options)), key=worth.__getitem__, default=None)
    return options[best] if best is not None and worth[best] > 0 else None


def doubt(point: Sequence[float], sd: Sequence[float], front: ArrayLike, reference: Sequence[float]) -> float:
    """Standard deviation of the hypervolume that a candidate adds to a front."""
    others = np.asarray(front, dtype=np.float64).reshape(-1, len(reference))
    noise = np.random.default_rng(0).standard_normal((_DRAWS, len(reference)))
    drawn = np.asarray(point) + np.asarray(sd) * noise
    return float(np.std([hypervolume([*others, each], reference) for each in drawn]))
