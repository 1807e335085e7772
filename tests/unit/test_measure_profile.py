"""Profiles: what a profiler reports is checked, summed by part and operator, and shown by `nas bench --profile`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from cli_runner import Outcome, nas
from store_support import StillClock, open_store
from study_support import DEVICE, tiny_space

from nas.core.errors import CandidateFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.plan import InputFile, Pair, Plan, RawRun, Round, RoundResult
from nas.core.profile import Profile, ProfileSummary, summary
from nas.infra.store import agents, artifacts, devices, events, studies, trials
from nas.infra.store.rows import NewTrial
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, LocalAgent
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from nas.measure.farm.trust import Admissions, SigningKey
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.runner import read_profile
from nas.search.analysis.record import read_study
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.study.events import Profiled
from nas.serve.dashboard.pages import render
from nas.serve.views.candidate import candidate_views
from nas.testing.fake_runtime import FakeRuntime
from nas.testing.run_plan import run_plan

LAYOUT = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2 ^0]")
PREFILL = [
    [None, "embedding", "GET_ROWS", 1, 100],
    [0, "mixer", "MUL_MAT", 2, 300],
    [0, "ffn", "MUL_MAT", 3, 400],
    [1, "mixer", "FLASH_ATTN_EXT", 1, 100],
    [None, "head", "MUL_MAT", 1, 100],
]
DECODE = [[0, "mixer", "MUL_MAT", 8, 4_000_000], [1, "mixer", "FLASH_ATTN_EXT", 4, 12_000_000]]
GOOD = {
    "v": 1,
    "prompt": 32,
    "gen": 4,
    "finite": True,
    "prefill": {"whole_ns": 900, "profiled_ns": 1100, "nodes": PREFILL},
    "decode": {"whole_ns": 15_000_000, "profiled_ns": 17_000_000, "nodes": DECODE},
}


def run(report: object, **fields: Any) -> RawRun:
    return RawRun(exit_code=0, stdout=json.dumps(report), wall_s=1.0, started_at=0.0).model_copy(update=fields)


def profile(report: object = GOOD) -> Profile:
    return read_profile(run(report))


def changed(**fields: object) -> dict[str, object]:
    """The report with other fields of its prefill."""
    return GOOD | {"prefill": {**cast(dict[str, object], GOOD["prefill"]), **fields}}


def test_times_are_of_the_prompt_and_of_one_token_and_shares_of_all_nodes() -> None:
    times = summary(profile(), LAYOUT)
    assert times["prefill"] == {"whole_ms": 900e-6, "profiled_ms": 1100e-6, "sum_ms": pytest.approx(1e-3)}
    assert times["decode"] == {"whole_ms": 3.75, "profiled_ms": 4.25, "sum_ms": 4.0}
    parts = {(part["layer"], part["block"] or part["part"]): part for part in times["parts"]}
    assert list(parts) == [
        (None, "embedding"), (0, "C3"), (0, "swiglu:512"), (1, "A4/2"), (1, "swiglu:512"), (2, "C3"), (2, "swiglu:512"),
        (None, "head"),
    ]  # fmt: skip
    assert parts[0, "swiglu:512"]["prefill_share"] == pytest.approx(0.4)
    assert parts[1, "A4/2"]["decode_ms"] == pytest.approx(3.0)
    assert parts[1, "A4/2"]["decode_share"] == pytest.approx(0.75)
    assert parts[2, "C3"]["decode_ms"] == parts[2, "C3"]["prefill_share"] == 0.0
    operators = {one["operator"]: one for one in times["operators"]}
    assert list(operators) == ["FLASH_ATTN_EXT", "MUL_MAT", "GET_ROWS"], "slowest of decode first"
    assert operators["MUL_MAT"]["prefill_share"] == pytest.approx(0.8)
    assert operators["GET_ROWS"]["decode_ms"] == 0.0


def test_without_a_layout_parts_are_those_of_the_profile_in_order() -> None:
    shuffled = changed(nodes=PREFILL[::-1])
    parts = [(part["layer"], part["part"], part["block"]) for part in summary(profile(shuffled), None)["parts"]]
    assert parts == [
        (None, "embedding", None), (0, "mixer", None), (0, "ffn", None), (1, "mixer", None), (None, "head", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "message"),
    [([[3, "mixer", "ADD", 1, 1]], "mixer of layer 3"), ([[0, "ffn", "ADD", 1, 1]], "ffn of layer 0")],
)
def test_parts_that_the_model_lacks_are_refused(nodes: list[object], message: str) -> None:
    layout = Layout.parse("d256 v512 ffn=none [C3 A4/2]")
    with pytest.raises(CandidateFailed, match=message) as failure:
        summary(profile(changed(nodes=nodes)), layout)
    assert failure.value.reason == "garbage_output"


def test_steps_are_moved_to_their_layers_and_those_of_one_part_summed() -> None:
    steps = [[None, "head", "ADD", 1, 1], *([i, "mixer", "ADD", 1, 10**i] for i in range(3)), [2, "mixer", "MUL", 1, 7]]
    moved = profile(changed(nodes=steps)).moved([(0, "mixer"), (0, "mixer"), (1, "ffn")])
    assert moved.prefill.nodes == [
        (None, "head", "ADD", 1, 1), (0, "mixer", "ADD", 2, 11), (1, "ffn", "ADD", 1, 100), (1, "ffn", "MUL", 1, 7)
    ]  # fmt: skip
    with pytest.raises(CandidateFailed, match="step 2 of a model of 2"):
        profile(changed(nodes=steps)).moved([(0, "mixer"), (0, "ffn")])


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ([], "no report"),
        (GOOD | {"v": 2}, "version 1"),
        (GOOD | {"extra": 1}, "extra"),
        (GOOD | {"gen": 0}, "gen"),
        (changed(whole_ns=-1), "prefill.whole_ns"),
        (changed(nodes=[[0, "mixer", "MUL_MAT", 1]]), "prefill.nodes.0"),
        (changed(nodes=[[-1, "mixer", "MUL_MAT", 1, 1]]), "prefill.nodes.0.0"),
        (changed(nodes=[[5000, "mixer", "MUL_MAT", 1, 1]]), "prefill.nodes.0.0"),
        (changed(nodes=[[0, "tail", "MUL_MAT", 1, 1]]), "prefill.nodes.0.1"),
        (changed(nodes=[[0, "mixer", "\x1b[31m", 1, 1]]), "prefill.nodes.0.2"),
        (changed(nodes=[[0, "mixer", "M" * 41, 1, 1]]), "prefill.nodes.0.2"),
        (changed(nodes=[[0, "mixer", "MUL_MAT", 0, 1]]), "prefill.nodes.0.3"),
        (changed(nodes=[[0, "mixer", "MUL_MAT", 1, 10**15]]), "prefill.nodes.0.4"),
        (changed(nodes=[[None, "mixer", "MUL_MAT", 1, 1]]), "in no layer"),
        (changed(nodes=[[0, "head", "MUL_MAT", 1, 1]]), "in no layer"),
        (changed(nodes=[[0, "ffn", "ADD", 1, 1]] * 2), "two times"),
        (changed(nodes=[[0, "ffn", "ADD", 1, 1101]]), "longer than the request"),
        (changed(nodes=[[i % 1024, "ffn", f"OP{i // 1024}", 1, 0] for i in range((1 << 15) + 1)]), "prefill.nodes"),
    ],
)
def test_a_damaged_report_is_refused(report: object, message: str) -> None:
    with pytest.raises(CandidateFailed, match=message) as failure:
        profile(report)
    assert failure.value.reason == "garbage_output"


def test_failures_are_those_of_a_runner() -> None:
    for raw, reason in (
        (run(GOOD, timed_out=True), "timeout"),
        (run(GOOD, truncated=True), "garbage_output"),
        (run(GOOD | {"finite": False}), "not_finite"),
        (run({"v": 1, "error": {"kind": "out_of_memory", "message": "no"}}, exit_code=71), "out_of_memory"),
    ):
        with pytest.raises(CandidateFailed) as failure:
            read_profile(raw)
        assert failure.value.reason == reason


@dataclass
class HereJobs:
    """Runs rounds in this process."""

    store: Store
    runtime: FakeRuntime
    plans: list[Plan]

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        self.plans.append(round_.candidate)
        pairs = [
            Pair(
                candidate=self._run(round_.candidate),
                reference=round_.reference and self._run(round_.reference),
                foreign_cpu=0.25,
            )
            for _ in range(round_.repetitions)
        ]
        return RoundResult(pairs=pairs)

    def _run(self, plan: Plan) -> RawRun:
        return run_plan(
            plan,
            self.runtime.runner_folder(plan.runner),
            {name: self._path(file) for name, file in plan.inputs.items()},
        )

    def _path(self, file: InputFile) -> Path:
        model = artifacts.path(self.store, file.travels.sha256)
        if file.recipe is None:
            return model
        path = model.with_suffix(".made")
        path.write_bytes(model.read_bytes()[::-1])
        return path


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, list[Plan]]]:
    """`nas bench` with the fake runtime, whose scripts run here."""
    monkeypatch.setenv("NAS_HOME", str(tmp_path))
    runtime = FakeRuntime(tmp_path / "fake")
    RUNTIMES.add("fake", runtime)
    store = open_store(tmp_path, StillClock())
    agents.register_local(store, "local")
    devices.register(store, "local", [DEVICE], boot_id="boot")
    jobs = HereJobs(store, runtime, [])

    class HereFarm(Farm):
        def jobs(self, study: int | None) -> Any:
            return jobs

    admissions = Admissions(tmp_path, SigningKey.generate(), store.clock)
    farm = HereFarm(store, cast(LocalAgent, None), LeaseMonitor(store, JobNotifier(), agent="local"), admissions)
    monkeypatch.setattr("nas.measure.protocol.bench.open_farm", lambda opened: nullcontext(farm))

    def command(*options: str) -> tuple[Outcome, list[Plan]]:
        jobs.plans.clear()
        arguments = ("--runtime", "fake", "--device", DEVICE.id, "-p", "32", "-n", "4", "--reps", "2")
        return nas("bench", LAYOUT.format(), *arguments, *options), list(jobs.plans)

    return command


def test_one_run_more_shows_where_the_time_goes(bench: Callable[..., tuple[Outcome, list[Plan]]]) -> None:
    done, plans = bench("--profile")
    assert done.code == 0, done.err
    programs = [plan.runner.build for plan in plans]
    assert programs.count(programs[-1]) == len(programs) - 1, "calibration, profile, measurement"
    figures, heading, parts, operators = done.out.split("\n\n")
    assert "decode p50" in figures
    assert "as the sum of all operators" in heading and "when they are not timed (+0 %)" in heading
    assert "0.25 of a core meanwhile" in heading
    rows = [line.split("\t") for line in parts.splitlines()]
    assert rows[0] == ["layer", "block", "prefill ms", "share", "decode ms/token", "share"]
    assert [row[:2] for row in rows[2:-1]] == [
        ["0", "C3"], ["0", "swiglu:512"], ["1", "A4/2"], ["1", "swiglu:512"], ["2", "C3"], ["2", "swiglu:512"]
    ]  # fmt: skip
    assert {row[3] for row in rows[2:-1]} == {row[5] for row in rows[2:-1]} == {"16.7%"}
    assert [line.split("\t")[0] for line in operators.splitlines()] == ["operator", "MIX", "MUL_MAT"]


def test_the_json_has_the_same_times_and_no_profile_unless_it_was_asked_for(
    bench: Callable[..., tuple[Outcome, list[Plan]]],
) -> None:
    times = json.loads(bench("--profile", "--json")[0].out)["profile"]
    assert sum(part["prefill_share"] for part in times["parts"]) == pytest.approx(1.0)
    assert sum(one["decode_ms"] for one in times["operators"]) == pytest.approx(times["decode"]["sum_ms"])
    done, plans = bench("--json")
    assert "profile" not in json.loads(done.out)
    assert len({plan.runner.build for plan in plans}) == 1


@pytest.fixture
def study(bench: Callable[..., tuple[Outcome, list[Plan]]]) -> Iterator[Store]:
    """The database of `nas bench`, with a study whose trial 0 has the layout, and trial 1 another one."""
    store = Store.open()
    row = studies.create(store, "first", tiny_space().model_dump(mode="json"), seed=0, version="0")
    layouts = [LAYOUT, Layout.parse("d128 v256 ffn=swiglu:256 [C3 A2/1]")]
    trials.propose(store, row.id, [NewTrial(layout.to_json(), layout.id) for layout in layouts])
    yield store
    store.close()


def test_a_profile_that_is_kept_is_on_the_page_of_its_trial(
    bench: Callable[..., tuple[Outcome, list[Plan]]], study: Store
) -> None:
    def page() -> str:
        (view,) = candidate_views(study, StudySnapshot(read_study(study, "first")), [0])
        return render("candidate.html", view=view, visitor=None, path="")

    assert "No profile was kept" in page()
    done, _ = bench("--profile", "--json", "--trial", "first/0")
    assert done.code == 0, done.err
    assert "kept with trial first/0" in done.err
    times = json.loads(done.out)["profile"]
    (view,) = candidate_views(study, StudySnapshot(read_study(study, "first")), [0])
    (profile,) = view.profiles
    assert profile.name == f"{DEVICE.id}/fake, 32 tokens in, 4 out, 1 thread"
    assert [part.model_dump() for part in profile.parts] == times["parts"]
    html = page()
    assert profile.name in html and "No profile was kept" not in html
    assert html.count("<progress") == 2 * (len(times["parts"]) + len(times["operators"]))
    bench("--profile", "--trial", "first/0")
    (view,) = candidate_views(study, StudySnapshot(read_study(study, "first")), [0])
    assert len(view.profiles) == 1 and view.profiles[0].at > profile.at, "the newest of a request"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "--trial", "first/1"), "trial first/1 has another layout: d128"),
        (("--profile", "--trial", "first"), "'first' is not a trial; write STUDY/NUMBER"),
        (("--profile", "--trial", "furst/0"), "did you mean 'first'"),
        (("--profile", "--trial", "first/7"), "unknown trial"),
        (("--trial", "first/0"), "and --profile"),
        (("--profile", "--trial", "first/0", "-t", "1,2"), "one layout and request"),
    ],
)
def test_a_profile_that_cannot_be_kept_is_refused_before_anything_is_measured(
    options: tuple[str, ...], message: str, bench: Callable[..., tuple[Outcome, list[Plan]]], study: Store
) -> None:
    done, plans = bench(*options)
    assert done.code == 3 and message in done.err
    assert not plans


def test_a_kept_profile_of_another_layout_is_refused(study: Store) -> None:
    none = {"prefill_ms": 0.0, "prefill_share": 0.0, "decode_ms": 0.0, "decode_share": 0.0}
    whole = {"whole_ms": 1.0, "profiled_ms": 1.0, "sum_ms": 1.0}
    parts = [{"layer": 40, "part": "mixer", "block": "C3", **none}]
    profile = {"prefill": whole, "decode": whole, "parts": parts, "operators": [], "foreign_cpu": None}
    event = Profiled(0, "box", "fake", "b", 32, 4, 1, ProfileSummary.model_validate(profile))
    events.append(study, studies.find_id(study, "first"), event.to_json())
    with pytest.raises(InvalidInput, match="of another layout"):
        candidate_views(study, StudySnapshot(read_study(study, "first")), [0])


@pytest.mark.parametrize("form", ["md", "csv"])
def test_formats_of_one_table_have_no_profiles(form: str, bench: Callable[..., tuple[Outcome, list[Plan]]]) -> None:
    done, plans = bench("--profile", "-f", form)
    assert done.code == 3 and "--profile: profiles are shown by the format table, and by --json" in done.err
    assert not plans


def test_a_runtime_without_a_profiler_is_refused_before_anything_is_measured(
    bench: Callable[..., tuple[Outcome, list[Plan]]], tmp_path: Path
) -> None:
    class Bare(FakeRuntime):
        profiler = None  # type: ignore[assignment]

    RUNTIMES.add("fake", Bare(tmp_path / "bare"))
    done, plans = bench("--profile")
    assert done.code == 3 and "--profile: fake has no profiler" in done.err
    assert not plans
