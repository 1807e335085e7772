"""`nas family build`: records, resuming, measurements and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli_runner import nas
from store_support import add_device
from study_support import DEVICE, Bed, ScriptedJobs, bed_of

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.family import (
    TRAINING,
    Family,
    Member,
    MemberTraining,
    family_folder,
    member_folder,
    read_family,
    write_record,
)
from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement
from nas.core.published import LFM2
from nas.core.scoring import MeasurementKey
from nas.core.workload import Workload
from nas.infra.store import artifacts, devices, studies
from nas.infra.store.rows import Health
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm
from nas.measure.protocol.rounds import Jobs
from nas.measure.runtimes.base import Artifact
from nas.testing.fake_runtime import FakeRuntime
from nas.train.release.files import MemberFilesWriter
from nas.train.release.options import FileOptions
from nas.train.scaling.build import BuildOptions, SizeSearch, build, candidates_of
from nas.train.scaling.candidates import candidates, parse_size, parse_sizes
from nas.train.scaling.explain import quality_decision
from nas.train.scaling.measure import Measurer, export_once, measured_of
from nas.train.scaling.source import study_origin


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    folder = tmp_path_factory.mktemp("family")
    bed = bed_of(folder)
    bed.run(5)
    return bed


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def options(bed: Bed, sizes: str = "1M,2M", **more: Any) -> BuildOptions:
    values = {"name": "tiny", "sizes": parse_sizes(sizes), "study": "study", "measure": False, **more}
    return BuildOptions(db=str(bed.store.engine.url), **values)


@dataclass
class BuildLog:
    """Collects a build's log; records files instead of writing them, and fails at `fails_at`."""

    lines: list[str] = field(default_factory=list)
    wrote: list[str] = field(default_factory=list)
    fails_at: str = ""

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def check(self, layout: Layout) -> None:
        if self.fails_at == "check":
            raise InvalidInput("the tokenizer has 300 tokens, the layout 256")

    def write(self, folder: Path, family: Family, member: Member, log: object) -> None:
        assert family.members[-1].size == member.size or member in family.members
        if member.size == self.fails_at:
            raise KeyboardInterrupt
        self.wrote.append(member.size)


def test_members_and_every_decision_are_recorded_and_logged(bed: Bed) -> None:
    log = BuildLog()
    family = build(options(bed), log)
    assert read_family("tiny") == family
    assert [member.size for member in family.members] == ["1M", "2M"]
    assert family.sources and {source.trial for source in family.sources} <= set(range(20))
    for member, size in zip(family.members, parse_sizes("1M,2M"), strict=True):
        assert size.admits(Layout.parse(member.layout).params)
        assert [candidate.layout for candidate in member.tried if candidate.chosen] == [member.layout]
        assert all(candidate.objectives["quality"] > 0 for candidate in member.tried)
        assert {"weights", "width and depth", "order", "layout", "measured"} <= {
            decision.what for decision in member.decisions
        }
        assert not member.measured
    for decision in (*family.decisions, *family.members[0].decisions):
        assert any(decision.value in line and decision.reason in line for line in log.lines)


def test_a_second_build_keeps_what_was_decided_and_adds_sizes(bed: Bed) -> None:
    first = build(options(bed, "2M"), BuildLog())
    log = BuildLog()
    second = build(options(bed, "1M,2M"), log)
    assert [member.size for member in second.members] == ["1M", "2M"]
    assert second.members[1] == first.members[0]
    assert second.made == first.made
    assert any(line.startswith("2M: decided by an earlier run") for line in log.lines)


def test_another_family_of_that_name_is_not_overwritten(bed: Bed) -> None:
    first = build(options(bed, "1M"), BuildLog())
    with pytest.raises(InvalidInput, match="family tiny was built from other winners or with other options"):
        build(options(bed, "1M", seed=1), BuildLog())
    assert read_family("tiny") == first


def test_no_new_family_is_named_like_the_data_of_another_one(bed: Bed) -> None:
    with pytest.raises(InvalidInput, match=r"'tiny\.json' is the address of another family's data"):
        build(options(bed, "1M", name="tiny.json"), BuildLog())
    assert not family_folder("tiny.json").exists()


