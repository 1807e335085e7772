"""Studies of vision and of audio, launched with a fake runtime; the real runner with images and with sounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runner import nas
from study_lab import WITHOUT_RAY, Lab
from test_audio_space import AUDIO
from test_audio_space import TASKS as SOUND_TASKS
from test_vision_space import TASKS, VISION

from nas.core.layout import Layout
from nas.core.measurement import TTFT_PARTS
from nas.core.tower import ImageTower
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build

SOUND = "sound:64x2:heads=2:connector=64:channels=32"
LAYOUT = "d64 v256 tower=64x2:heads=2:connector=64:{} ffn=swiglu:64 [C3 A4/2 C3]"


@pytest.mark.exhaustive  # one to two minutes
@pytest.mark.parametrize(
    ("space", "tasks", "changes"), [(VISION, TASKS, {"cells": 1}), (AUDIO, SOUND_TASKS, {})], ids=["images", "sounds"]
)
def test_a_launch_ends_with_a_front_of_quality_and_latency(
    tmp_path: Path, space: dict[str, Any], tasks: dict[str, Any], changes: dict[str, int]
) -> None:
    lab = Lab(tmp_path / "lab", program=WITHOUT_RAY)
    learned = {
        name: {"steps": 100, "batch": 16, "settings": task["settings"] | changes} for name, task in tasks.items()
    }
    few = {
        "protocol": {"screen_repetitions": 2, "confirm_repetitions": 2, "remeasure": None},
        "quality": {**space["quality"], "rungs": [{"name": "only", "tasks": learned}]},
        "search": {"proposer": "ehvi", "seeds": 2},
    }
    lab.space("reading", **{key: value for key, value in {**space, **few}.items() if key != "name"})
    report = lab.json_here(*lab.launch("first", "--trials", "3", space="reading"))
    assert report["state"] == "complete" and report["front"]
    assert [objective["metric"] for objective in report["objectives"]] == ["quality", "ttft"]
    assert all(Layout.parse(member["layout"]).tower for member in report["front"])
    assert "tower=" in lab.run_here("study", "show", "first").out


def measured(layout: str, *options: str) -> dict[str, Any]:
    done = nas("bench", layout, "--prompt", "16", "--gen", "4", "--reps", "2", *options, "--json")
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report["figures"]


@pytest.mark.exhaustive
def test_the_runner_encodes_images(image_build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    for line, height, width in (("tokens=64", 256, 256), ("tokens=16:least=4", 300, 200), ("factor=4", 64, 1000)):
        layout = LAYOUT.format(line)
        figures = measured(layout, "--image-height", str(height), "--image-width", str(width))
        tower = Layout.parse(layout).tower
        assert isinstance(tower, ImageTower)
        rows, columns = tower.grid(height, width)
        assert figures["image_tokens"]["value"] == rows * columns, line
        parts = [figures[name]["value"] for name in TTFT_PARTS["images"]]
        # Each is the median of its shares in the repetitions, and medians do not add up exactly.
        assert min(parts) > 0 and sum(parts) == pytest.approx(figures["ttft"]["value"], rel=0.05)
    two = measured(LAYOUT.format("tokens=64"), "--images", "2", "--image-height", "256", "--image-width", "256")
    assert two["image_tokens"]["value"] == 128
    blind = measured(LAYOUT.format("tokens=64"), "--images", "0")
    assert "image_tokens" not in blind and blind["peak_rss"]["value"] < two["peak_rss"]["value"]


@pytest.mark.exhaustive
def test_the_runner_encodes_sounds(image_build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path / "home"))
    layout = LAYOUT.format("factor=2").replace("64x2:heads=2:connector=64:factor=2", SOUND)
    for seconds in (0.5, 1.28):
        figures = measured(layout, "--seconds", str(seconds))
        tower = Layout.parse(layout).tower
        assert tower is not None and figures["sound_tokens"]["value"] == tower.tokens_of(seconds)
        parts = [figures[name]["value"] for name in TTFT_PARTS["sounds"]]
        assert min(parts) > 0 and sum(parts) == pytest.approx(figures["ttft"]["value"], rel=0.05)
        assert figures["sound_factor"]["value"] == pytest.approx(sum(parts[:3]) / (1000 * seconds), rel=0.05)
    two = measured(layout, "--sounds", "2", "--seconds", "1")
    assert two["sound_tokens"]["value"] == 26
    deaf = measured(layout, "--sounds", "0")
    assert "sound_tokens" not in deaf and deaf["peak_rss"]["value"] < two["peak_rss"]["value"]


@pytest.mark.exhaustive
def test_a_damaged_tower_is_refused_in_one_line(image_build: Build, tmp_path: Path) -> None:
    layout = Layout.parse(LAYOUT.format("tokens=64"))
    from nas.measure.runtimes.base import RandomWeights, projector_path
    from nas.measure.runtimes.runner import local_machine

    LLAMA_CPP.export(layout, "q8_0", RandomWeights(), tmp_path / "m")
    projector = projector_path(tmp_path / "m")
    whole = projector.read_bytes()
    machine = local_machine(image_build.executable, image_build.runner.target)
    sizes = [
        "--images",
        "1",
        "--image-height",
        "64",
        "--image-width",
        "64",
        "--image-tokens",
        "64",
        "--image-least",
        "4",
    ]
    for content in (whole[: len(whole) // 2], b"GGUF", (tmp_path / "m").read_bytes()):
        projector.write_bytes(content)
        run = machine(["--model", "{model}", "--mmproj", str(projector), *sizes], tmp_path / "m", tmp_path / "rows")
        assert run.exit_code == 65 and "the file of the tower was refused" in run.stdout
    run = machine(["--model", "{model}", "--mmproj", str(projector)], tmp_path / "m", tmp_path / "rows")
    assert run.exit_code == 64
