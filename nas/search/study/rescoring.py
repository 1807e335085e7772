"""Re-scoring of a study's front: its candidates are trained once more with seeds that did not choose them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from nas.core.errors import CandidateFailed
from nas.core.pareto import front_chances, near_front
from nas.core.progress import Log
from nas.core.scoring import PUBLISHED
from nas.search.study.events import Rescored
from nas.search.study.stages import SeedScores
from nas.search.study.trial import StudyContext, TrialRun, end_infeasible


class Rescoring:
    """Trains the candidates on and near the front with fresh seeds, until no other is near it.

    Noise chose the front too, so the values that it was chosen by are too good on average. A candidate that they hid
    may be near the front of the fresh values: it is re-scored next. Fresh seeds also give a noise estimate for layouts
    near the front, which the anchors do not cover.

    Args:
        study: trains, and passes on what is new of a trial.
        runs: the study's trials by number; all have ended.
        log: called with a line for each trial whose fresh training fails.
    """

    def __init__(self, study: StudyContext, runs: Mapping[int, TrialRun], log: Log) -> None:
        settings = study.work.space.quality.rescore
        assert settings is not None, "the space asks for it"
        self._study, self._runs, self._log, self._settings = study, runs, log, settings
        self._done: set[int] = set()

    async def run(self) -> None:
        """Re-scores the references, then the front in rounds."""
        references = [number for number, run in self._runs.items() if run.reference is not None]
        (published,) = (number for number in references if self._runs[number].reference == PUBLISHED)
        published_scores = await self._fresh_scores(published)
        if published_scores is None:
            return
        scale, all_scores = self._study.scales.rescored_by(published_scores), list[SeedScores]()
        while due := [*references, *self._near_front()]:
            rows = await asyncio.gather(*(self._fresh_scores(number) for number in due))
            all_scores += [scores for scores in rows if scores is not None]
            scale_now = scale.with_noise_of(all_scores)
            for number, scores in zip(due, rows, strict=True):
                self._done.add(number)
                run = self._runs[number]
                if scores is not None:
                    run.quality = scale_now.quality(scores)
                    self._study.ledger.note_once(number, Rescored(run.quality, scale_now.per_seed(scores)))
                self._judge(run, "on fresh seeds, " if scores is not None else "")
            references = []

    def _near_front(self) -> list[int]:
        """Returns the complete trials that are on the front, or are with the chance of the settings, and not done."""
        scales = self._study.scales
        if scales.reference_point is None:
            return []
        chances = front_chances({trial: scales.complete[trial] for trial in near_front(scales.complete)})
        near = {trial for trial, chance in chances.items() if (chance or 0.0) >= self._settings.p_front}
        return sorted(near.union(scales.front) - self._done)

    def _judge(self, run: TrialRun, where: str) -> None:
        """Decides about a complete trial's budgets on quality, and reports what is new of it."""
        checks = self._study.scales.quality_checks(run, final=True)
        if broken := [check for check in checks if check.verdict == "infeasible"]:
            end_infeasible(run, self._study, broken, where)
        else:
            self._study.report(run, "rescored")

    async def _fresh_scores(self, number: int) -> SeedScores | None:
        """Returns a trial's scores at the top rung; None where a training fails, and the quality stays as it was."""
        work = self._study.work
        top = len(work.space.quality.rungs) - 1
        try:
            return await work.train_rung(number, self._runs[number].layout, top, work.space.quality.rescored)
        except CandidateFailed as error:
            self._log(f"trial {number} was not re-scored: {error}")
            return None
