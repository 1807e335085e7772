"""The device of an adaptation: one calibration and build for all figures, and budgets by chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from adapt_lab import FEW, QUICK, adaptation, work_of, write_lab
from cli_runner import nas
from study_support import DEVICE, InlineJobs
from test_farm_benches import Lab

from benchmarks.adapt import ArithmeticBench
from nas.core.durable import locked
from nas.core.errors import CandidateFailed, InvalidInput, StudyChanged, UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm
from nas.measure.runtimes import RUNTIMES
from nas.testing.fake_runtime import FakeRuntime
from nas.train.adapt import device
from nas.train.adapt.device import Bench, DeviceBench, Measured, bench_of
from nas.train.adapt.request import AdaptRequest

SMALL = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")


class Place:
    """A folder of results, and a farm whose device runs the fake runtime here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.output = Lab(folder), folder / "out"
        self.output.mkdir()
        self.jobs = InlineJobs(self.lab.store)

        @contextmanager
        def open_farm(store: Store) -> Iterator[Farm]:
            yield self.lab.farm

        monkeypatch.setattr(device, "open_farm", open_farm)
        monkeypatch.setattr(device, "closing", nullcontext)
        monkeypatch.setattr(Store, "open", lambda db: self.lab.store)
        monkeypatch.setattr(Farm, "jobs", lambda farm, study: self.jobs)

    def request(self, **keys: Any) -> AdaptRequest:
        return AdaptRequest(
            model=Path("m"), corpus=(Path("c"),), output=self.output, device=DEVICE.id,
            **{"budget": ("ttft<=1s",), "runtime": "fake", "prompt": 32, "gen": 4, "reps": 2} | keys,
        )  # fmt: skip

    def bench(self, **keys: Any) -> Bench:
        return bench_of(self.request(**keys), self.lab.messages.append)([SMALL])

    def measured(self, *, fresh: bool = False, **keys: Any) -> tuple[Measured, int]:
        """What a run of the command measures, and the rounds that this takes."""
        before, bench = len(self.jobs.done), self.bench(**keys)
        with bench.opened():
            measured = bench.measure(SMALL, fresh=fresh)
        return measured, len(self.jobs.done) - before


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    return Place(tmp_path, monkeypatch)


def test_a_run_that_continues_uses_figures_of_equal_inputs_alone(place: Place) -> None:
    first, rounds = place.measured()
    assert rounds == 3, "the calibration in two rounds, and the layout"
    assert {"ttft", "decode_p50", "peak_rss", "file_size"} <= first.figures.keys()
    assert place.measured() == (first, 0), "the calibration is that of before, too"
    fresh, rounds = place.measured(fresh=True)
    assert rounds == 1 and fresh.figures["ttft"].n == 2 * 2
    assert place.measured(reps=3)[1] == 1
    longer, rounds = place.measured(prompt=64)
    assert rounds == 3, "another workload has a calibration of its own"
    assert place.measured(prompt=64) == (longer, 0)
    assert place.measured() == (first, 0)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (lambda folder: FakeRuntime(folder, writer_version="2"), "model writer version 1, which is 2 now"),
        (lambda folder: Other(folder), "build "),
    ],
)
def test_figures_of_another_build_are_not_mixed_in(place: Place, tmp_path: Path, now: Any, what: str) -> None:
    place.measured()
    place.lab.runtime = now(tmp_path / "fake")
    RUNTIMES.add("fake", place.lab.runtime)
    with pytest.raises(StudyChanged, match=f"out: .*began with {what}.*name another --output") as refused:
        place.measured()
    assert refused.value.exit_code == 3


class Other(FakeRuntime):
    """Another build of the fake runtime."""

    def _script(self, target: str, source: bytes) -> Any:
        return super()._script(target, source + b"\n# another build\n")


