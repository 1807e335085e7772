"""The study's fixed constants: figures and scores of the references, and the reference point computed from them.

They turn a trial's figures into coordinates. They are fixed as soon as the references have them, and stored with the
study.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nas.core.errors import CandidateFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import METRICS, RECALL_METRIC
from nas.core.pareto import arrays, front_hypervolume, front_mask
from nas.core.scoring import (
    ATTENTION,
    PUBLISHED,
    Axis,
    BudgetCheck,
    Figures,
    QualityValue,
    axis,
    check_quality,
    figures_json,
    reference_point,
    require_figures,
    together,
)
from nas.core.space import Budget, Objective, SearchSpace
from nas.search.proxy.ladder import proxy_of, rung_jobs, seed_counts
from nas.search.proxy.quality import Anchors, QualityScale, Spread, fix_scale, unit_of
from nas.search.study.ledger import Ledger
from nas.search.study.stages import SeedScores, StageWork

if TYPE_CHECKING:
    from nas.search.study.trial import TrialRun

_NO_QUALITY = QualityValue(0.0, 0.0, "")
_FEWEST_ANCHORS = 2
_ORDER = {"quality": 0, RECALL_METRIC: 1}
"""Metrics whose coordinates come first."""


class Scales:
    """Collects the constants of one study.

    Args:
        space: the study's.
        ledger: stores them.
    """

    def __init__(self, space: SearchSpace, ledger: Ledger) -> None:
        self._space, self._ledger = space, ledger
        self._figures: dict[str, Figures] = {}
        self._figures_taken = asyncio.Event()
        self._scores: dict[int, dict[str, SeedScores]] = {}
        self._rungs: dict[int, QualityScale] = {}
        self._anchors: dict[int, Anchors] = {}
        self._changed = asyncio.Condition()
        self._final: dict[str, QualityValue] = {}
        self.reference_point: list[float] | None = None
        self.complete: dict[int, list[Axis]] = {}
        """Axes of the complete trials that count for the front."""

    def named_reference_point(self) -> dict[str, float] | None:
        """Returns objective -> coordinate of the reference point; None until it is fixed."""
        if self.reference_point is None:
            return None
        names = [objective.name for objective in self._space.objectives]
        return dict(zip(names, self.reference_point, strict=True))

    @property
    def hypervolume(self) -> float | None:
        """Hypervolume of the complete trials; None until the reference point is fixed."""
        return None if self.reference_point is None else front_hypervolume(self.complete, self.reference_point)

    @property
    def front(self) -> list[int]:
        """Numbers of the complete trials on the front."""
        trials = sorted(self.complete)
        if not trials:
            return []
        return [trials[index] for index in np.flatnonzero(front_mask(arrays(self.complete, trials)[0]))]

    @property
    def figures_ready(self) -> bool:
        """True if the published reference has been measured."""
        return self._figures_taken.is_set()

    async def published_figures(self) -> Figures:
        """Returns what the published reference measured; waits for it."""
        await self._figures_taken.wait()
        return self._figures[PUBLISHED]

    async def at_rung(self, rung: int, reference: str | None, scores: SeedScores) -> QualityScale:
        """Returns the quality scale of a rung; waits until both references have finished it.

        Raises:
            InvalidInput: the published reference learns nothing on that rung.
        """
        if reference is not None:
            self._scores.setdefault(rung, {})[reference] = scores
        async with self._changed:
            if reference is not None:
                self._fix(rung)
                self._changed.notify_all()
            await self._changed.wait_for(lambda: rung in self._rungs)
        return self._rungs[rung]

    async def learn_anchors(self, rung: int, anchors: Anchors) -> None:
        """Takes the scores of the anchors at a rung, once."""
        self._anchors[rung] = anchors
        async with self._changed:
            self._fix(rung)
            self._changed.notify_all()

    def _fix(self, rung: int) -> None:
        scores, config = self._scores.get(rung, {}), self._space.quality
        awaited = config.anchors is not None and rung not in self._anchors
        if rung in self._rungs or awaited or not {PUBLISHED, ATTENTION} <= scores.keys():
            return
        scale = fix_scale(
            config.rungs[rung].name,
            scores[PUBLISHED],
            [scores[ATTENTION]],
            minimum=config.min_reference,
            anchors=self._anchors.get(rung),
        )
        if (spread := config.spread(rung)) is not None:
            scale = scale.model_copy(update={"spreads": dict.fromkeys(scale.spreads, Spread(*spread))})
        if rung == len(config.rungs) - 1 and not (config.rescore and config.rescore.recalls):
            self._require_recall(scale)
        self._rungs[rung] = scale

    def rescored_by(self, published: SeedScores) -> QualityScale:
        """Returns the scale of the top rung for the seeds of `published`, the published reference's scores there.

        Raises:
            InvalidInput: the space uses recall, of which the published reference learns nothing.
        """
        scale = self._rungs[len(self._space.quality.rungs) - 1].rescored(published)
        self._require_recall(scale)
        return scale

    def _require_recall(self, scale: QualityScale) -> None:
        items: tuple[Budget | Objective, ...] = (*self._space.objectives, *self._space.budgets)
        if scale.recall_spreads or RECALL_METRIC not in (item.metric for item in items):
            return
        why = "; ".join(f"{group}: {reason}" for group, reason in scale.reasons.items())
        raise InvalidInput(f"rung {scale.rung!r} has no group of recall that counts ({why}), but the space uses recall")

    def learn(self, run: TrialRun, status: str) -> None:
        """Takes new results of a trial."""
        if run.reference is not None:
            self._learn_reference(run, run.reference, status)
        elif status in ("complete", "rescored"):
            axes = self.axes(run)
            assert axes is not None, f"trial {run.number} is complete but lacks an objective"
            self.complete[run.number] = axes
        elif status == "infeasible":
            self.complete.pop(run.number, None)

    def _learn_reference(self, run: TrialRun, name: str, status: str) -> None:
        if status == "gated":
            require_figures(self._space, run.figures, f"{name} reference")
            self._figures[name] = run.figures
            if name == PUBLISHED:
                self._figures_taken.set()
        if status == "complete" and run.quality is not None:
            self._final[name] = QualityValue.of(run.quality)
        if self.reference_point is None and {PUBLISHED, ATTENTION} <= self._final.keys():
            self.reference_point = reference_point(
                self._space, self._figures[PUBLISHED], self._figures[ATTENTION], self._final[ATTENTION]
            )
            point = self.named_reference_point()
            assert point is not None
            self._ledger.freeze(self._as_json(), point)

    def axes(self, run: TrialRun) -> list[Axis] | None:
        """Returns the trial's objectives in the space's order; None while one is missing."""
        axes = [self._axis(run, index) for index in range(len(self._space.objectives))]
        return None if any(axis is None for axis in axes) else [axis for axis in axes if axis is not None]

    def known_coordinates(self, run: TrialRun) -> dict[str, float]:
        """Returns objective -> coordinate of those that are known so far."""
        names = [objective.name for objective in self._space.objectives]
        axes = {name: self._axis(run, index) for index, name in enumerate(names)}
        return {name: axis.coordinate for name, axis in axes.items() if axis is not None}

    def quality_checks(self, run: TrialRun, *, final: bool = False) -> list[BudgetCheck]:
        """Returns verdicts on budgets on quality, none of references; open ones are decided if `final`."""
        if run.quality is None or run.reference is not None:
            return []
        return check_quality(self._space, run.quality, final=final or self._space.quality.rescore is None)

    def known_parts(self, run: TrialRun) -> dict[str, dict[str, float]]:
        """Returns what each unit of quality adds to its coordinate, by objective; nothing before quality is known.

        Units are weighed as in the quality itself.
        """
        quality = run.quality
        if quality is None:
            return {}
        weights = next(scale for scale in self._rungs.values() if scale.rung == quality.rung).group_weights
        total = math.fsum(weights.values())
        parts: dict[str, float] = {}
        for group, weight in weights.items():
            parts[unit_of(group)] = parts.get(unit_of(group), 0.0) - quality.per_group[group] * weight / total
        if len(parts) < 2 or not math.isclose(math.fsum(parts.values()), -quality.value, abs_tol=1e-9):
            return {}
        return {objective.name: parts for objective in self._space.objectives if objective.metric == "quality"}

    def known_noise(self, run: TrialRun, rung_noise: float) -> dict[str, float]:
        """Returns standard deviations of coordinates and budgets, by name, of those that have an interval.

        Args:
            run: the trial.
            rung_noise: standard deviation that is added to its quality for a rung below the top.
        """
        deviations = {check.name: check.log_sd for check in run.checks}
        deviations |= {check.name: together(check.log_sd, rung_noise) for check in self.quality_checks(run)}
        for index, objective in enumerate(self._space.objectives):
            if (own_axis := self._axis(run, index)) is not None:
                extra = rung_noise if METRICS[objective.metric].source == "proxy" else 0.0
                deviations[objective.name] = together(own_axis.sd, extra)
        for name, units in self.known_parts(run).items():  # variances of the parts add up to the objective's
            if sd := deviations.get(name):
                deviations |= {f"{name}/{unit}": sd / math.sqrt(len(units)) for unit in units}
        return {name: sd for name, sd in deviations.items() if sd}

    def coordinates(self, run: TrialRun) -> tuple[float, ...]:
        """Returns all coordinates of a trial that finished a rung, quality first; infinity for unknown ones."""
        coordinates = self.known_coordinates(run)
        objectives = sorted(self._space.objectives, key=lambda objective: _ORDER.get(objective.metric, len(_ORDER)))
        return tuple(coordinates.get(objective.name, math.inf) for objective in objectives)

    def _axis(self, run: TrialRun, index: int) -> Axis | None:
        objective = self._space.objectives[index]
        if METRICS[objective.metric].source == "proxy":
            if run.quality is None:
                return None
            proxy = proxy_of(run.layout, self._space.quality).id
            return axis(self._space, objective, {}, {}, QualityValue.of(run.quality, proxy))
        if not self.figures_ready:
            return None
        return axis(self._space, objective, run.figures, self._figures[PUBLISHED], _NO_QUALITY)

    def _as_json(self) -> dict[str, Any]:
        """Returns the constants as they are stored.

        Further references have no part in them, and may be measured earlier or later when a study is resumed: of those
        there is what is stored already.
        """
        stored, names = self._ledger.study.scales or {}, (PUBLISHED, ATTENTION)
        figures = {name: figures_json(self._figures[name]) for name in names}
        final = {name: [self._final[name].value, self._final[name].sd] for name in names}
        return {
            "figures": {**stored.get("figures", {}), **figures},
            "quality": {scale.rung: scale.model_dump(mode="json") for scale in self._rungs.values()},
            "final_quality": {**stored.get("final_quality", {}), **final},
        }


async def train_anchors(work: StageWork, scales: Scales, layouts: Sequence[Layout], trial: int) -> None:
    """Trains the anchors of a study, rung by rung, and passes their scores to the scales.

    A layout that fails at a rung takes no further part, unless too few are left to tell anything.

    Args:
        work: trains.
        scales: waits for the anchors of each rung.
        layouts: the references and the anchors.
        trial: that the trainings are recorded under, the published reference.

    Raises:
        CandidateFailed: fewer than two layouts are left.
        InfrastructureFailed: a worker died, too often.
    """
    config = work.space.quality
    assert config.anchors is not None
    remaining = list(layouts)
    for rung in range(len(config.rungs)):
        ladder = config.with_seeds(config.anchors.seeds)
        trained = [work.train_rung(trial, layout, rung, ladder, anchor=True) for layout in remaining]
        outcomes = await asyncio.gather(*trained, return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in failed:
            if not isinstance(error, CandidateFailed) or len(remaining) - len(failed) < _FEWEST_ANCHORS:
                raise error
        scores = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        remaining = [
            layout
            for layout, outcome in zip(remaining, outcomes, strict=True)
            if not isinstance(outcome, BaseException)
        ]
        counts = seed_counts(rung_jobs(config, rung, remaining[0], work.corpus))
        await scales.learn_anchors(rung, Anchors(scores, counts))
