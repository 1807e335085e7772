"""Quality of mixes of a library's blocks: by the sum of scores, and by assembling them (`quality: {from: library}`).

A score is the divergence of a model that knows nothing (every token equally likely) from the trained model less that of
the mix, in nats per token. So the trained model has the largest score, and quality is 1 - KL / KL of knowing nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.quality_config import LIBRARY_PARTS
from nas.core.replacement import LibraryScores, assembled, parsed
from nas.nn.fit import Log, save_tensors
from nas.nn.model import Model
from nas.nn.weights import load_weights, padded_weights
from nas.proxy.job import LibraryRun, TrainJob, TrainResult, exported_layout, weights_file

GROUP = "lm/library"
IDS = "ids"
"""Name of the tensor in the file of held-out text: ids [windows, length], int32."""
_ROWS, _LOGITS_AT_ONCE = 8, 1 << 25
"""Most windows of held-out text that are evaluated together, and most logits."""


class Divergence(NamedTuple):
    """Means over a text, in nats per token: of a model, and of one that knows nothing, from the trained model."""

    kl: float
    uniform: float


def evaluate_mix(
    jobs: Sequence[TrainJob],
    *,
    yield_hook: Callable[[], object],
    checkpoint_dir: Path,
    device: str = "auto",
    log: Log,
) -> list[TrainResult | CandidateFailed]:
    """Returns the score of a mix for each job: of all text by the sum, or of one part of it by the assembled mix.

    Args:
        jobs: of one `seeds_key`; the seed is the part of the text.
        yield_hook: called before each pass; may block.
        checkpoint_dir: holds one folder per key; that of the last part gets the weights of the assembled mix.
        device: a torch device, or 'auto': CUDA where there is one, else the CPU.
        log: takes one line at a time.

    Raises:
        InfrastructureFailed: the library, the trained model or the text is not what the scores were computed with.
        InvalidInput: the layout is no mix of the library's blocks, which a space's file is checked for.
    """
    began, cpu = time.perf_counter(), time.process_time()
    run, layout = jobs[0].run, Layout.from_json(jobs[0].layout)
    assert isinstance(run, LibraryRun)
    path = Path(run.path)
    try:
        scores = LibraryScores.read(path)
        _require(path, run.sha256)
    except InvalidInput as error:
        raise InfrastructureFailed(str(error)) from error
    summed = scores.score(layout)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    found: list[tuple[TrainJob, Divergence, int, str]] = []
    if run.evaluated == "sum":
        found = [(job, Divergence(scores.uniform - summed, scores.uniform), 0, "") for job in jobs]
    else:
        teacher, text = trained_model(scores, place), held_out(scores, path)
        mix = assembled_mix(scores, teacher, layout)
        log(f"evaluating {layout}")
        for job in jobs:
            part = text[job.seed :: LIBRARY_PARTS]
            each = divergence(teacher, mix, part, yield_hook)
            digest = ""
            if job.seed == LIBRARY_PARTS - 1:
                file = weights_file(checkpoint_dir, job.key)
                save_tensors(padded_weights(mix.state_dict(), exported_layout(job)), file, {"step": 1})
                digest = _sha256(file)
            found.append((job, each, part.numel(), digest))
    seconds, cpu = (time.perf_counter() - began) / len(jobs), (time.process_time() - cpu) / len(jobs)
    return [
        TrainResult(
            key=job.key, scores={GROUP: each.uniform - each.kl}, losses={GROUP: each.kl}, accuracy={}, curve=[],
            steps=1, tokens=tokens, seconds=seconds, cpu_seconds=cpu, device=place.type,
            weights_sha256=digest,
        )
        for job, each, tokens, digest in found
    ]  # fmt: skip


def trained_model(scores: LibraryScores, device: torch.device) -> Model:
    """Returns the model that the library's blocks are for.

    Raises:
        InfrastructureFailed: its checkpoint is gone or another one.
    """
    path = Path(scores.teacher)
    _require(path, scores.teacher_sha256)
    model = Model(Layout.parse(scores.layout), None)
    load_weights(model, path)
    return model.to(device).eval().requires_grad_(False)


def held_out(scores: LibraryScores, path: Path) -> Tensor:
    """Returns the held-out text of the file of scores at `path`: ids [windows, length].

    Raises:
        InfrastructureFailed: it is gone or another one.
    """
    text = path.parent / scores.text
    _require(text, scores.text_sha256)
    return load_file(text)[IDS].long()


def assembled_mix(scores: LibraryScores, teacher: Model, layout: Layout) -> Model:
    """Returns the trained model with the blocks of `layout`, on its device.

    Raises:
        InfrastructureFailed: a block is not in the library any more.
        InvalidInput: the layout is no mix of the library's blocks.
    """
    choice, blocks = scores.choice(layout), {}
    for slot, each in choice.items():
        if each.key is not None and each.sha256 is not None:
            path = Path(scores.library) / "blocks" / f"{each.key}.safetensors"
            _require(path, each.sha256)
            blocks[slot] = load_file(path)
    weights = {name: tensor.cpu() for name, tensor in teacher.state_dict().items()}
    chosen = {slot: parsed(each.block, slot.part) for slot, each in choice.items()}
    child, state = assembled(teacher.layout, weights, chosen, blocks)
    assert child == layout, f"{child} was assembled, not {layout}"
    model = Model(child, None)
    model.load_state_dict(state)
    return model.to(next(teacher.parameters()).device).eval().requires_grad_(False)


@torch.no_grad()
def divergence(teacher: Model, other: Model, text: Tensor, yield_hook: Callable[[], object]) -> Divergence:
    """Returns the mean divergences from `teacher` over ids [windows, length]."""
    device = next(teacher.parameters()).device
    rows = max(1, min(_ROWS, _LOGITS_AT_ONCE // (text.shape[1] * teacher.layout.vocab)))
    kl = entropy = 0.0
    for start in range(0, len(text), rows):
        yield_hook()
        ids = text[start : start + rows].to(device)
        known, found = (model(ids).float().log_softmax(-1) for model in (teacher, other))
        kl += float((known.exp() * (known - found)).sum(dtype=torch.float64))
        entropy -= float((known.exp() * known).sum(dtype=torch.float64))
    uniform = float(torch.tensor(teacher.layout.vocab, dtype=torch.float64).log()) - entropy / text.numel()
    return Divergence(kl / text.numel(), uniform)


def _require(path: Path, sha256: str) -> None:
    """Raises `InfrastructureFailed` unless the file at `path` has this hash."""
    again = "repeat `nas adapt --write-space`, which trains what is missing"
    try:
        found = _sha256(path)
    except OSError as error:
        raise InfrastructureFailed(f"{path}: {error.strerror}; {again}") from error
    if found != sha256:
        raise InfrastructureFailed(f"{path} is not what the scores were computed with; {again}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
