"""State of a trial while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.layout import Layout
from nas.core.scoring import BudgetCheck, Figures
from nas.measure.runtimes.base import Artifact
from nas.search.proxy.quality import Quality


@dataclass
class TrialRun:
    """One trial under way.

    Args:
        number: of the trial.
        layout: its layout.
        reference: its name among the references, or None; references are exempt from budgets and always promoted.
        artifacts: runtime -> the exported model.
        figures: measured so far.
        checks: verdicts on the budgets of devices and files.
        quality: at the highest rung so far.
        rung: the highest one that it entered.
        waiting: whether it waits for other trials, with nothing to do itself.
        stage: what it does now, or how it ended.
        ended: whether it came to an end in this process.
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
    stage: str = "proposed"
    ended: bool = False
    failed: CandidateFailed | InfrastructureFailed | None = None

    @property
    def retryable(self) -> bool:
        """True if an infrastructure failure ended it."""
        return isinstance(self.failed, InfrastructureFailed)

    @property
    def broken(self) -> list[BudgetCheck]:
        """Those that it exceeds."""
        return [check for check in self.checks if check.verdict == "infeasible"]

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Marks the trial as waiting while the context is open."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
