"""`benchmarks.adapt bits`: every way gives a file of the size, and the first one the least sum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapt_lab import QUICK, alone, sources, write_lab

from benchmarks import adapt_bits
from nas.core import paths
from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.adapt.healing import Healing
from nas.train.adapt.library import Library, TrainedTeacher


def test_ways_choose_files_of_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_build: Build) -> None:
    monkeypatch.setattr(adapt_bits, "RECORDED", tmp_path / "recorded.json")
    monkeypatch.setattr(adapt_bits, "SHARES", (0.7,))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/runtimes").symlink_to(paths.cache() / "runtimes")
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    lab, worker = write_lab(tmp_path / "lab"), alone()
    teacher = TrainedTeacher.load(lab / "teacher.safetensors", worker.device)
    text, healing = sources(lab), Healing(tokens=256, length=32, batch_tokens=256)
    library = Library(tmp_path / "library", teacher, text, QUICK.library, worker)
    adapt_bits.run(library, text, 8, healing, tmp_path)
    record = json.loads(adapt_bits.RECORDED.read_text())
    (row,) = record["rows"]
    assert {"together", "blocks, then bits", "blocks in Q8_0", "blocks in Q4_0"} <= row["ways"].keys()
    assert all(way["size"] <= row["limit"] < record["size"] for way in row["ways"].values())
    assert min(way["expected"] for way in row["ways"].values()) == row["ways"]["together"]["expected"]
    assert Layout.parse(row["ways"]["blocks in Q4_0"]["layout"]).quantisation.endswith("q4_0")
    children = {path: path.stat().st_mtime_ns for path in (tmp_path / "bits").glob("*.json")}
    adapt_bits.run(library, text, 8, healing, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bits").glob("*.json")} == children
    assert adapt_bits.table_of(record).count("| 70% |") == len(row["ways"])
