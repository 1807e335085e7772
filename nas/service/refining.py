"""Further seeds and measurements of candidates that are about to be complete, while they are worth their seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nas.core.trial import Event
from nas.search.refining import Kind, Refinement, best_refinement
from nas.service.ladder import Climb
from nas.service.ledger import Ledger
from nas.service.scales import PUBLISHED, Scales
from nas.service.stage_work import StageWork
from nas.service.trial_run import TrialRun

REFINED = "refined"
"""Events of a trial that say what was decided about refining it; the last decision of each is 'enough'."""


class Refiner:
    """Decides about one study's candidates and has it done. Decisions are in the log, and stand after a restart.

    Args:
        work: does the stages.
        ledger: the study's log.
        scales: turns figures into coordinates.
        climb: knows what a second earns and what stages take.
    """

    def __init__(self, work: StageWork, ledger: Ledger, scales: Scales, climb: Climb) -> None:
        self._work, self._ledger, self._scales, self._climb = work, ledger, scales, climb
        self._recalled: dict[tuple[int, int], Kind | None] = {}

    def recall(self, log: list[Event]) -> None:
        """Reads what was decided before."""
        for event in log:
            if event.trial is not None and event.payload.get("what") == REFINED:
                action = event.payload["action"]
                self._recalled[event.trial, event.payload["nth"]] = None if action == "enough" else action

    async def refine(self, run: TrialRun) -> None:
        """Refines a candidate that was confirmed; references stay as they are, for all are compared with them."""
        most: dict[Kind, int] = {
            "seed": self._work.space.quality.further_seeds,
            "measure": self._work.space.protocol.further_measurements,
        }
        if run.reference is not None or not any(most.values()):
            return
        done: dict[Kind, int] = {"seed": 0, "measure": 0}
        for nth in range(sum(most.values()) + 1):
            action = self._decide(run, nth, [kind for kind in most if done[kind] < most[kind]], done)
            if action is None:
                return
            done[action] += 1
            if action == "seed":
                await self._train(run, done[action])
            else:
                await run.measure_again(self._work.space.protocol.confirm_repetitions * 2 ** done[action])

    def _decide(self, run: TrialRun, nth: int, open_: list[Kind], done: Mapping[Kind, int]) -> Kind | None:
        here = run.number, nth
        if here not in self._recalled:
            self._recalled[here] = self._best(run, open_, done)
            self._ledger.note_once(run.number, REFINED, nth=nth, action=self._recalled[here] or "enough")
        return self._recalled[here]

    def _best(self, run: TrialRun, open_: list[Kind], done: Mapping[Kind, int]) -> Kind | None:
        reference, axes = self._scales.reference_point, self._scales.axes(run)
        if reference is None or axes is None:
            return None
        sds = [axis.sd for axis in axes]
        costs, top = self._climb.costs, self._work.space.quality.rungs[-1]
        seeds = len(top.seeds) + done["seed"]
        options = []
        for kind in open_:
            share = math.sqrt(seeds / (seeds + 1)) if kind == "seed" else math.sqrt(0.5)
            # A further seed starts from nothing, and so does a measurement of twice as many repetitions.
            seconds = costs.training / len(top.seeds) if kind == "seed" else costs.confirmation * 2 ** (done[kind] + 1)
            after = [
                sd * share if (axis.source is not None) == (kind == "seed") else sd
                for axis, sd in zip(axes, sds, strict=True)
            ]
            options.append(Refinement(kind, seconds, after))
        others = [[axis.coordinate for axis in row] for row in self._scales.complete.values()]
        point = [axis.coordinate for axis in axes]
        best = best_refinement(point, sds, others, reference, options, self._climb.rate())
        return best.kind if best else None

    async def _train(self, run: TrialRun, further: int) -> None:
        top = len(self._work.space.quality.rungs) - 1
        published = self._work.space.references.layouts()[PUBLISHED]
        scores = await self._work.train_rung(run.number, run.layout, top, further)
        theirs = await self._work.train_rung(run.number, published, top, further)
        run.quality = self._scales.refined(top, scores, theirs)
        self._ledger.note_once(run.number, "quality", rung=top, quality=run.quality.model_dump(mode="json"))
