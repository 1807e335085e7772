"""Do summed scores of a library rank healed children? Kendall's tau over mixes of alternatives.

A teacher is trained on the default corpus, a library is built, mixes are drawn, and each is assembled and healed. Each
step and each mix is one file of the folder: run again, the script goes on.

    python -m benchmarks.adapt FOLDER [--size small|tiny] [--mixes 20]
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import kendalltau

from nas.adapt.adapt import Healing, heal
from nas.adapt.alternatives import Slot, assembled, block_name, default_alternatives, slots_of
from nas.adapt.library import Library, LibrarySettings, TrainedTeacher
from nas.core.block import Block
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.nn.fit import Stage, TrainingCheckpoint, TrainingState, Worker, fit
from nas.nn.model import Model
from nas.nn.optimisers import Optimiser
from nas.nn.weights import save_weights
from nas.pretrain.data import Tokens, Vocabulary, read_sources, tokenise
from nas.pretrain.loss import pretraining_loss
from nas.pretrain.next_token import ALL, Packed, bits_per_byte
from nas.pretrain.recipe import wsdc
from nas.pretrain.tokenizer_training import train_tokenizer
from nas.proxy.corpus import build_corpus


@dataclass(frozen=True)
class Size:
    """Settings of a run."""

    layout: str
    teacher_tokens: int
    lr: float
    library: LibrarySettings
    healing: Healing
    window: int


SIZES = {
    "tiny": Size(
        "d96 v1024 ffn=swiglu:256 [A6/6:16*4]", 1 << 20, 3e-3,
        LibrarySettings(tokens=1 << 16, length=128, batch_tokens=2048, score_tokens=1 << 12),
        Healing(tokens=1 << 16, length=128, batch_tokens=2048, lr=2e-4), 16,
    ),
    "small": Size(
        "d288 v4096 ffn=swiglu:768 [A9/9:32*8]", 20 << 20, 1.5e-3,
        LibrarySettings(tokens=1 << 18, length=256, batch_tokens=4096, score_tokens=1 << 14),
        Healing(tokens=1 << 18, length=256, batch_tokens=4096), 32,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--mixes", type=int, default=20)
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    size, worker = SIZES[given.size], Worker(_device(), lambda line: print(line, flush=True))
    vocabulary, sources = _text(folder, size)
    teacher = TrainedTeacher.load(_teacher(folder, size, sources, worker), worker.device)
    layout = teacher.layout
    alternatives = {slot: default_alternatives(layout, slot, size.window) for slot in slots_of(layout)}
    library = Library(folder / "library", teacher, sources, size.library, worker)
    library.train(alternatives)
    scores = library.scores(alternatives)
    rows = []
    for number in range(given.mixes):
        path = folder / f"mix-{number}.json"
        if not path.is_file():
            choice = mix(alternatives, number)
            row = _healed(folder, choice, library, teacher, sources, vocabulary, size.healing, worker)
            row["summed"] = sum(scores[slot, block] for slot, block in choice.items())
            write_durably(path, json.dumps(row, indent=1).encode())
        rows.append(json.loads(path.read_bytes()))
    report = {
        "size": given.size,
        "layout": layout.format(),
        "non_embedding": layout.params.non_embedding,
        "teacher_tokens": size.teacher_tokens,
        "teacher_bits_per_byte": _bits(teacher.model, sources, vocabulary, size.library.length, worker),
        "tau": {
            name: float(kendalltau([row["summed"] for row in rows], [row[name] for row in rows]).statistic)
            for name in ("divergence_before", "divergence", "bits_per_byte")
        },
        "blocks": [_block(library, slot, block, scores) for slot, each in alternatives.items() for block in each],
        "mixes": rows,
    }
    write_durably(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps({"tau": report["tau"], "mixes": len(rows)}))


def mix(alternatives: dict[Slot, tuple[Block | None, ...]], number: int) -> dict[Slot, Block | None]:
    """Returns the replaced places of mix `number`: a share between a tenth and two thirds of all."""
    rng = random.Random(number)
    share = rng.uniform(0.1, 0.67)
    return {slot: rng.choice(blocks) for slot, blocks in alternatives.items() if rng.random() < share}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _text(folder: Path, size: Size) -> tuple[Vocabulary, list[Tokens]]:
    """Writes the training part of the default corpus as files, and tokenises them."""
    text = folder / "text"
    if not text.is_dir():
        partial = folder / "text.partial"
        partial.mkdir(exist_ok=True)
        for name, domain in build_corpus("default", Path("/")).domains.items():
            content = domain.train.astype("uint8").tobytes().decode(errors="ignore")
            (partial / f"{name.replace('/', '-')}.txt").write_text(content)
        partial.rename(text)
    layout = Layout.parse(size.layout)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        train_tokenizer([text], layout.vocab, tokenizer, print)
    vocabulary = Vocabulary(tokenizer, layout.vocab)
    return vocabulary, [tokenise(each, vocabulary, None, 0, 1 << 18) for each in read_sources([text], 0.05)]


def _teacher(folder: Path, size: Size, sources: list[Tokens], worker: Worker) -> Path:
    path = folder / "teacher.safetensors"
    if path.is_file():
        return path
    model = Model(Layout.parse(size.layout), seed=0).to(worker.device)
    length, batch = size.library.length, size.library.batch_tokens
    packed = Packed("teacher", sources, length, batch // length, 0)
    steps = size.teacher_tokens // batch
    stage = Stage(
        "teacher", steps, batch, lambda step: [packed.batch(step)],
        lambda model, inputs, labels: pretraining_loss(model, inputs, labels) / batch,
        lambda step: size.lr * wsdc(step, steps, warmup=0.02, decay=0.3, final=0.1),
    )  # fmt: skip
    checkpoint = TrainingCheckpoint(folder / "teacher-training.safetensors", {"key": size.layout})
    state = TrainingState(model, Optimiser(weight_decay=0.1, clip=1.0, balance_rate=1e-3), steps)
    fit(state, [stage], [checkpoint], worker, name="the teacher")
    save_weights(model, path)
    return path


def _healed(
    folder: Path,
    choice: dict[Slot, Block | None],
    library: Library,
    teacher: TrainedTeacher,
    sources: list[Tokens],
    vocabulary: Vocabulary,
    healing: Healing,
    worker: Worker,
) -> dict[str, Any]:
    blocks = {slot: library.weights(slot, block) for slot, block in choice.items() if block is not None}
    weights = {name: tensor.cpu() for name, tensor in teacher.model.state_dict().items()}
    layout, state = assembled(teacher.layout, weights, choice, blocks)
    model = Model(layout, None)
    model.load_state_dict(state)
    model = model.to(worker.device).eval()
    before = library.divergence(model), _bits(model, sources, vocabulary, healing.length, worker)
    heal(model, library, sources, healing, folder / "training")
    return {
        "choice": [[slot.depth, slot.part, block_name(block)] for slot, block in choice.items()],
        "layout": layout.format(),
        "divergence_before": before[0],
        "bits_per_byte_before": before[1],
        "divergence": library.divergence(model),
        "bits_per_byte": _bits(model, sources, vocabulary, healing.length, worker),
    }


def _bits(model: Model, sources: list[Tokens], vocabulary: Vocabulary, length: int, worker: Worker) -> float:
    with torch.no_grad():
        return bits_per_byte(lambda ids: model(ids.to(worker.device))[0], sources, vocabulary, length)[ALL]


def _block(
    library: Library, slot: Slot, block: Block | None, scores: dict[tuple[Slot, Block | None], float]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "depth": slot.depth,
        "part": slot.part,
        "block": block_name(block),
        "kl": scores[slot, block],
    }
    if block is not None:
        record = library.record(slot, block)
        row |= {"error_start": record.error_start, "error": record.error}
    return row


if __name__ == "__main__":
    main()
