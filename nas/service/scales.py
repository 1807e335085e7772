"""The study's fixed constants: what the references measured and scored, and the reference point that follows.

Everything that turns a trial's figures into coordinates is here. The constants freeze as soon as the references have
them and are kept with the study.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from nas.core.measurement import Figure
from nas.core.metrics import METRICS
from nas.core.scoring import Axis, Place, QualityValue, axis, reference_point, require_figures
from nas.core.space import SearchSpace
from nas.proxy.ladder import proxy_of
from nas.proxy.quality import Quality, QualityScale, fix_scale
from nas.service.ledger import Ledger
from nas.service.ranking import front_hypervolume
from nas.service.stage_work import SeedScores
from nas.service.trial_run import TakenFigures, TrialRun

PUBLISHED, ATTENTION = "published", "attention"
_NO_QUALITY = QualityValue(0.0, 0.0, "")


class Scales:
    """The constants of one study, as they become known.

    Args:
        space: the study's.
        ledger: keeps them.
    """

    def __init__(self, space: SearchSpace, ledger: Ledger) -> None:
        self._space, self._ledger = space, ledger
        self._figures: dict[str, TakenFigures] = {}
        self._figures_taken = asyncio.Event()
        self._scores: dict[int, dict[str, SeedScores]] = {}
        self._rungs: dict[int, QualityScale] = {}
        self._changed = asyncio.Condition()
        self._final: dict[str, tuple[float, float]] = {}
        self.reference_point: list[float] | None = None
        self.complete: dict[int, list[Axis]] = {}
        """Axes of the complete trials that count for the front."""

    def named_reference_point(self) -> dict[str, float] | None:
        """Objective -> coordinate of the reference point, once it is fixed."""
        if self.reference_point is None:
            return None
        names = [objective.name for objective in self._space.objectives]
        return dict(zip(names, self.reference_point, strict=True))

    @property
    def hypervolume(self) -> float | None:
        """Of the complete trials; None until the reference point is fixed."""
        return None if self.reference_point is None else front_hypervolume(self.complete, self.reference_point)

    @property
    def figures_ready(self) -> bool:
        """Whether the published reference has been measured."""
        return self._figures_taken.is_set()

    async def published_figures(self) -> TakenFigures:
        """What the published reference measured; waits for it."""
        await self._figures_taken.wait()
        return self._figures[PUBLISHED]

    async def at_rung(self, rung: int, reference: str | None, scores: SeedScores) -> QualityScale:
        """The quality scale of a rung; waits until both references have been there.

        Raises:
            InvalidInput: the published reference learns nothing there.
        """
        if reference is not None:
            self._scores.setdefault(rung, {})[reference] = scores
        async with self._changed:
            if reference is not None:
                self._fix(rung)
                self._changed.notify_all()
            await self._changed.wait_for(lambda: rung in self._rungs)
        return self._rungs[rung]

    def _fix(self, rung: int) -> None:
        scores = self._scores[rung]
        if {PUBLISHED, ATTENTION} <= scores.keys():
            config = self._space.quality
            self._rungs[rung] = fix_scale(
                config.rungs[rung].name, scores[PUBLISHED], [scores[ATTENTION]], minimum=config.min_reference
            )

    def refined(self, rung: int, scores: SeedScores, published: SeedScores) -> Quality:
        """Quality with further seeds than the scale was made with.

        All layouts share what a seed does to start values and data, and the scale knows that of its own seeds only. So
        a further seed's score is taken as a multiple of what the published reference scores with that seed; where that
        is nothing, the seed says nothing.

        Args:
            rung: where.
            scores: of the candidate, with the seeds of the scale and further ones.
            published: of the published reference, with the same seeds.
        """
        scale, own = self._rungs[rung], self._scores[rung][PUBLISHED]
        fair: SeedScores = {seed: {} for seed in scores}
        for seed, groups in scores.items():
            for group, score in groups.items():
                if group in own.get(seed, {}):
                    fair[seed][group] = score
                elif group in scale.reference and published[seed][group] > 0:
                    fair[seed][group] = score * scale.reference[group] / published[seed][group]
        return scale.quality(fair)

    def learn(self, run: TrialRun, status: str) -> None:
        """Takes what a trial has come to know."""
        if run.reference is not None:
            self._learn_reference(run, run.reference, status)
        elif status == "complete" and not run.noisy:
            axes = self.axes(run)
            assert axes is not None, f"trial {run.number} is complete but lacks an objective"
            self.complete[run.number] = axes

    def _learn_reference(self, run: TrialRun, name: str, status: str) -> None:
        if status == "gated":
            require_figures(self._space, run.figures, f"{name} reference")
            self._figures[name] = run.figures
            if name == PUBLISHED:
                self._figures_taken.set()
        if status == "complete" and run.quality is not None:
            self._final[name] = (run.quality.value, run.quality.sd)
        if self.reference_point is None and {PUBLISHED, ATTENTION} <= self._final.keys():
            self.reference_point = reference_point(
                self._space, self._figures[PUBLISHED], self._figures[ATTENTION], self._final[ATTENTION]
            )
            point = self.named_reference_point()
            assert point is not None
            self._ledger.freeze(self._as_json(), point)

    def axes(self, run: TrialRun) -> list[Axis] | None:
        """The trial's objectives, in the space's order; None while one is missing."""
        found = [self._axis(run, index) for index in range(len(self._space.objectives))]
        return None if any(each is None for each in found) else [each for each in found if each is not None]

    def known_coordinates(self, run: TrialRun) -> dict[str, float]:
        """Objective -> coordinate, of those that are known so far."""
        names = [objective.name for objective in self._space.objectives]
        found = {name: self._axis(run, index) for index, name in enumerate(names)}
        return {name: each.coordinate for name, each in found.items() if each is not None}

    def known_noise(self, run: TrialRun, rung_noise: float) -> dict[str, float]:
        """Standard deviations of coordinates and budgets, by name, of those that were measured with an interval.

        Args:
            run: the trial.
            rung_noise: what its quality is worth less for being of a rung below the top.
        """
        found = {check.name: check.log_sd for check in run.checks}
        for index, objective in enumerate(self._space.objectives):
            if (known := self._axis(run, index)) is not None:
                extra = rung_noise if METRICS[objective.metric].source == "proxy" else 0.0
                found[objective.name] = math.hypot(known.sd, extra)
        return {name: sd for name, sd in found.items() if sd > 0}

    def corner(self) -> tuple[float, ...] | None:
        """The reference point in the order of `coordinates`, once it is fixed."""
        point = self.named_reference_point()
        return None if point is None else tuple(point[name] for name in self._quality_first())

    def coordinates(self, run: TrialRun) -> Sequence[float]:
        """All coordinates of a trial that finished a rung, quality first."""
        known = self.known_coordinates(run)
        return [known.get(name, math.inf) for name in self._quality_first()]

    def _quality_first(self) -> list[str]:
        order = sorted(self._space.objectives, key=lambda each: METRICS[each.metric].source != "proxy")
        return [each.name for each in order]

    def _axis(self, run: TrialRun, index: int) -> Axis | None:
        objective = self._space.objectives[index]
        if METRICS[objective.metric].source == "proxy":
            if run.quality is None:
                return None
            proxy = proxy_of(run.layout, self._space.quality).id
            return axis(self._space, objective, {}, {}, QualityValue(run.quality.value, run.quality.sd, proxy))
        if not self.figures_ready:
            return None
        return axis(self._space, objective, run.figures, self._figures[PUBLISHED], _NO_QUALITY)

    def _as_json(self) -> dict[str, Any]:
        return {
            "figures": {name: figures_json(taken) for name, taken in self._figures.items()},
            "quality": {scale.rung: scale.model_dump(mode="json") for scale in self._rungs.values()},
            "final_quality": {name: list(pair) for name, pair in self._final.items()},
        }


def figures_json(taken: TakenFigures) -> list[dict[str, Any]]:
    """Figures by place as JSON, the same in whatever order they were taken."""
    return [
        {**place._asdict(), "figures": {name: figure.model_dump(mode="json") for name, figure in figures.items()}}
        for place, figures in sorted(taken.items())
    ]


def figures_from_json(data: list[dict[str, Any]]) -> TakenFigures:
    """What `figures_json` wrote."""
    return {
        Place(row["device"], row["runtime"], row["workload"]): {
            name: Figure.model_validate(figure) for name, figure in row["figures"].items()
        }
        for row in data
    }