def test_what_the_runtime_does_not_carry_is_no_reason_to_open_a_device(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RUNTIMES.add("fake", FakeRuntime(tmp_path / "fake", refused=frozenset({"conv"})))
    monkeypatch.setattr(device, "open_farm", None)
    with pytest.raises(Unsupported, match="conv blocks are not carried"):
        place.measured()


def test_budgets_of_the_file_alone_open_no_device(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _ = place.measured()
    monkeypatch.setattr(device, "open_farm", None)
    size = place.bench(budget=("file_size<=0.8x",)).measure(SMALL)
    assert size.figures == {"file_size": measured.figures["file_size"]}
    assert isinstance(place.bench(budget=("file_size<=0.8x", "ttft<=1s")), DeviceBench)
    with pytest.raises(UnknownName, match="quantisation"):
        place.bench(budget=("file_size<=0.8x",), quantisation="q9").measure(SMALL)


def test_a_metric_that_the_device_cannot_measure_is_named() -> None:
    unread = Figure(value=None, unit="mJ", reason="no energy counter")
    with pytest.raises(InvalidInput, match="energy_mj_per_token cannot be measured here: no energy counter"):
        device.figure_of({"energy_mj_per_token": unread}, "energy_mj_per_token")


# Budgets by chance.


@dataclass
class NoisyBench(Bench):
    """Figures with noise: `factors` are first figures of further layouts, as multiples of the true, fresh ones."""

    factors: list[float]
    log_sd: float = 0.02
    read: dict[str, float] = field(default_factory=dict)
    calls: list[bool] = field(default_factory=list)
    children: bool = False

    def measure(self, layout: Layout, *, fresh: bool = False) -> Measured:
        factor = 1.0
        if self.children and not fresh:
            factor = self.read.setdefault(layout.id, self.factors.pop(0) if self.factors else 1.0)
        if self.children:
            self.calls.append(fresh)
        return ArithmeticBench(lambda one: {"decode_p50": factor * work_of(one)["decode_p50"]}, self.log_sd).measure(
            layout
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab(tmp_path_factory.mktemp("adapt"))


@pytest.mark.parametrize(
    ("factors", "calls"),
    [
        ([1.0], [False, True]),
        ([0.8], [False, True]),  # lucky, which its fresh figures are not
        ([1.5], [False, False, True]),  # broken for sure, although it is not: another one is selected
    ],
)
def test_fresh_figures_decide_unless_the_first_break_a_budget(
    lab: Path, tmp_path: Path, home: Path, factors: list[float], calls: list[bool]
) -> None:
    bench = NoisyBench(factors)
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", bench=bench, settings=FEW)
    problem = one.choices.problem()
    bench.children = True
    child = one._within(problem)
    assert bench.calls == calls
    assert (
        child.measured["decode_p50"] == work_of(child.layout)["decode_p50"] <= one._budgets(problem.base)["decode_p50"]
    )
    assert 0.5 <= child.chances["decode_p50"] <= 1


def test_lucky_first_figures_let_no_child_in(lab: Path, tmp_path: Path, home: Path) -> None:

    @dataclass
    class Slow(Bench):
        def measure(self, layout: Layout, *, fresh: bool = False) -> Measured:
            return ArithmeticBench(lambda one: {"decode_p50": 1.01 if fresh else 0.99}, 0.02).measure(layout)

    one = adaptation(lab, tmp_path / "out", tmp_path / "library", "", bench=Slow(), settings=FEW)
    one.record["budgets"] = {"decode_p50": 1.0}
    with pytest.raises(InvalidInput, match="none of the choices of blocks that were tried, 1, keeps"):
        one._within(one.choices.problem())


def test_a_choice_that_does_not_run_is_tried_once(lab: Path, tmp_path: Path, home: Path) -> None:
    one = adaptation(lab, tmp_path / "out", tmp_path / "library", settings=FEW)
    problem, tries = one.choices.problem(), list[Layout]()

    def measure(layout: Layout) -> Any:
        tries.append(layout)
        if layout == tries[0]:
            raise CandidateFailed("crash", "signal 11")
        return work_of(layout)

    one.bench = ArithmeticBench(measure)
    child = one._within(problem)
    assert tries.count(tries[0]) == 1 and child.layout == tries[-1] != tries[0]


def test_what_does_not_run_is_left_out(lab: Path, tmp_path: Path, home: Path) -> None:
    def measure(layout: Layout) -> Any:
        if any(mixer.kind == "mlstm" for layer in layout.layers for mixer in layer.mixers):
            raise CandidateFailed("crash", "signal 11")
        return work_of(layout)

    one = adaptation(lab, tmp_path / "out", tmp_path / "library", measure=measure, settings=QUICK)
    names = {option.name for options in one.choices.problem().options.values() for option in options}
    assert "C3" in names and not any(name.startswith("X4") for name in names)


def test_a_folder_is_one_process_at_a_time(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.train.adapt.prepare._LOCK_S", 0.0)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out/.lock"):
        done = nas(
            "adapt", str(lab / "teacher.safetensors"), "-b", "file_size<=0.1MB", "-c", str(lab / "text"), "-o",
            str(tmp_path / "out"), "--tokenizer", str(lab / "tokenizer.json"),
        )  # fmt: skip
    assert done.code == 4
    assert "another process adapts into" in done.err and "name another --output" in done.err