def test_an_interrupted_build_resumes(bed: Bed) -> None:
    log = BuildLog(fails_at="2M")
    with pytest.raises(KeyboardInterrupt):
        build(options(bed, "1M,2M,4M", files=log), log)
    stopped = read_family("tiny")
    assert ([member.size for member in stopped.members], log.wrote) == (["1M", "2M"], ["1M"])
    log.fails_at = ""
    family = build(options(bed, "1M,2M,4M", files=log), log)
    assert family.members[:2] == stopped.members
    assert log.wrote == ["1M", "1M", "2M", "4M"]  # the writer keeps what is there


def test_files_of_a_trained_member_stay(bed: Bed) -> None:
    log = BuildLog()
    request = options(bed, "1M", files=MemberFilesWriter(FileOptions(gguf=())))
    build(request, log)
    folder = member_folder("tiny", "1M")
    training = MemberTraining(
        checkpoint="0" * 64, config={}, start="random:0", tokens=1, steps=1, curve=(), held_out={}, seconds=1.0,
        device="cpu",
    )  # fmt: skip
    write_record(folder / TRAINING, training)
    (folder / "transformers" / "model.safetensors").write_bytes(b"trained")
    build(request, log)
    assert log.lines[-1] == "1M: it was trained; its files stay as they are"
    assert (folder / "transformers" / "model.safetensors").read_bytes() == b"trained"


def test_a_tokenizer_of_another_vocabulary_is_refused_before_anything_is_measured(bed: Bed) -> None:
    log = BuildLog(fails_at="check")
    with pytest.raises(InvalidInput, match="the tokenizer has 300 tokens"):
        build(options(bed, "1M", files=log, measure=True), log)
    assert not family_folder("tiny").exists()


def test_a_size_that_no_scaling_reaches_stops_the_build_before_the_others(bed: Bed) -> None:
    with pytest.raises(InvalidInput, match=r"1M: no layout of this pattern has .* nearest"):
        build(options(bed, "1M,2M", vocab=65536), BuildLog())
    assert not family_folder("tiny").exists()


def test_a_study_without_a_front_is_refused_with_its_trial_counts(bed: Bed) -> None:
    studies.create(bed.store, "begun", bed.space.model_dump(mode="json"), seed=0, version="0")
    with pytest.raises(InvalidInput, match=r"study begun has no front .*0 complete, .* --layout"):
        candidates_of(options(bed, study="begun"))


def test_a_model_whose_file_is_gone_is_exported_again(store: Store) -> None:
    exports: list[Path] = []

    def export(path: Path) -> Artifact:
        exports.append(path)
        path.write_bytes(b"model")
        return Artifact(
            sha256=sha256_of(path),
            size=5,
            runtime="fake",
            quantisation="q4",
            layout_id="",
            arch="fake",
            weights="random:0",
        )

    first = export_once(store, content_hash("key"), export)
    assert export_once(store, content_hash("key"), export) == first and len(exports) == 1
    artifacts.path(store, first.sha256).unlink()
    assert export_once(store, content_hash("key"), export) == first and len(exports) == 2
    assert artifacts.intact(store, first.sha256)


def test_a_build_needs_a_study_or_layouts(bed: Bed) -> None:
    with pytest.raises(InvalidInput, match=r"--study.*--layout"):
        candidates_of(options(bed, study=None))
    with pytest.raises(UnknownName, match="unknown study"):
        candidates_of(options(bed, study="stud"))
    with pytest.raises(UnknownName, match="runtime"):
        candidates_of(options(bed, runtime="llama"))


def test_given_layouts_are_scaled_under_the_criteria_of_a_space(bed: Bed) -> None:
    request = options(bed, "700M,8B-A1B", study=None, layouts=(Layout.parse(LFM2["LFM2-350M"]),), name="given")
    family = build(request, BuildLog())
    assert (family.study, family.provenance["space"]) == (None, "lfm2")
    assert [member.active < member.parameters for member in family.members] == [False, True]


@pytest.mark.parametrize("study", ["study", None])
@pytest.mark.parametrize("part", ["vectors=64", "tower=768x12"])
def test_layouts_with_more_than_a_language_model_are_refused(bed: Bed, part: str, study: str | None) -> None:
    layout = Layout.parse(f"d128 v256 {part} ffn=swiglu:256 [C3 A2/1]")
    with pytest.raises(InvalidInput, match=f"leave `{part.partition('=')[0]}=` out"):
        candidates_of(options(bed, study=study, layouts=(layout,)))


