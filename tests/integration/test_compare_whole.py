"""A comparison from end to end: small models in llama.cpp, through this machine's agent, and once more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compare_references_tiny import tiny

from nas.core import paths
from nas.core.family import FAMILY, Comparison, Family, Member, read_record, write_record
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.compare import published
from nas.train.compare.compare import BenchTask, CompareOptions, ModelSelection, compare

MEMBER = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2 C3]")
TASKS = (
    BenchTask(1024, Workload(prompt=32, gen=8, context=1024), ("peak_rss",), 1),
    BenchTask(64, Workload(prompt=64, gen=16), ("prefill_tps", "decode_tps", "ttft"), 1),
)

pytestmark = pytest.mark.usefixtures("short_reference_runs")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelSelection:
    """Three small reference models, one on our build, and a family of one small member."""
    monkeypatch.setenv("NAS_HOME", str(tmp_path))
    models = {name: tiny(published.REFERENCES[name]) for name in ("Qwen3-0.6B", "PLM-1.8B", "Zebra-Llama-1B-8MLA")}
    monkeypatch.setattr("nas.train.compare.published.REFERENCES", models)
    monkeypatch.setattr("nas.train.compare.compare.REFERENCES", models)
    member = Member(
        size="1M", layout=MEMBER.format(), parameters=MEMBER.params.total, active=MEMBER.params.active,
        non_embedding=MEMBER.params.non_embedding, decisions=(), tried=(),
    )  # fmt: skip
    family = Family(name="demo", made="", seed=0, pattern="", sources=(), decisions=(), members=(member,))
    write_record(paths.home() / "families" / "demo" / FAMILY, family)
    return ModelSelection(family="demo", references=tuple(models))


def test_members_and_references_are_measured_once(
    llama_build: Build, patched_build: Build, small: ModelSelection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the device's calibration holds, on which every result depends."""
    monkeypatch.setattr("nas.measure.protocol.calibration.off_by", lambda ratios: (0.0, False))
    options = CompareOptions(small, workloads=TASKS)
    messages: list[str] = []
    first, path = compare(options, messages.append)
    assert [model.name for model in first.models] == ["demo-1M", "Qwen3-0.6B", "PLM-1.8B", "Zebra-Llama-1B-8MLA"]
    assert [model.architecture for model in first.models] == ["lfm2", "qwen3", "plm", "hilnas"]
    for model in first.models:
        positive = {figure.metric for figure in model.measured.figures if figure.value and figure.value > 0}
        assert positive == {metric for task in TASKS for metric in task.metrics}, model
        assert not model.measured.searched
    assert [model.member for model in first.models] == [True, False, False, False]
    assert {(ratio.model, ratio.other) for ratio in first.ratios} == {
        ("demo-1M", "Qwen3-0.6B"),
        ("demo-1M", "PLM-1.8B"),
        ("demo-1M", "Zebra-Llama-1B-8MLA"),
    }
    assert any("PLM-1.8B" in note and "flash attention" in note for note in first.notes)
    assert "AVX2" in first.conditions["instructions"] or "NEON" in first.conditions["instructions"]
    assert read_record(path, Comparison) == first
    assert path.parent.name == "demo"
    again, _ = compare(options, messages.append)
    assert json.loads(again.model_dump_json(exclude={"made"})) == json.loads(first.model_dump_json(exclude={"made"}))
