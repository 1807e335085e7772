"""A small member that learns to see: easy-VQA (Zhou 2019), questions after shapes and colours with 13 answers.

    python -m benchmarks.vision FOLDER [--page docs/measured/vision.md]

The published data set comes with the package `easy-vqa` (3 MB): 4,000 images of 64 x 64 pixels with
38,575 questions to train, and 1,000 images with 9,673 questions to test. A member of 1.5M weights is pre-trained on the
questions alone, then gets an encoder with random weights; the stages are commands that users have. FOLDER holds data,
family and models: a stopped run continues. The results are in benchmarks/recorded/vision.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import fill, table

RECORDED = Path(__file__).parent / "recorded" / "vision.json"
LAYOUT = "d128 v1024 ffn=swiglu:256 [C3 C3 A4/2 C3 C3 A4/2]"
TOWER = (
    "{hidden_size: 128, intermediate_size: 256, num_hidden_layers: 4, num_attention_heads: 4, patch_size: 8,"
    " num_patches: 64, projector_hidden_size: 256}"
)
COMMON = f"""\
batch: 64
lr: 0.001
held_out: 0
image_tokens: [16, 16]
tower: {TOWER}
"""
STAGES = {
    "connector": "epochs: 0.25\n",
    "joint": "epochs: 2\ntext: 0\nencoder: 1\ntiles: 1\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of data, family and models")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data" / "test.jsonl").exists():
        write_data(folder)
    pretrain(folder)
    stages, start = {}, "vqa/1.5M"
    for stage, settings in STAGES.items():
        (folder / f"{stage}.yaml").write_text(f"stage: {stage}\n{COMMON}{settings}")
        data = ["--data", folder / "data" / "train.jsonl", "--evaluate", folder / "data" / "test.jsonl"]
        nas(folder, "family", "vision", start, *data, "--config", folder / f"{stage}.yaml", "-o", folder / stage)
        stages[stage] = json.loads((folder / stage / "vision.json").read_text())
        start = str(folder / stage)
    record: dict[str, Any] = {"stages": stages, "commonest": commonest(folder), "kinds": len(answers(folder))}
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        write_page(options.page, record)
    print(json.dumps(record, indent=1))


def write_data(folder: Path) -> None:
    """Unpacks the package and writes its questions as conversations about images."""
    # The interpreter that .venv was made with has pip, .venv has not.
    python = getattr(sys, "_base_executable", sys.executable)
    pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "easy-vqa==1.0"]
    subprocess.run([*pip, "-d", str(folder)], check=True)
    data = folder / "data"
    with zipfile.ZipFile(next(folder.glob("easy_vqa-*.whl"))) as wheel:
        for name in wheel.namelist():
            part, _, inner = name.removeprefix("easy_vqa/data/").partition("/")
            if part in ("train", "test") and inner and not inner.endswith("/"):
                path = data / part / inner
                path.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(name) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
    for part in ("train", "test"):
        questions = json.loads((data / part / "questions.json").read_text())
        lines = [
            {"image": f"{part}/images/{image}.png", "question": question, "answer": answer}
            for question, answer, image in questions
        ]
        write_lines(data / f"{part}.jsonl", lines)
    talks = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    texts = [f"{talk['question']} {talk['answer']}" for talk in talks]
    documents = ["\n".join(texts[first : first + 20]) for first in range(0, len(texts), 20)]
    write_lines(folder / "text.jsonl", [{"text": document} for document in documents])


def write_lines(path: Path, lines: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def pretrain(folder: Path) -> None:
    """Makes the member, and trains it on the questions alone."""
    (folder / "pretraining.yaml").write_text("stages: [{name: text, length: 256, share: 1.0}]\nlr: 0.003\n")
    tokenizer, home = folder / "tokenizer.json", folder / "home"
    if not tokenizer.exists():
        nas(folder, "family", "tokenizer", "--vocab", "1024", "--corpus", folder / "text.jsonl", "-o", tokenizer)
    if not (home / "families" / "vqa").exists():
        size = ["--sizes", "1.5M", "--layout", LAYOUT, "--name", "vqa", "--no-measure", "--candidates", "1"]
        nas(folder, "family", "build", *size, "--no-files", "--yes")
    if not (home / "families" / "vqa" / "1.5M" / "files.json").exists():
        text = ["--corpus", folder / "text.jsonl", "--tokenizer", tokenizer, "--tokens", 300_000]
        nas(folder, "family", "train", "vqa", "--size", "1.5M", *text, "--config", folder / "pretraining.yaml")


def nas(folder: Path, *arguments: object) -> None:
    """Runs a command in a home of its own."""
    print("nas", *arguments, file=sys.stderr)
    environment = os.environ | {"NAS_HOME": str(folder / "home")}
    subprocess.run([sys.executable, "-m", "nas.cli", *map(str, arguments)], check=True, env=environment)


def answers(folder: Path, part: str = "test") -> Counter[str]:
    """Returns answer -> how many questions of a part have it."""
    lines = (folder / "data" / f"{part}.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["answer"] for line in lines)


def commonest(folder: Path) -> float:
    """Returns the share of test questions that the commonest answer in training is right for."""
    (answer, _), *_ = answers(folder, "train").most_common(1)
    counts = answers(folder)
    return counts[answer] / counts.total()


def write_page(path: Path, record: dict[str, Any]) -> None:
    """Fills the page's table."""
    rows = [["the commonest answer", "", f"{100 * record['commonest']:.1f} %", "", ""]]
    for stage, about in record["stages"].items():
        before, after = about["before"], about["after"]
        scores = [f"{100 * one['exact answers']:.1f} %" for one in (before, after)]
        rows.append([stage, scores[0], scores[1], f"{about['steps']:,}", f"{about['seconds'] / 60:.0f} min"])
    fill(path, "vision", table(("stage", "before", "after", "steps", "time"), rows))


if __name__ == "__main__":
    main()
