"""Trainings of `benchmarks.adapt ablations`: one line each, continued."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from adapt_lab import SETTINGS, alone, sources, write_lab

from benchmarks import adapt_ablations, adapt_real, adapt_scratch
from benchmarks.adapt import PAGE, SIZES, family_of, tables
from nas.core.block import Block
from nas.core.layout import Layout
from nas.core.replacement import slots_of
from nas.train.adapt.alternatives import default_alternatives
from nas.train.adapt.library import Library, TrainedTeacher


def test_every_student_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = write_lab(tmp_path / "lab")
    teacher = TrainedTeacher.load(lab / "teacher.safetensors", torch.device("cpu"))
    library = Library(tmp_path / "library", teacher, sources(lab), SETTINGS.library, alone())
    path = tmp_path / "trainings.jsonl"
    for name, value in {
        "RECORDED": path, "STUDENTS": {"mLSTM": Block.parse("X4(key_dim=16)", "mixer")}, "SEEDS": 1,
        "ARMS": (("attention", "logits"), ("attention", "staged")), "_LENGTH": 32, "_STEPS": 8, "_ALIGNED": 4,
    }.items():  # fmt: skip
        monkeypatch.setattr(adapt_ablations, name, value)
    assert adapt_ablations.run(library, sources(lab), 0.0) == 2
    assert not path.exists()
    assert adapt_ablations.run(library, sources(lab), 1.0) == 0
    logits, staged = adapt_ablations.recorded()
    assert logits["kl_start"] == logits["kl_aligned"] == staged["kl_start"] > staged["kl_aligned"] > 0
    assert logits["kl"] < logits["kl_start"]
    written = path.read_bytes()
    assert adapt_ablations.run(library, sources(lab), 1.0) == 0
    assert path.read_bytes() == written
    assert f"{staged['kl']:.3f}" in adapt_ablations.table_of([logits, staged])


def test_mixes_of_a_family_replace_mixers_by_one_kind_alone() -> None:
    layout = Layout.parse(SIZES["small"].layout)
    assert layout.params.non_embedding >= 8e6
    alternatives = {slot: default_alternatives(layout, slot, 32) for slot in slots_of(layout)}
    for kind in ("conv", "mamba2"):
        mixes = family_of(alternatives, kind, 12)
        assert len({tuple(choice) for choice in mixes}) == 12
        assert mixes[:8] == family_of(alternatives, kind, 8)
        for choice in mixes:
            assert 1 <= len(choice) <= 6
            assert {(slot.part, block and block.kind) for slot, block in choice.items()} == {("mixer", kind)}
    with pytest.raises(ValueError, match="no 2 mixes of gdn"):
        family_of(alternatives, "gdn", 2)


def test_the_page_shows_what_is_recorded() -> None:
    page = PAGE.read_text()
    for table in tables().values():
        assert table in page


def test_a_child_and_a_model_from_scratch_are_measured_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert argv[3:6] == ["bench", "one", "two"]
        results = [{"decode_ms": {"p50": p50, "ci95": [p50 - 1, p50 + 1]}} for p50 in (2.0, 4.0)]
        return subprocess.CompletedProcess(argv, 0, json.dumps({"results": results}))

    monkeypatch.setattr(subprocess, "run", run)
    measured = adapt_scratch._measured({"child": "one", "scratch": "two"})
    assert measured["scratch"] == {"decode_ms": 4.0, "ci95": [3.0, 5.0]} and measured["child"]["decode_ms"] == 2.0


def test_an_adaptation_that_was_killed_is_timed_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def nas(*arguments: object) -> float:
        started.append(sorted(path.name for path in tmp_path.iterdir()))
        (tmp_path / "adapted").mkdir()
        (tmp_path / "adapted-library").mkdir()
        return 3.0

    monkeypatch.setattr(adapt_scratch, "_nas", nas)
    assert [adapt_scratch._adapt(tmp_path, 0.4) for _ in range(2)] == [{"seconds": 3.0}] * 2
    assert started == [["adapt-config.json"]] * 2


def test_text_of_packages_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, text, copytree = tmp_path / "share", tmp_path / "lab/text", shutil.copytree
    for number in range(2):
        document = share / f"doc/{number}.txt"
        document.parent.mkdir(parents=True, exist_ok=True)
        document.write_text(f"{number} " * 400)
    text.parent.mkdir()

    @contextmanager
    def unpacked(packages: object) -> Iterator[Path]:
        shutil.rmtree(share / "text", ignore_errors=True)
        yield share

    def killed(source: Path, target: Path) -> None:
        (target / "stale").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(adapt_real, "unpacked", unpacked)
    monkeypatch.setattr(adapt_real, "_SOURCES", {"manuals": (r"doc/.*\.txt$", 10_000)})
    monkeypatch.setattr(shutil, "copytree", killed)
    with pytest.raises(KeyboardInterrupt):
        adapt_real._write_text(text)
    assert not text.exists()
    monkeypatch.setattr(shutil, "copytree", copytree)
    adapt_real._write_text(text)
    assert sorted(str(path.relative_to(text)) for path in text.rglob("*.txt")) == ["manuals/0.txt", "manuals/1.txt"]
    assert [path.name for path in text.iterdir()] == ["manuals"]
