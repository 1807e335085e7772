"""Measures CPU seconds per proposal after so many observations."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.search.problems import Problem
from nas.search.proposers import Sampler, make_proposer

_PROPOSALS = 16
"""The least interval of hyperparameter fits, so that the mean includes at least their share of it."""


def seconds(problem_name: str, proposer_name: str, observed: int) -> dict[str, Any]:
    """Returns the mean and the first of a few proposals after `observed` random layouts."""
    problem = Problem(problem_name, 0)
    sampler, rng = Sampler(problem.space), np.random.default_rng(97)
    proposer = make_proposer(sampler, proposer_name, 0)
    proposer.fix_reference_point(problem.reference_point)
    for proposal in proposer.ask(problem.space.search.seeds):
        proposer.tell(problem.observe(proposal.layout))
    proposer.ask(1)  # imports what it needs
    for _ in range(observed - problem.space.search.seeds):
        proposer.tell(problem.observe(sampler.draw(rng)))
    spent = []
    for _ in range(_PROPOSALS):
        start = time.process_time()
        proposals = proposer.ask(1)
        spent.append(time.process_time() - start)
        proposer.tell(problem.observe(proposals[0].layout))
    return {
        "problem": problem_name,
        "proposer": proposer_name,
        "told": observed,
        "cpu_s": round(statistics.fmean(spent), 3),
        "first_cpu_s": round(spent[0], 3),
    }
