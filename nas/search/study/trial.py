"""The life of one trial: export, budget check, rungs of training, confirmation.

Written as if nothing could fail: every stage goes through `Stages`, which finds what was done before, so running a
trial again after a kill continues where it stopped. The store, not this coroutine, knows the trial's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.scoring import BudgetCheck, Figures, MeasurementKey, check_budgets, measurement_keys, with_file_size
from nas.core.trial import EventKind
from nas.measure.runtimes.base import Artifact
from nas.search.proxy.quality import Quality
from nas.search.study.events import QualityKnown
from nas.search.study.ledger import Ledger
from nas.search.study.promotion import PromotionController
from nas.search.study.scales import Scales
from nas.search.study.stages import StageWork, side_by_side


@dataclass
class TrialRun:
    """The state of a trial while it runs.

    Args:
        number: of the trial.
        layout: its layout.
        reference: its name among the references, or None; references are exempt from budgets and always promoted.
        artifacts: runtime -> the exported model.
        figures: measured so far.
        checks: verdicts on the budgets of devices and files.
        quality: at the highest rung so far.
        rung: index of the highest one that it entered.
        waiting: whether it waits for other trials, with nothing to do itself.
        failed: why it failed.
    """

    number: int
    layout: Layout
    reference: str | None
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    checks: list[BudgetCheck] = field(default_factory=list)
    quality: Quality | None = None
    rung: int | None = None
    waiting: bool = False
    failed: CandidateFailed | InfrastructureFailed | None = None

    @property
    def retryable(self) -> bool:
        """True if an infrastructure failure ended it."""
        return isinstance(self.failed, InfrastructureFailed)

    @property
    def broken(self) -> list[BudgetCheck]:
        """Verdicts on the budgets that it exceeds."""
        return [check for check in self.checks if check.verdict == "infeasible"]

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Marks the trial as waiting while the context is open."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False


@dataclass(frozen=True)
class StudyContext:
    """Parts of a study that its trials use.

    Args:
        work: runs the stages.
        ledger: logs events.
        scales: the published reference's figures, and quality relative to it.
        promotion: decides after each rung.
        report: called when something new is known of a trial, with "gated", "rung", "rescored" or its final state.
    """

    work: StageWork
    ledger: Ledger
    scales: Scales
    promotion: PromotionController
    report: Callable[[TrialRun, str], None]


async def run_trial(run: TrialRun, study: StudyContext) -> None:
    """Runs a trial to a terminal state; a failure becomes one."""
    try:
        await _run(run, study)
    except CandidateFailed as error:
        run.failed = error
        _end(run, study, EventKind.FAILED, reason=f"{error.reason}: {error}")
    except InfrastructureFailed as error:
        run.failed = error
        _end(run, study, EventKind.FAILED, reason=str(error), retryable=True)


async def _run(run: TrialRun, study: StudyContext) -> None:
    run.artifacts = await study.work.export_all(run.number, run.layout)
    study.ledger.mark(run.number, EventKind.EXPORTED)
    if not await _check_budgets(run, study):
        return
    if not await _train(run, study):
        return
    await _confirm(run, study)


async def _check_budgets(run: TrialRun, study: StudyContext) -> bool:
    """Measures the candidate with few repetitions; returns whether it keeps its budgets."""
    study.ledger.mark(run.number, EventKind.MEASURING)
    protocol = study.work.space.protocol
    # Relative budgets are multiples of what references measure, so references are measured in full at once.
    repetitions = protocol.confirm_repetitions if run.reference else protocol.screen_repetitions
    # Cheapest workload first: a candidate that exceeds a budget there skips the others.
    for workload in study.work.workloads_by_cost():
        if not await _keeps_budgets(run, study, [workload], repetitions):
            return False
    borderline = {check.key.workload for check in run.checks if check.verdict == "borderline"}
    if borderline and not run.reference:
        near = [str(check) for check in run.checks if check.verdict == "borderline"]
        study.ledger.mark(run.number, EventKind.BORDERLINE, reason="; ".join(near))
        # Fresh repetitions decide, under a key of their own: those that confirm a layout in the end do not let it in.
        if not await _keeps_budgets(run, study, borderline, protocol.confirm_repetitions, replicate=1, final=True):
            return False
    study.ledger.mark(run.number, EventKind.GATED_IN, figures=_objectives(run, study))
    study.report(run, "gated")
    return True


async def _train(run: TrialRun, study: StudyContext) -> bool:
    """Trains rung by rung; returns whether the trial was promoted to the top and keeps its budgets on quality there."""
    rungs = study.work.space.quality.rungs
    for rung in range(len(rungs)):
        study.ledger.mark(run.number, EventKind.TRAINING, rung=rung, name=rungs[rung].name)
        run.rung = rung
        scores = await study.work.train_rung(run.number, run.layout, rung)
        with run.wait():
            quality = (await study.scales.at_rung(rung, run.reference, scores)).quality(scores)
        study.ledger.note_once(run.number, QualityKnown(rung, quality))
        run.quality = quality
        study.report(run, "rung")
        if rung < len(rungs) - 1 and not await _is_promoted(run, study, rung):
            return False
    if broken := [check for check in study.scales.quality_checks(run) if check.verdict == "infeasible"]:
        end_infeasible(run, study, broken)
        return False
    return True


async def _is_promoted(run: TrialRun, study: StudyContext, rung: int) -> bool:
    with run.wait():
        decision = await study.promotion.decide(run, rung)
    if decision.verdict == "stop":
        reason = f"not promoted from rung {study.work.space.quality.rungs[rung].name}"
        reason = f"{reason}: {decision.why}" if decision.why else reason
        _end(run, study, EventKind.STOPPED, reason=reason, rung=rung)
    return decision.verdict == "promote"


async def _confirm(run: TrialRun, study: StudyContext) -> None:
    await study.work.check_equivalence(run.number, run.layout)
    study.ledger.mark(run.number, EventKind.CONFIRMING)
    space = study.work.space
    if await _keeps_budgets(run, study, space.measured, space.protocol.confirm_repetitions, final=True):
        unknown = [str(check) for check in run.checks if check.verdict == "unknown"]
        if run.reference is None and (unknown or study.scales.axes(run) is None):
            raise CandidateFailed("unmeasured", "; ".join(unknown) or "an objective has no figure on these devices")
        quality = run.quality and run.quality.to_json()
        _end(run, study, EventKind.COMPLETE, quality=quality, figures=_objectives(run, study))


def _objectives(run: TrialRun, study: StudyContext) -> list[dict[str, Any]]:
    """Returns the figures of a trial that are objectives, for people who read the log."""
    space = study.work.space
    rows = [
        (objective.name, key, figure)
        for objective in space.objectives
        if METRICS[objective.metric].source != "proxy"
        for key in measurement_keys(space, objective)
        if (figure := run.figures.get(key, {}).get(objective.metric)) is not None and figure.value is not None
    ]
    several = len({(key.device, key.runtime) for _, key, _ in rows}) > 1
    return [
        {
            "name": f"{name} on {key.device}/{key.runtime}" if several else name,
            "value": figure.value,
            "low": figure.low,
            "high": figure.high,
            "unit": figure.unit,
        }
        for name, key, figure in rows
    ]


async def _keeps_budgets(
    run: TrialRun,
    study: StudyContext,
    workloads: Iterable[str],
    repetitions: int,
    *,
    replicate: int = 0,
    final: bool = False,
) -> bool:
    """Measures a trial, and ends it if it exceeds a budget; returns whether it does not. References have no budgets."""

    async def measure(key: MeasurementKey) -> None:
        measurement = await study.work.measure(run.number, run.artifacts[key.runtime], key, repetitions, replicate)
        run.figures = {**run.figures, **with_file_size({key: measurement.figures})}

    # One failure fails the trial: no device stays busy with the other measurements.
    await side_by_side(measure(key) for key in study.work.measurement_keys(workloads))
    if run.reference is None:
        with run.wait():
            published = await study.scales.published_figures()
        run.checks = check_budgets(study.work.space, run.figures, published, final=final)
    if run.broken:
        end_infeasible(run, study, run.broken)
    return not run.broken


def end_infeasible(run: TrialRun, study: StudyContext, broken: Iterable[BudgetCheck], where: str = "") -> None:
    """Ends a trial that breaks budgets; `where` precedes them in the reason."""
    _end(run, study, EventKind.INFEASIBLE, reason=where + "; ".join(map(str, broken)))


def _end(run: TrialRun, study: StudyContext, kind: EventKind, **payload: Any) -> None:
    study.ledger.mark(run.number, kind, **payload)
    study.report(run, kind.value)
