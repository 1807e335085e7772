"""What a proposer's model expects of a layout, for those that have one."""

from __future__ import annotations

from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.search.api import Proposer
from nas.search.ehvi_search import EhviSearch


def forecast(proposer: Proposer, layout: Layout) -> float | None:
    """The quality at the top rung, minimised, that is forecast of a layout; None where no model knows any."""
    if not isinstance(proposer, EhviSearch) or proposer.expected_gain is None:
        return None
    metrics = [METRICS[objective.metric].source for objective in proposer.sampler.space.objectives]
    if "proxy" not in metrics:
        return None
    return float(proposer.surrogate().predict([layout])[0].mean[0, metrics.index("proxy")])
