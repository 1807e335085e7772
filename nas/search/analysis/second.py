"""The second measurement of a front: gains over the published reference from figures and seeds that chose nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from nas.core.comparison import Gain
from nas.core.metrics import METRICS, RECALL_METRIC
from nas.core.scoring import PUBLISHED, Figures, MeasurementKey, QualityValue, axis, of_proxy, with_file_size
from nas.core.space import Objective, SearchSpace
from nas.core.trial import TrialState
from nas.search.analysis.record import Record, StudyRecord
from nas.search.proxy.quality import paired_spread
from nas.search.study.events import Remeasured

Rounds = Mapping[int, float]
"""Round or seed -> a coordinate relative to the published reference's figures there."""


def second_gains(record: StudyRecord) -> dict[int, list[Gain | None]]:
    """Returns trial -> its gains by the second measurement, of the named ones that still count, in their order.

    A gain is None where the objective has no second value: quality without fresh seeds, or a figure that is missing.
    Layouts and reference took turns, so that what a round or seed does to all of them is no part of a gain; what is
    left of the differences between rounds is the noise (`paired_spread`), whatever was stated of it before.
    """
    published, settings = record.references.get(PUBLISHED), record.space.protocol.remeasure
    named = [number for number in record.named if record.records[number].trial.status.state is TrialState.COMPLETE]
    if published is None or settings is None or not named:
        return {}
    measured = {number: record.records[number] for number in named}
    columns = [
        _quality_gains(record, objective, measured, published)
        if METRICS[objective.metric].source == "proxy"
        else _device_gains(record.space, objective, measured, published)
        for objective in record.space.objectives
    ]
    of_trials = {number: [column.get(number) for column in columns] for number in named}
    return {number: gains for number, gains in of_trials.items() if any(gain is not None for gain in gains)}


def _device_gains(
    space: SearchSpace, objective: Objective, members: Mapping[int, Record], published: Record
) -> dict[int, Gain]:
    settings = space.protocol.remeasure
    assert settings is not None, "without it nothing is named"
    reference = _figures(published.remeasured)
    if len(reference) < settings.rounds:
        return {}
    rows: dict[int, Rounds] = {}
    for number, record in members.items():
        axes = {
            round_: axis(space, objective, figures, reference[round_], QualityValue(0.0, 0.0, ""))
            for round_, figures in _figures(record.remeasured).items()
            if round_ in reference
        }
        row = {round_: of_round.coordinate for round_, of_round in axes.items() if of_round is not None}
        if row.keys() == reference.keys():
            rows[number] = row
    return _gains(rows, dict.fromkeys(reference, 0.0), rows)


def _quality_gains(
    record: StudyRecord, objective: Objective, members: Mapping[int, Record], published: Record
) -> dict[int, Gain]:
    if published.rescored is None:
        return {}
    seeds = published.rescored.per_seed.keys()
    if objective.metric == RECALL_METRIC or len(seeds) < 2:
        return _stated_gains(objective, members, published)
    rows = {
        number: {seed: -value for seed, value in trial.rescored.per_seed.items()}
        for number, trial in record.records.items()
        if trial.rescored is not None and trial.rescored.per_seed.keys() == seeds
    }
    return _gains(rows, rows[published.trial.number], members)


def _stated_gains(objective: Objective, members: Mapping[int, Record], published: Record) -> dict[int, Gain]:
    """Returns the gains by what was computed of all fresh seeds of a trial, where no value is kept of each of them."""
    values = {
        number: of_proxy(objective.metric, trial.rescored.quality)
        for number, trial in {published.trial.number: published, **members}.items()
        if trial.rescored is not None
    }
    reference, reference_sd = values.pop(published.trial.number)
    return {
        number: Gain(value - reference, math.hypot(sd, reference_sd))
        for number, (value, sd) in values.items()
        if value is not None and reference is not None
    }


def _gains(rows: Mapping[int, Rounds], reference: Rounds, members: Mapping[int, object]) -> dict[int, Gain]:
    """Returns the gains of the members among `rows`; the noise is that of all rows and the reference's."""
    if len(reference) < 2 or not rows:
        return {}
    others = [row for row in rows.values() if row is not reference]
    spread = paired_spread([reference, *others])
    if spread.dof < 1:
        return {}
    sd, zero = spread.sd * math.sqrt(2 / len(reference)), fmean(reference.values())
    return {
        number: Gain(zero - fmean(row.values()), sd, round(spread.dof))
        for number, row in rows.items()
        if number in members
    }


def _figures(rounds: Mapping[int, Remeasured]) -> dict[int, Figures]:
    return {
        round_: with_file_size(
            {MeasurementKey(row.device, row.runtime, row.workload): row.figures for row in again.measurements}
        )
        for round_, again in rounds.items()
    }
