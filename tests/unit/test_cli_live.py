"""How a running study is shown."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from live_lab import LiveLab
from rich.console import Console

from nas.cli.live import LiveProgress, Progress, draw, line
from nas.core.trial import EventKind
from nas.infra.store import trials
from nas.search.analysis.snapshot import Snapshots
from nas.search.study.estimate import Estimate, Span

ESTIMATE = Estimate(
    seconds=Span(low=90, typical=125, high=250), parts=[], based_on=[], depends_on=[], text="about 2 min"
)


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    """A running study of four trials: two complete ones of the front, one that is trained, and a reference."""
    lab = LiveLab(tmp_path)
    study = lab.study()
    lab.complete(study, 1.04, 0.5, 0.75)
    lab.complete(study, 1.02, 0.25, 0.5)
    for origin in ("proposal", "reference"):
        trial = lab.propose(study, origin)  # type: ignore[arg-type]
        for kind in (EventKind.EXPORTED, EventKind.MEASURING):
            trials.add_event(lab.store, study, trial, kind, {})
    return lab


def progress(lab: LiveLab, estimate: Estimate | None = ESTIMATE) -> Progress:
    return Progress(Snapshots(lab.store).get("study"), 65.0, estimate)


def test_line_has_counts_hypervolume_and_time_left(lab: LiveLab) -> None:
    volume, *parts = "hypervolume", "1 min 05 s", "3/4 proposed", "1 measuring, 2 complete"
    text = line(progress(lab))
    for part in (volume, *parts, "trial 2: measuring; published reference: measuring", "about 2 min"):
        assert part in text
    assert text.endswith("(90 s to 4 min) left")


def test_line_omits_unknown_values(tmp_path: Path) -> None:
    (lab := LiveLab(tmp_path)).study(judged=False)
    assert line(progress(lab, None)) == "1 min 05 s | 0/4 proposed"


def test_a_trial_that_waits_for_others_is_not_at_work(lab: LiveLab) -> None:
    trials.add_event(lab.store, 1, 2, EventKind.GATED_IN, {})
    trials.add_event(lab.store, 1, 2, EventKind.TRAINING, {"rung": 0})
    assert "trial 2: training" in line(progress(lab))
    lab.note_quality(1, 2, 1.0)
    assert "trial 2" not in line(progress(lab))


@pytest.mark.parametrize("width", [60, 200])
def test_screen_shows_the_front_with_brackets_intact(lab: LiveLab, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(draw(progress(lab)))
    text = captured.get()
    assert "front so far" in text
    assert "1.04" in text
    layout = Snapshots(lab.store).get("study").records[0].layout.format()
    assert (layout in text) == (width == 200)
    assert max(map(len, text.splitlines())) <= width


def test_the_state_at_the_end_is_printed(lab: LiveLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveProgress("study", f"sqlite:///{tmp_path / 'nas.db'}", os.cpu_count()) as live:
        live.notice()
        live.notice()
    written = capsys.readouterr()
    assert written.out == ""
    assert [text.split(" | ")[1] for text in written.err.splitlines()] == ["3/4 proposed"]


def test_nothing_is_printed_of_a_study_without_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveProgress("study", f"sqlite:///{tmp_path / 'none.db'}", None):
        pass
    assert capsys.readouterr().err == ""
