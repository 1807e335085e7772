"""The second measurement of a study's front: figures that did not choose what they are figures of."""

from __future__ import annotations

from collections.abc import Mapping

from nas.core.comparison import naming_order
from nas.core.errors import CandidateFailed
from nas.core.progress import Log
from nas.core.scoring import PUBLISHED, MeasurementKey
from nas.search.study.events import Named, Remeasured, SecondFigures, notes
from nas.search.study.stages import side_by_side
from nas.search.study.trial import StudyContext, TrialRun

_REPLICATE = 2
"""Replicate of the first round: 0 is what chose a layout, 1 decided about a budget."""


class Remeasuring:
    """Measures the published reference and members of the front again, in rounds in which they take turns.

    The best of many measured layouts were lucky, so the figures that chose them say too much of them. The layouts are
    named before their second figures are taken, which change neither the front nor anything that a proposer sees.

    Args:
        study: measures, and keeps what is new.
        runs: the study's trials by number; all have ended.
        log: called with a line for each trial that cannot be measured again.
    """

    def __init__(self, study: StudyContext, runs: Mapping[int, TrialRun], log: Log) -> None:
        settings = study.work.space.protocol.remeasure
        assert settings is not None, "the space asks for it"
        self._study, self._runs, self._log, self._settings = study, runs, log, settings

    async def run(self) -> None:
        """Names the front by what chose it, then measures all of a round before the next round begins."""
        (published,) = (number for number, run in self._runs.items() if run.reference == PUBLISHED)
        scales = self._study.scales
        reference_axes = scales.axes(self._runs[published])
        if reference_axes is None or scales.reference_point is None or not scales.complete:
            return
        named = naming_order(scales.complete, reference_axes, scales.reference_point)[: self._settings.members]
        ledger = self._study.ledger
        earlier = notes(ledger.events(), Named)
        if not earlier or [*earlier[-1].trials] != named:
            ledger.note(None, Named(tuple(named)))
        measured = [published, *named]
        for round_ in range(self._settings.rounds):
            # In turns, and back and forth, so that a drift of the device is the same for all.
            order = measured if round_ % 2 == 0 else measured[::-1]
            failed = await side_by_side(self._measure(number, round_) for number in order)
            measured = [number for number in measured if number not in failed]
            if published not in measured or len(measured) < 2:
                return

    async def _measure(self, number: int, round_: int) -> int | None:
        """Measures a trial once more at all keys, and notes its figures; returns its number if that fails."""
        work = self._study.work
        try:
            rows = await side_by_side(
                self._figures(number, key, round_) for key in work.measurement_keys(work.space.measured)
            )
        except CandidateFailed as error:
            self._log(f"trial {number} was not measured again: {error}")
            return number
        self._study.ledger.note_once(number, Remeasured(round_, tuple(rows)))
        return None

    async def _figures(self, number: int, key: MeasurementKey, round_: int) -> SecondFigures:
        work, artifact = self._study.work, self._runs[number].artifacts[key.runtime]
        options = (artifact, key, self._settings.repetitions, _REPLICATE + round_)
        measurement = await work.measure(number, *options)
        metrics = {objective.metric for objective in work.space.objectives}
        return SecondFigures(
            *key,
            result=work.measurement_result(*options),
            figures={name: figure for name, figure in measurement.figures.items() if name in metrics},
        )
