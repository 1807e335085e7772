"""Comparing models in turns: order, resuming, failures, and the selection of models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from store_support import open_store
from study_support import InlineJobs, calibrated

from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.family import (
    FAMILY,
    FILES,
    Comparison,
    Family,
    MeasuredModel,
    Member,
    MemberFile,
    MemberFiles,
    write_record,
)
from nas.core.layout import Layout
from nas.core.plan import Round, RoundResult
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.infra.store.store import Store
from nas.measure.runtimes.base import Artifact
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.testing.fake_runtime import FakeRuntime
from nas.train.compare.compare import (
    BenchTask,
    CompareOptions,
    Conditions,
    Contender,
    InterleavedBench,
    ModelSelection,
    PartialResults,
    artifact_of,
    comparison,
    comparison_path,
    expected_seconds,
    of_layout,
    report_tasks,
    select_models,
)

SMALL = "d128 v256 ffn=swiglu:320 [C3 A2/1 C3]"
LARGE = "d128 v256 ffn=swiglu:512 [A2/1*6]"
TASKS = (
    BenchTask(32768, Workload(prompt=64, gen=4, context=32768), ("peak_rss",), 1),
    BenchTask(64, Workload(prompt=64, gen=16), ("prefill_tps", "decode_tps", "ttft"), 3),
)


@dataclass
class WatchedJobs:
    """Runs rounds in this process and records their candidates; the device is gone after `gone_after` rounds."""

    inner: InlineJobs
    gone_after: int = 1_000
    candidates: list[str] = field(default_factory=list)

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        if len(self.candidates) == self.gone_after:
            raise InfrastructureFailed(f"{device}: offline")
        self.candidates.append(round_.candidate.inputs["model"].sha256)
        return await self.inner.run(key, number, device, round_, trial)


class Lab:
    def __init__(self, folder: Path, crashing: Sequence[str] = ()) -> None:
        faults = {Layout.parse(text).id: "crash" for text in crashing}
        self.runtime = FakeRuntime(folder / "fake", faults=faults)  # type: ignore[arg-type]
        self.store: Store = open_store(folder)
        self.folder = folder
        self.jobs = WatchedJobs(InlineJobs(self.store))
        reference = self.contenders(SMALL)[0][1]
        self.bench = calibrated(self.jobs.inner, self.runtime, reference, [task.workload for task in TASKS])
        self.benches = {self.runtime.reference_models()[0]: self.bench}
        self.lines: list[str] = []

    def contenders(self, *texts: str) -> list[tuple[Contender, Artifact]]:
        entries = [of_layout(text, Layout.parse(text), self.runtime) for text in texts]
        return [(contender, artifact_of(contender, self.store, self.runtime)) for contender in entries]

    def run(self, *texts: str, replicate: int = 0) -> PartialResults:
        interleaved = InterleavedBench(
            self.benches, self.jobs, self.store, MeasurementSettings(max_attempts=1), replicate=replicate
        )
        return asyncio.run(
            interleaved.run(self.contenders(*texts), TASKS, lambda partial, what: self.lines.append(what))
        )

    def record(self, partial: PartialResults, *texts: str) -> Comparison:
        conditions = Conditions(CompareOptions(ModelSelection()), self.bench, TASKS, "2026-01-01T00:00:00+00:00")
        return comparison(conditions, [contender for contender, _ in self.contenders(*texts)], partial)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def figures(record: Comparison, model: int) -> dict[tuple[str, int], float | None]:
    return {(figure.metric, figure.prompt): figure.value for figure in record.models[model].measured.figures}


def test_models_take_turns(lab: Lab) -> None:
    lab.run(SMALL, LARGE)
    small, large = (artifact.sha256 for _, artifact in lab.contenders(SMALL, LARGE))
    assert lab.jobs.candidates == [small, large] * 4
    assert [line.rsplit(" at ")[-1] for line in lab.lines[:3]] == ["32768 tokens, 1 of 1"] * 2 + ["64 tokens, 1 of 3"]


def test_figures_are_those_of_the_measurements(lab: Lab) -> None:
    partial = lab.run(SMALL, LARGE)
    record = lab.record(partial, SMALL, LARGE)
    small, large = figures(record, 0), figures(record, 1)
    assert set(small) == {("peak_rss", 32768), ("prefill_tps", 64), ("decode_tps", 64), ("ttft", 64)}
    assert small["prefill_tps", 64] == pytest.approx(64e3 / small["ttft", 64])  # type: ignore[operator]
    summary = partial[SMALL, 64].summary()
    assert summary is not None
    assert small["decode_tps", 64] == pytest.approx(1e3 / summary.figures["decode_mean"].value)  # type: ignore[operator]
    assert summary.figures["ttft"].n == 3
    assert small["decode_tps", 64] > large["decode_tps", 64]  # type: ignore[operator]
    assert small["peak_rss", 32768] < large["peak_rss", 32768]  # type: ignore[operator]
    ((low, high),) = {figure.ci95 for figure in record.models[0].measured.figures if figure.metric == "decode_tps"}  # type: ignore[misc]
    assert low <= small["decode_tps", 64] <= high  # type: ignore[operator]
    assert any("mean ratios to the reference model" in note for note in record.notes)


def test_a_second_comparison_measures_only_new_models(lab: Lab) -> None:
    first = lab.record(lab.run(SMALL), SMALL)
    lab.jobs.candidates.clear()
    both = lab.record(lab.run(SMALL, LARGE), SMALL, LARGE)
    ((_, large),) = lab.contenders(LARGE)
    assert lab.jobs.candidates == [large.sha256] * 4
    assert both.models[0] == first.models[0]
    lab.jobs.candidates.clear()
    lab.run(SMALL, replicate=1)
    assert len(lab.jobs.candidates) == 4


def test_a_comparison_resumes_after_the_device_went_offline(lab: Lab) -> None:
    lab.jobs.gone_after = 5
    with pytest.raises(InfrastructureFailed, match=r"box: offline.*the same command resumes"):
        lab.run(SMALL, LARGE)
    assert len(lab.lines) == 5
    lab.jobs.gone_after = 1_000
    lab.jobs.candidates.clear()
    partial = lab.run(SMALL, LARGE)
    assert len(lab.jobs.candidates) == 3
    assert all(len(partial[text, 64].runs) == 3 for text in (SMALL, LARGE))


def test_a_model_that_crashes_has_reasons_and_the_others_have_figures(tmp_path: Path) -> None:
    lab = Lab(tmp_path, crashing=[LARGE])
    record = lab.record(lab.run(SMALL, LARGE), SMALL, LARGE)
    assert len(figures(record, 0)) == 4 and None not in figures(record, 0).values()
    assert set(figures(record, 1).values()) == {None}
    assert {figure.reason for figure in record.models[1].measured.figures} == {"crash: killed by signal 11: no message"}
    count = len(lab.jobs.candidates)
    lab.run(SMALL, LARGE)
    assert len(lab.jobs.candidates) == count, "a failure was tried again"


def test_a_model_larger_than_the_memory_is_not_tried(lab: Lab) -> None:
    ((contender, artifact),) = lab.contenders(SMALL)
    vast = artifact.model_copy(update={"size": 9_000_000_000})
    interleaved = InterleavedBench(lab.benches, lab.jobs, lab.store, MeasurementSettings())
    partial = asyncio.run(interleaved.run([(contender, vast)], TASKS, lambda partial, what: None))
    record = lab.record(partial, SMALL)
    assert {figure.reason for figure in record.models[0].measured.figures} == {
        "too large: 9,000 MB of weights, 1,024 MB of memory on the device"
    }
    assert lab.jobs.candidates == []


def test_pending_figures_are_marked(lab: Lab) -> None:
    lab.jobs.gone_after = 1
    records: list[Comparison] = []
    interleaved = InterleavedBench(lab.benches, lab.jobs, lab.store, MeasurementSettings())
    with pytest.raises(InfrastructureFailed):
        asyncio.run(
            interleaved.run(
                lab.contenders(SMALL), TASKS, lambda partial, what: records.append(lab.record(partial, SMALL))
            )
        )
    values = figures(records[-1], 0)
    assert values.pop(("peak_rss", 32768)) is not None
    assert set(values.values()) == {None}
    assert {figure.reason for figure in records[-1].models[0].measured.figures} == {"", "not measured yet"}


def test_the_workloads_are_the_reports() -> None:
    allocated, short, long = report_tasks(2, 5, flash_attn=False)
    assert (short.workload.prompt, long.workload.prompt) == (1024, 4096)
    assert (short.workload.gen, long.workload.gen) == (100, 100)
    assert (allocated.workload.context, allocated.repetitions, allocated.metrics) == (32768, 1, ("peak_rss",))
    assert {task.workload.threads for task in (allocated, short, long)} == {2}
    assert not any(task.workload.flash_attn for task in (allocated, short, long))


def test_the_estimate_grows_with_models_and_repetitions(lab: Lab) -> None:
    small, large = (contender for contender, _ in lab.contenders(SMALL, LARGE))
    one = expected_seconds([small], TASKS, lab.benches)
    other, both = (expected_seconds(models, TASKS, lab.benches) for models in ([large], [small, large]))
    assert 0 < one < other < both


def family(folder: Path, *layouts: str, files: bool = False) -> None:
    members = []
    for number, text in enumerate(layouts):
        layout = Layout.parse(text)
        measurement = MeasuredModel(
            device="box", runtime="llama.cpp", quantisation="q4_0", threads=1, figures=(), searched=number == 0
        )
        members.append(
            Member(
                size=f"S{number}", layout=text, parameters=layout.params.total, active=layout.params.active,
                non_embedding=layout.params.non_embedding, decisions=(), tried=(), measured=(measurement,),
            )
        )  # fmt: skip
    record = Family(name="demo", made="", seed=0, pattern="", sources=(), decisions=(), members=tuple(members))
    write_record(folder / "families" / "demo" / FAMILY, record)
    if files:
        place = folder / "families" / "demo" / "S0"
        (place / "gguf").mkdir(parents=True)
        (place / "gguf" / "model.gguf").write_bytes(b"weights")
        kinds = [("gguf/f16.gguf", "F16"), ("gguf/model.gguf", "Q4_0")]
        written = [MemberFile(path=path, kind="gguf", quantisation=q, sha256="0" * 64, size=7) for path, q in kinds]
        write_record(place / FILES, MemberFiles(layout=layouts[0], weights="random:0", loads={}, files=tuple(written)))


MEMBERS = (
    "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]",
    "d1536 v65536 ffn=swiglu:6912 [C3*2 A24/8 C3*2 A24/8 C3*2 A24/8 C3 A24/8 C3 A24/8 C3 A24/8 C3]",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NAS_HOME", str(tmp_path))
    return tmp_path


def names(selection: ModelSelection) -> list[str]:
    return [contender.name for contender in select_models(selection, LLAMA_CPP, "box")]


def test_a_family_is_compared_with_the_reference_models_of_its_size_classes(home: Path) -> None:
    family(home, *MEMBERS)
    assert names(ModelSelection(family="demo")) == [
        "demo-S0", "demo-S1", "LFM2-350M", "LFM2-700M", "Qwen3.5-0.8B", "Falcon-H1-0.5B", "Granite-4.0-350M",
        "Granite-4.0-H-350M", "Qwen3-0.6B", "Gemma-3-270M", "SmolLM2-135M", "SmolLM2-360M", "Mamba2-130M",
        "Mamba2-370M", "Mamba2-780M",
    ]  # fmt: skip
    assert names(ModelSelection(family="demo", classes=("700M",))) == [
        "demo-S1", "LFM2-700M", "Qwen3.5-0.8B", "Falcon-H1-0.5B", "Qwen3-0.6B", "Mamba2-780M"
    ]  # fmt: skip
    assert names(ModelSelection(family="demo", alone=True)) == ["demo-S0", "demo-S1"]
    assert names(ModelSelection(family="demo", references=("gemma-3-1b",))) == ["demo-S0", "demo-S1", "Gemma-3-1B"]


def test_members_know_whether_the_search_used_the_device(home: Path) -> None:
    family(home, *MEMBERS)
    box_models = select_models(ModelSelection(family="demo", references=("Qwen3-0.6B",)), LLAMA_CPP, "box")
    phone_models = select_models(ModelSelection(family="demo", references=("Qwen3-0.6B",)), LLAMA_CPP, "phone")
    assert [contender.searched for contender in box_models] == [True, False, False]
    assert [contender.searched for contender in phone_models] == [False] * 3


def test_a_member_takes_part_with_its_own_file(home: Path, lab: Lab) -> None:
    family(home, MEMBERS[0], files=True)
    member = select_models(ModelSelection(family="demo", references=("Qwen3-0.6B",)), LLAMA_CPP, "box")[0]
    assert member.subject == home / "families" / "demo" / "S0" / "gguf" / "model.gguf"
    artifact = artifact_of(member, lab.store, lab.runtime)
    assert (artifact.weights, artifact.size, artifact.recipe) == ("file:model.gguf", 7, None)


def test_every_question_has_a_record_of_its_own(home: Path) -> None:
    family(home, *MEMBERS)
    both = CompareOptions(ModelSelection(family="demo"))
    one = replace(both, models=ModelSelection(family="demo", classes=("350M",)))
    alone = CompareOptions(ModelSelection(classes=("350M",)))
    questions = [
        both,
        one,
        replace(both, threads=4),
        replace(both, flash_attn=False),
        replace(both, replicate=1),
        alone,
    ]
    paths = [comparison_path(question, "box") for question in questions]
    assert len(set(paths)) == len(questions)
    assert {path.parent for path in paths[:-1]} == {home / "families" / "demo"}
    assert comparison_path(replace(both, repetitions=9), "box") == paths[0]


def test_layouts_and_published_names_take_part(home: Path) -> None:
    tiny = "d256 v512 ffn=swiglu:512 [C3 A4/2]"
    selection = ModelSelection(layouts=(tiny, "LFM2-1.2B"), references=("LFM2-1.2B", "PLM-1.8B"))
    assert names(selection) == [f"layout {Layout.parse(tiny).id[:12]}", "LFM2-1.2B", "PLM-1.8B"]
    assert [contender.flash_attn for contender in select_models(selection, LLAMA_CPP, "box")] == [True, True, False]


def test_a_model_that_cannot_be_compared_is_refused_with_the_known_names(home: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nothing to compare: .*Qwen3-0\.6B.*700M"):
        names(ModelSelection())
    with pytest.raises(UnknownName, match="unknown family 'demo'"):
        names(ModelSelection(family="demo"))
    family(home, MEMBERS[0])
    with pytest.raises(UnknownName, match="unknown family 'dmo'; did you mean 'demo'"):
        names(ModelSelection(family="dmo"))
    with pytest.raises(UnknownName, match="--class: unknown size class '2B'"):
        names(ModelSelection(classes=("2B",)))
    with pytest.raises(Unsupported, match=r"llama\.cpp does not carry layout"):
        names(ModelSelection(layouts=("d256 v512 ffn=swiglu:512 [A4/2&W4/2@16]",)))
