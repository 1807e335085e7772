"""`nas adapt` with a real device: a tiny trained model, measured by llama.cpp on this machine; and a full disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from adapt_lab import LAYOUT, QUICK, work_of, write_lab
from cli_runner import Outcome, nas

from benchmarks.adapt import ArithmeticBench
from nas.core.canonical import sha256_of
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.executorch.variants import Build as ExecuTorchBuild
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.model.text.documents import read_sources
from nas.train.adapt.device import DeviceBench, Measured
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

MEGABYTE = 1 << 20


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, settings, and a trained model as transformers has it."""
    lab = write_lab(tmp_path / "lab")
    weights = Checkpoint(lab / "teacher.safetensors", sha256_of(lab / "teacher.safetensors"))
    options = FileOptions(name="m", tokenizer=lab / "tokenizer.json", gguf=(), dtype="float32")
    write_files(lab / "files", LAYOUT, weights, options, print)
    settings = QUICK.model_copy(update={"points": 2})
    (lab / "settings.json").write_text(settings.model_dump_json())
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NAS_DB", raising=False)
    return lab


def adapt(lab: Path, output: Path, *arguments: str) -> Outcome:
    return nas(
        "adapt", str(lab / "files/transformers"), "-c", str(lab / "text"), "-o", str(output), "--library",
        str(lab / "library"), "--config", str(lab / "settings.json"), "--gguf", "f16", *arguments,
    )  # fmt: skip


@pytest.mark.usefixtures("llama_build", "patched_build", "short_reference_runs")
@pytest.mark.timeout(3600)
@pytest.mark.exhaustive  # some minutes; by default test_adapt_adapt.py runs the command with an arithmetic device
def test_a_child_is_measured_by_llama_cpp(lab: Path, executorch_build: ExecuTorchBuild, tmp_path: Path) -> None:
    done = adapt(
        lab, tmp_path / "out", "-b", "file_size<=0.08MB", "-b", "decode_p50<=1s", "--prompt", "16", "--gen", "4",
        "--reps", "2", "--json", "--pte",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads(done.out)
    teacher, child = report["teacher"], report["child"]
    assert Layout.parse(teacher["layout"]) == LAYOUT != Layout.parse(child["layout"])
    assert child["measured"]["file_size"] <= 0.08 < teacher["measured"]["file_size"]
    assert 0 < child["measured"]["decode_p50"] <= 1000
    assert child["measured"]["peak_rss"] > child["measured"]["file_size"]
    layouts = {member["layout"] for member in report["front"]}
    assert len(layouts) == len(report["front"]) >= 1

    files = {Path(path).name: Path(path) for path in report["files"]}
    card = files["README.md"].read_text()
    for name in ("file_size", "decode_p50"):
        assert f"{child['measured'][name]:.4g}, of the model it comes from {teacher['measured'][name]:.4g}" in card
    lost = f"{child['bits_per_byte']:.4f}, of the model it comes from {teacher['bits_per_byte']:.4f}"
    assert lost in card
    assert files["child-F16.gguf"].is_file() and any(name.endswith(".pte") for name in files)
    held_out = [document.held_out for source in read_sources([lab / "text"], 0.2) for document in source.documents]
    scored = LLAMA_CPP.bits_per_byte(files["child-F16.gguf"], [text for text in held_out if text], 1)
    assert scored == pytest.approx(child["bits_per_byte"], rel=0.3), "windows of other lengths"
    assert adapt(
        lab, tmp_path / "out", "-b", "file_size<=0.08MB", "-b", "decode_p50<=1s", "--prompt", "16", "--gen", "4",
        "--reps", "2", "--json", "--pte",
    ).out == done.out  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Returns what sets the size of a disk, in bytes, and returns its folder."""
    place, options = tmp_path / "disk", "size={}"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options.format(MEGABYTE), "tmpfs", str(place)], check=True)

    def resized(size: int) -> Path:
        subprocess.run(["mount", "-o", f"remount,{options.format(size)}", str(place)], check=True)
        return place

    yield resized
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def arithmetic(bench: DeviceBench, layout: Layout, *, fresh: bool = False) -> Measured:
    return ArithmeticBench(work_of).measure(layout, fresh=fresh)


@pytest.mark.needs("devices")
def test_a_disk_that_fills_up_is_said_and_the_same_command_continues(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_disk: Callable[[int], Path]
) -> None:
    monkeypatch.setattr(DeviceBench, "measure", arithmetic)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 40))  # others fill it later
    limit = f"decode_p50<={0.8 * work_of(LAYOUT)['decode_p50']}ms"
    reached = []
    for size in (MEGABYTE // 4, 2 * MEGABYTE):
        done = adapt(lab, small_disk(size) / "out", "-b", limit)
        assert done.code == 4
        assert len([line for line in done.err.splitlines() if line.startswith("nas: ")]) == 1, done.err
        assert "the disk is full" in done.err or "No space left" in done.err
        reached.append((small_disk(size) / "out/front.json").exists())
    assert reached == [False, True], "while it was imported, and while it was healed"
    done = adapt(lab, small_disk(64 * MEGABYTE) / "out", "-b", limit, "--json")
    assert done.code == 0, done.err
    calm = adapt(lab, tmp_path / "calm", "-b", limit, "--json")
    assert json.loads(calm.out)["child"] == json.loads(done.out)["child"]
