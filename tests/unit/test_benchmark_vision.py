"""The benchmark of models of images: its data, its run from an archive to a page, and that it continues."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import vision
from benchmarks.vision import KINDS, Sizes

COLOURS = {"red": (220, 30, 30), "blue": (20, 40, 230)}
SIZES = Sizes(
    layout="d32 v512 ffn=swiglu:32 [C3 A2/1]",
    tower={**Sizes().tower, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    tokens=2048,
    tasks=40,
    epochs=dict.fromkeys(vision.STAGES, 0.5),
    test_tokens=(4, 16),
)


def archive(count: int) -> zipfile.ZipFile:
    """A package with pictures of one colour."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as written:
        for part in ("train", "test"):
            questions = []
            for number in range(count):
                name = ("red", "blue")[number % 2]
                picture = io.BytesIO()
                Image.new("RGB", (64, 64), COLOURS[name]).save(picture, "PNG")
                written.writestr(f"easy_vqa/data/{part}/images/{number}.png", picture.getvalue())
                answers = {
                    "What shape?": "circle",
                    "What colour?": name,
                    "Is it red?": "yes" if name == "red" else "no",
                }
                questions += [[question, answer, number] for question, answer in answers.items()]
            written.writestr(f"easy_vqa/data/{part}/questions.json", json.dumps(questions))
    return zipfile.ZipFile(content)


@pytest.mark.exhaustive
def test_a_model_is_trained_and_scored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    topics = {f"topic{n}": f"Text number {n} about nothing at all. " * 99 for n in range(12)}
    monkeypatch.setattr(vision, "topics", topics)
    vision.write_data(archive(12), tmp_path / "data", 1)
    vision.run(tmp_path, [0], SIZES)
    record = vision.recorded(tmp_path, [0, 1], SIZES)
    assert list(record["seeds"]) == ["0"]
    assert record["kinds"] == list(KINDS) * 4 and record["train"] == 36
    assert record["blind"].count("1") >= 4  # all are circles
    scores = record["seeds"]["0"]
    assert list(scores) == ["before", *vision.STAGES, "joint with fewer"]
    assert (
        scores["joint"]["marks"].keys() == {"4", "16"}
        and scores["mid"]["marks"].keys() == {"16"}
        and len(scores["joint"]["marks"]["16"]) == 12
    )
    assert 0 < scores["joint"]["text"]["bits_per_byte"] < 12
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    vision.run(tmp_path, [0], SIZES)
    assert vision.recorded(tmp_path, [0], SIZES) == record
    again = {path for path, moment in written.items() if path.stat().st_mtime_ns != moment}
    assert not {path.name for path in again} & {"model.safetensors", "weights.safetensors", "joint.json"}
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in ("answers", "tokens", "text")))
    vision.write_page(page, record)
    assert page.read_text().count("after joint") == 2 and "| 16 | " in page.read_text()


def test_shares_are_of_questions_and_seeds() -> None:
    kinds = np.array(["shape", "colour", "yes or no", "shape"])
    shape, colour, other, whole = vision._shares(["1101", "1000"], kinds)
    assert (shape[:5], colour[:5], other[:5], whole[:5]) == ("0.750", "0.500", "0.000", "0.500")
