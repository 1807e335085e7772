"""Quality of mixes of a library's blocks: by the sum of scores, and by assembling them (`quality: {from: library}`).

A score is the divergence of a model that knows nothing (every token equally likely) from the trained model less that
of the mix, in nats per token. So the trained model has the largest score, and quality is 1 - KL / KL of knowing
nothing, as a mean over held-out text and answers that have to be recalled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from nas.core.canonical import sha256_of
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.core.quality_config import LIBRARY_PARTS
from nas.core.replacement import LibraryScores, block_of, parsed
from nas.model.nn.fit import device_of, save_tensors
from nas.model.nn.mixes import ScoredText, compared, mix_of
from nas.model.nn.model import Model
from nas.model.nn.weights import load_model, padded_weights
from nas.search.proxy.job import LibraryRun, TrainJob, TrainResult, exported_layout, weights_file

IDS = "ids"
"""Name of the tensor in the file of held-out text: ids [windows, length], int32. The others are groups of positions."""


def evaluate_mix(
    jobs: Sequence[TrainJob], *, yield_hook: Callable[[], object], checkpoint_dir: Path, device: str = "auto", log: Log
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
    summed = scores.scores(layout)
    place = device_of(device)
    scored: list[tuple[TrainJob, dict[str, float], dict[str, float], int, str]] = []
    if run.evaluated == "sum":
        losses = {group: most - summed[group] for group, most in scores.uniform.items()}
        scored = [(job, summed, losses, 0, "") for job in jobs]
    else:
        teacher, text = trained_model(scores, place), held_out(scores, path)
        mix = assembled_mix(scores, teacher, layout)
        log(f"evaluating {layout}")
        for job in jobs:
            part = text.part(job.seed, LIBRARY_PARTS)
            comparison = compared(teacher, mix, part, yield_hook)
            losses = part.means(comparison.kl)
            above = {group: most - losses[group] for group, most in part.means(comparison.uniform).items()}
            digest = ""
            if job.seed == LIBRARY_PARTS - 1:
                file = weights_file(checkpoint_dir, job.key)
                save_tensors(padded_weights(mix.state_dict(), exported_layout(job)), file, {"step": 1})
                digest = sha256_of(file)
            scored.append((job, above, losses, part.ids.numel(), digest))
    seconds, cpu = (time.perf_counter() - began) / len(jobs), (time.process_time() - cpu) / len(jobs)
    return [
        TrainResult(
            key=job.key,
            scores=above,
            losses=losses,
            accuracy={},
            curve=[],
            steps=1,
            tokens=tokens,
            seconds=seconds,
            cpu_seconds=cpu,
            device=place.type,
            weights_sha256=digest,
        )
        if all(map(math.isfinite, above.values()))
        else CandidateFailed("not_finite", f"the scores of {layout} are not finite")
        for job, above, losses, tokens, digest in scored
    ]


def trained_model(scores: LibraryScores, device: torch.device) -> Model:
    """Returns the model that the library's blocks are for.

    Raises:
        InfrastructureFailed: its checkpoint is gone or another one.
    """
    path = Path(scores.teacher)
    _require(path, scores.teacher_sha256)
    return load_model(path, Layout.parse(scores.layout)).to(device)


def held_out(scores: LibraryScores, path: Path) -> ScoredText:
    """Returns the held-out text of the file of scores at `path`.

    Raises:
        InfrastructureFailed: it is gone or another one.
    """
    text = path.parent / scores.text
    _require(text, scores.text_sha256)
    groups = load_file(text)
    ids = groups.pop(IDS).long()
    return ScoredText(ids, groups)


def assembled_mix(scores: LibraryScores, teacher: Model, layout: Layout) -> Model:
    """Returns the trained model with the blocks of `layout`, on its device.

    Raises:
        InfrastructureFailed: a block is not in the library any more.
        InvalidInput: the layout is no mix of the library's blocks.
    """
    choice, blocks = scores.choice(layout), {}
    for slot, block in choice.items():
        if block.key is not None and block.sha256 is not None:
            path = Path(scores.library) / "blocks" / f"{block.key}.safetensors"
            _require(path, block.sha256)
            blocks[slot] = load_file(path)
    mix = mix_of(teacher, {slot: block_of(parsed(block.block, slot.part)) for slot, block in choice.items()}, blocks)
    assert mix.layout == layout, f"{mix.layout} was assembled, not {layout}"
    return mix.requires_grad_(False)


def _require(path: Path, sha256: str) -> None:
    """Raises `InfrastructureFailed` unless the file at `path` has this hash."""
    again = "repeat `nas adapt --write-space`, which trains what is missing"
    try:
        content = sha256_of(path)
    except OSError as error:
        raise InfrastructureFailed(f"{path}: {error.strerror}; {again}") from error
    if content != sha256:
        raise InfrastructureFailed(f"{path} is not what the scores were computed with; {again}")
