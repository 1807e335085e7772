"""Trainings of `benchmarks.adapt ablations`: one line each, continued."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapt_lab import SETTINGS, alone, sources, write_lab

from benchmarks import adapt_ablations
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