def test_a_space_of_another_task_is_refused(bed: Bed) -> None:
    layout = Layout.parse(LFM2["LFM2-350M"])
    with pytest.raises(InvalidInput, match="lfm2-colbert is of retrieval"):
        candidates_of(options(bed, "700M", study=None, layouts=(layout,), space="lfm2-colbert"))


def test_a_pattern_that_the_runtime_does_not_carry_is_refused(bed: Bed) -> None:
    parallel = Layout.parse("d128 v256 ffn=swiglu:256 [C3&M16 C3]")
    with pytest.raises(Unsupported, match=r"llama\.cpp does not carry the pattern: layer 0 has two recurrent mixers"):
        candidates_of(options(bed, study=None, layouts=(parallel,)))


# The measured search, with the fake runtime's runs in this process.


REFERENCE = FakeRuntime(Path()).reference_models()[0].id


@dataclass
class FakeFarm:
    """The part of a farm that measuring needs."""

    store: Store
    table: Jobs

    def jobs(self, study: int | None) -> Jobs:
        return self.table


def search(bed: Bed, jobs: Jobs | None = None, log: BuildLog | None = None) -> SizeSearch:
    origin = study_origin(bed.store, "study", (), (), None)
    farm = cast(Farm, FakeFarm(bed.store, jobs or bed.jobs))
    log = log or BuildLog()
    measurer = Measurer(farm, origin.criteria.space, 2, log, {("local", "fake", REFERENCE): bed.target()})
    return SizeSearch(origin, measurer, log)


def shapes(bed: Bed, size: str) -> list[Any]:
    parent = study_origin(bed.store, "study", (), (), None).pattern.parent.layout
    return candidates(parent, parse_size(size), 256)[:3]


def test_candidates_are_measured_and_the_winners_figures_kept(bed: Bed) -> None:
    shortlist = shapes(bed, "1M")
    member = search(bed).member(parse_size("1M"), shortlist)
    assert [candidate.layout for candidate in member.tried] == [candidate.layout.format() for candidate in shortlist]
    assert all(
        candidate.measured[0].device == DEVICE.id and candidate.objectives["latency"] > 0 for candidate in member.tried
    )
    (measured,) = member.measured
    assert (measured.runtime, measured.quantisation, measured.searched) == ("fake", "q4_0", True)
    figures = {(figure.metric, figure.prompt): figure.value for figure in measured.figures}
    assert {("prefill_tps", 64), ("ttft", 64), ("decode_tps", 64), ("peak_rss", 256)} <= figures.keys()
    assert all(value and value > 0 for value in figures.values())
    assert [decision.value for decision in member.decisions if decision.what == "another device"] == ["none"]


def test_decode_speed_is_tokens_over_their_time(bed: Bed) -> None:
    """A slow tail counts, as in comparisons; the median would hide it."""
    number = {name: Figure(value=1.0, unit="-") for name in ("prefill_tps", "ttft", "peak_rss")}
    mean = Figure(value=20.0, low=16.0, high=25.0, unit="ms")
    tail = {"decode_p50": Figure(value=10.0, unit="ms"), "decode_mean": mean}
    measurement = SimpleNamespace(
        device="box", runtime="fake", workload=Workload(prompt=64, gen=16), figures=number | tail
    )
    place = MeasurementKey("box", "fake", "chat")
    (measured,) = measured_of({place: cast(Measurement, measurement)}, bed.space)
    (speed,) = (figure for figure in measured.figures if figure.metric == "decode_tps")
    assert (speed.value, speed.ci95) == (50.0, (40.0, 62.5))


def test_earlier_measurements_are_reused(bed: Bed) -> None:
    before = search(bed).member(parse_size("2M"), shapes(bed, "2M"))
    assert search(bed, ScriptedJobs([])).member(parse_size("2M"), shapes(bed, "2M")) == before


def test_a_device_that_goes_offline_is_named_and_the_rest_is_measured_later(bed: Bed) -> None:
    failure = InfrastructureFailed("device box is offline: nothing was heard from its agent 'a' for 60 s")
    log = BuildLog()
    with pytest.raises(InfrastructureFailed, match="device box is offline"):
        search(bed, ScriptedJobs([failure]), log).member(parse_size("3M"), shapes(bed, "3M"))
    assert search(bed).member(parse_size("3M"), shapes(bed, "3M")).measured


def test_candidates_that_crash_are_recorded_and_not_chosen(bed: Bed) -> None:
    shortlist = shapes(bed, "4M")
    crash = CandidateFailed("out_of_memory", "the runner was killed: out of memory")
    scripted = ScriptedJobs([crash])

    @dataclass
    class Once:
        async def run(self, *args: Any, **more: Any) -> Any:
            return await (scripted if scripted.script else bed.jobs).run(*args, **more)

    member = search(bed, cast(Jobs, Once())).member(parse_size("4M"), shortlist)
    assert member.tried[0].verdict == "failed: the runner was killed: out of memory"
    assert member.layout != shortlist[0].layout.format()


def test_the_winner_is_measured_on_a_device_that_the_search_did_not_use(bed: Bed) -> None:
    other = DEVICE.model_copy(update={"id": add_device(bed.store, "other", "elsewhere")})
    size_search = search(bed)
    assert size_search.measurer is not None
    size_search.measurer.benches["other", "fake", REFERENCE] = replace(bed.target(), device=other)
    try:
        member = size_search.member(parse_size("5M"), shapes(bed, "5M"))
    finally:
        devices.set_health(bed.store, "other", Health.RETIRED)
    assert [(model.device, model.searched) for model in member.measured] == [(DEVICE.id, True), ("other", False)]
    assert [decision.value for decision in member.decisions if decision.what == "another device"] == ["other"]


def test_another_device_that_fails_once_is_tried_again_at_the_next_size(bed: Bed) -> None:
    other = DEVICE.model_copy(update={"id": add_device(bed.store, "third", "elsewhere")})
    size_search = search(bed)
    assert size_search.measurer is not None
    size_search.measurer.benches["third", "fake", REFERENCE] = replace(bed.target(), device=other)
    whole = size_search.measurer.measure

    def busy(layout: Layout, on: Sequence[str]) -> Any:
        if list(on) == ["third"]:
            raise InfrastructureFailed("somebody compiles there")
        return whole(layout, on)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(size_search.measurer, "measure", busy)
            first = size_search.member(parse_size("6M"), shapes(bed, "6M"))
        second = size_search.member(parse_size("7M"), shapes(bed, "7M"))
    finally:
        devices.set_health(bed.store, "third", Health.RETIRED)
    assert [decision.reason for decision in first.decisions if decision.what == "another device"] == [
        "not measured on third: somebody compiles there"
    ]
    assert [decision.value for decision in second.decisions if decision.what == "another device"] == ["third"]


def test_the_quality_of_a_pattern_that_the_study_did_not_train_is_assumed(bed: Bed) -> None:
    trained = study_origin(bed.store, "study", (), (), None).criteria
    assert trained.proxies
    other = Layout.parse("d128 v256 ffn=swiglu:448 [A2/2 C4 A2/2 C4]")
    origin = study_origin(bed.store, "study", (other,), (), None)
    assert (origin.criteria.quality, dict(origin.criteria.proxies)) == (1.0, {})
    decision = quality_decision(origin.criteria, other, studied=True)
    assert decision.reason.startswith("1 for all, because the study did not train the pattern")


def test_the_command_builds_and_shows(bed: Bed) -> None:
    db = ("--db", str(bed.store.engine.url))
    sizes = ("--sizes", "1M,2M")
    done = nas("family", "build", "--study", "study", *sizes, "--no-measure", "--no-files", "--name", "mine", *db)
    assert done.code == 0, done.err
    assert [line.split("\t")[0] for line in done.out.splitlines()] == ["size", "1M", "2M"]
    assert "quality:" in done.err
    result = nas("family", "show", "mine")
    assert result.code == 0
    assert all(f"\t{word}\t" in result.out for word in ("feed-forward", "width and depth", "decided"))
    listed = nas("family", "show")
    assert "mine\tstudy\t1M 2M" in listed.out
    assert nas("family", "show", "../mine").code == 3
    assert nas("family", "build", "--sizes", "1B-A2B", "--layout", "LFM2-350M").code == 3
