"""A search space of mixes of a library's blocks, for `nas launch`: `nas adapt --write-space`.

    FILE.yaml                 the space: `quality: {from: library, ...}`, and the mixes as `layouts`
    FILE-scores.json          `nas.core.replacement.LibraryScores`
    FILE-text.safetensors     the held-out text

All are written again by the same command, with the same content.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.durable import write_output
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.metrics import metric, searchable
from nas.core.quality_config import LIBRARY_PARTS
from nas.core.replacement import (
    TEXT_GROUP,
    Alternative,
    LibraryScores,
    Part,
    ScoredBlock,
    ScoredPair,
    Slot,
    block_name,
    block_of,
    with_blocks,
)
from nas.measure.runtimes import RUNTIMES
from nas.model.nn.fit import save_tensors
from nas.model.nn.mixes import ScoredText, compared
from nas.model.nn.model import Model
from nas.search.proxy.mixes import IDS, assembled_mix
from nas.search.proxy.quality import paired_spread
from nas.search.spaces import load_space
from nas.search.spaces.yaml_text import dump_yaml
from nas.train.adapt.adapt import Adaptation
from nas.train.adapt.costs import lent, replaced_by
from nas.train.adapt.library import Library, Replacement
from nas.train.adapt.selection import Option, Term, select

_WORKLOAD = "chat"
"""Name of the workload in the space."""
_ASSEMBLED = 12
"""Mixes that are assembled, to compare them with their sums."""
_FLOOR = 0.5
"""Least quality, by the sum, of a mix that is listed."""
_START = 0.8
"""Quality, by the sum, of the mix where quality starts to count."""
_DRAWS = 50
"""Draws for each listed mix."""
_BEST = 4
"""One in so many mixes is the best one at some limit of `_READ`."""
_READ = "numbers read for a token"
"""Cost of an option."""
Alternatives = Mapping[Slot, Sequence[Alternative]]
"""None of them is stored in a quantisation: `AdaptRequest.bits` refuses them together with a space."""


def check_target(path: Path) -> None:
    """Checks the name of a space's file.

    Raises:
        InvalidInput: it is no YAML file, or has other characters than letters, digits, dots, dashes and underscores.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*\.yaml", path.name):
        raise InvalidInput(
            f"{path.name}: name a .yaml file in small letters, digits, '.', '-', '_'", where="--write-space"
        )


def write_space(adaptation: Adaptation) -> dict[str, Any]:
    """Trains and scores what the library lacks, and writes the space of mixes of its blocks that is requested.

    Args:
        adaptation: has model, text, device, workload and budgets; nothing is measured.

    Returns:
        What was written, for people.

    Raises:
        InvalidInput: there are fewer than four mixes that the runtime carries, too little text, or metrics that no
            study with this workload can measure.
    """
    path, count, library = adaptation.request.write_space, adaptation.request.mixes, adaptation.library
    assert path is not None
    recall = library.text.ids[len(library.selection.ids) :]
    for text, name in ((library.selection.ids, "score_tokens"), (recall, "recall_tokens")):
        if 0 < len(text) < LIBRARY_PARTS:
            raise InvalidInput(
                f"scores are computed on {len(text)} sequences, at least {LIBRARY_PARTS} are needed: raise"
                f" library.{name} in --config",
                where="--config",
            )
    carried = RUNTIMES[adaptation.request.runtime].supports

    def is_carried(alternative: Alternative, trained: Block | None) -> bool:
        choice = adaptation.choices.every_second(trained, alternative)
        return carried(with_blocks(adaptation.teacher.layout, choice)[0]).verdict != "no"

    alternatives = adaptation.choices.carried(is_carried)
    adaptation.claim()
    with library.in_use():
        alternatives = _with_finite_scores(library, library.train(alternatives))
        scores = _scores(adaptation, alternatives, path)
        mixes = _mixes(adaptation, alternatives, scores, count, lambda layout: carried(layout).verdict != "no")
        sum_sd, part_sd, compared = _deviations(adaptation, scores, mixes)
    start = min(mixes, key=lambda layout: abs(_quality(scores, layout) - _START))
    quality = {
        "from": "library",
        "path": _beside(path, "-scores.json").name,
        "sum_sd": sum_sd,
        "part_sd": part_sd,
        "mixes": compared,
    }
    build = "any" if any(carried(layout).verdict == "patched" for layout in mixes) else "stock"
    space = _space(adaptation, path.stem, build, [layout for layout in mixes if layout != start], start, quality)
    write_output(path, dump_yaml(space, width=1000).encode(), flag="--write-space")
    load_space(path)
    return {
        "space": str(path),
        "layouts": len(mixes) - 1,
        "sum of scores": f"within {sum_sd:.2g} (standard deviation of quality) of {compared} assembled mixes",
        "next": f"nas launch --space {path}",
    }


def _with_finite_scores(library: Library, alternatives: Alternatives) -> dict[Slot, tuple[Alternative, ...]]:
    """Computes the scores that are missing, and returns the alternatives whose scores are finite."""
    scores = library.scores(alternatives)
    unusable = [one for one, score in scores.items() if not all(map(math.isfinite, score.kl.values()))]
    for slot, block in unusable:
        library.worker.log(f"depth {slot.depth}: {block_name(block)} is left out: its score is not finite")
    return {
        slot: tuple(block for block in blocks if (slot, block) not in unusable) for slot, blocks in alternatives.items()
    }


def _scores(adaptation: Adaptation, alternatives: Alternatives, path: Path) -> LibraryScores:
    """Writes the file of scores and the text, and returns the scores."""
    library, teacher = adaptation.library, adaptation.teacher
    text = _beside(path, "-text.safetensors")
    tensors = {IDS: library.text.ids.to(torch.int32), **library.text.groups}
    save_tensors(tensors, text, {"length": library.settings.length})
    computed = library.scores(alternatives)
    nothing = compared(teacher.model, teacher.model, library.text, adaptation.worker.yield_hook).uniform
    uniform = library.text.means(nothing)
    if min(uniform.values()) <= 0:
        raise InvalidInput("the model predicts held-out text no better than chance: nothing can be searched")
    blocks = [
        ScoredBlock(
            depth=slot.depth,
            part="mixer" if slot.part == "mixer" else "ffn",
            block=block_name(block),
            kl=dict(score.kl),
            key=None if block is None else library.key(slot, block),
            sha256=None if block is None else sha256_of(library.file(slot, block)),
        )
        for (slot, alternative), score in computed.items()
        for block in [block_of(alternative)]
    ]
    pairs = [
        ScoredPair(blocks=(_named(a), _named(b)), kl=dict(term.kl))
        for (a, b), term in adaptation.choices.terms(alternatives).items()
    ]
    scores = LibraryScores(
        layout=teacher.layout.format(),
        teacher=str(teacher.checkpoint.resolve()),
        teacher_sha256=teacher.sha256,
        library=str(library.folder.resolve()),
        text=text.name,
        text_sha256=sha256_of(text),
        uniform=uniform,
        blocks=tuple(blocks),
        pairs=tuple(pairs),
    )
    content = (scores.model_dump_json(indent=1) + "\n").encode()
    write_output(_beside(path, "-scores.json"), content, flag="--write-space")
    return scores


def _mixes(
    adaptation: Adaptation,
    alternatives: Alternatives,
    scores: LibraryScores,
    count: int,
    carried: Callable[[Layout], bool],
) -> list[Layout]:
    """Returns different mixes as deep as the model: the best ones by the sum, and drawn ones.

    Raises:
        InvalidInput: there are fewer than four.
    """
    mixes: dict[str, Layout] = {}
    best = _best(adaptation, alternatives, scores, count // _BEST)
    for layout in chain(best, _drawn(adaptation, alternatives, scores, _DRAWS * count)):
        if len(mixes) == count:
            break
        mixed = layout.depth == adaptation.teacher.layout.depth and layout != adaptation.teacher.layout
        if mixed and layout.id not in mixes and _quality(scores, layout) >= _FLOOR and carried(layout):
            mixes[layout.id] = layout
    if len(mixes) < LIBRARY_PARTS:
        raise InvalidInput(
            f"only {len(mixes)} mixes keep half of the model's quality by the sum of scores and run on the runtime;"
            " train the library on more tokens"
        )
    return list(mixes.values())


def _best(adaptation: Adaptation, alternatives: Alternatives, scores: LibraryScores, count: int) -> Iterator[Layout]:
    """Yields the mixes of best quality by the sum at `count` limits of the numbers that decoding a token reads.

    These are weights, and caches and states at the end of the workload: decoding time is not measured here, and follows
    them on most devices.
    """
    layout, workload = adaptation.teacher.layout, adaptation.request.workload
    loss = {(Slot(scored.depth, scored.part), scored.block): scores.quality(scored.kl) for scored in scores.blocks}
    context = workload.prompt + workload.gen
    options: dict[Slot, list[Option[Slot]]] = {}
    for slot, blocks in alternatives.items():
        other = Slot(slot.depth, "ffn")
        whole = (other, block_name(None)) if slot.part == "mixer" and None in alternatives.get(other, ()) else None
        options[slot] = [
            Option(
                block_name(block),
                loss.get((slot, block_name(block)), 0.0),
                {_READ: _numbers(block, layout.d_model, context)},
                empty=block is None,
                needs=lent(layout, block, {}),
                excludes=whole if block is None else None,
            )
            for block in (slot.block(layout), *blocks)
        ]
    terms = [
        Term(((Slot(*a[:2]), a[2]), (Slot(*b[:2]), b[2])), scores.quality(pair.kl))
        for pair in scores.pairs
        for a, b in [pair.blocks]
    ]
    reads = [[option.costs[_READ] for option in choices] for choices in options.values()]
    least, most = sum(map(min, reads)), sum(costs[0] for costs in reads)
    for number in range(1, count + 1):
        limit = most - (most - least) * number / (count + 1)
        if (picked := select(options, {_READ: 0.0}, {_READ: limit}, terms)) is not None:
            yield with_blocks(layout, replaced_by(layout, picked))[0]


def _numbers(alternative: Alternative, d_model: int, context: int) -> float:
    """Returns the numbers that a block reads to decode a token after `context` others; the cache may be another's."""
    block = block_of(alternative)
    if block is None:
        return 0.0
    spec, caching = block.spec, Block(block.kind, tuple(argument for argument in block.args if argument[0] != "kv"))
    cached = spec.kv_bytes(caching, d_model, context, 1.0)
    return spec.count(block, d_model).active + cached + spec.state_bytes(block, d_model) / 4


def _drawn(adaptation: Adaptation, alternatives: Alternatives, scores: LibraryScores, draws: int) -> Iterator[Layout]:
    """Yields mixes in which blocks of better scores are more frequent."""
    rng = random.Random(adaptation.request.library.seed)
    kl = {(Slot(scored.depth, scored.part), scored.block): scored.kl[TEXT_GROUP] for scored in scores.blocks}
    scale = max(median(kl.values() or (0.0,)), 1e-9)
    for _ in range(draws):
        share, choice = rng.random(), dict[Slot, Alternative]()
        for slot, blocks in alternatives.items():
            if blocks and rng.random() < share:
                weights = [math.exp(-max(0.0, kl[slot, block_name(block)]) / scale) + 1e-9 for block in blocks]
                (choice[slot],) = rng.choices(blocks, weights)
        try:
            yield with_blocks(adaptation.teacher.layout, choice)[0]
        except InvalidInput:  # nothing is left of it
            continue


def _deviations(adaptation: Adaptation, scores: LibraryScores, mixes: Sequence[Layout]) -> tuple[float, float, int]:
    """Returns how far sums are from assembled mixes, and parts of the text from each other; and the number of mixes."""
    ordered = sorted(mixes, key=lambda layout: _quality(scores, layout))
    count = min(_ASSEMBLED, len(ordered))
    chosen = [ordered[number * len(ordered) // count] for number in range(count)]
    model, hook = adaptation.teacher.model, adaptation.worker.yield_hook
    residuals, by_part = [], []
    for number, layout in enumerate(chosen, start=1):
        adaptation.worker.log(f"assembling mix {number} of {len(chosen)}")
        parts = _qualities(scores, model, assembled_mix(scores, model, layout), adaptation.library.text, hook)
        residuals.append(_quality(scores, layout) - fmean(parts.values()))
        by_part.append(parts)
    by_part.append(_qualities(scores, model, model, adaptation.library.text, hook))
    sums = math.sqrt(fmean(residual * residual for residual in residuals))
    return max(sums, 1e-6), max(paired_spread(by_part).sd, 1e-6), len(chosen)


def _quality(scores: LibraryScores, layout: Layout) -> float:
    """Returns the quality by the sum of scores."""
    return scores.quality(scores.scores(layout))


def _qualities(
    scores: LibraryScores, teacher: Model, other: Model, text: ScoredText, hook: Callable[[], object]
) -> dict[int, float]:
    """Returns part of the text -> quality."""
    both = compared(teacher, other, text, hook)
    gain = both.uniform - both.kl
    parts = range(LIBRARY_PARTS)
    return {n: scores.quality(text.part(n, LIBRARY_PARTS).means(gain[n::LIBRARY_PARTS])) for n in parts}


def _named(replacement: Replacement) -> tuple[int, Part, str]:
    slot, block = replacement
    return slot.depth, slot.part, block_name(block)


def _space(
    adaptation: Adaptation, name: str, build: str, layouts: Sequence[Layout], start: Layout, quality: Mapping[str, Any]
) -> dict[str, Any]:
    request, limits = adaptation.request, adaptation.limits
    on = {name: {"workload": _WORKLOAD} if metric(name).source == "device" else {} for name in searchable()}
    limited = [limit.metric for limit in limits]
    limited += ["decode_p50"] * (not any(on[name] for name in limited))
    return {
        "v": 1,
        "name": name,
        "doc": f"Mixes of a library's blocks in place of those of {adaptation.teacher.layout.format()}",
        "layouts": [layout.format() for layout in layouts],
        "devices": [request.device],
        "runtimes": [{"name": request.runtime, "quantisation": request.deploy_quantisation, "build": build}],
        "workloads": {_WORKLOAD: request.workload.model_dump(mode="json")},
        "budgets": [
            {
                "metric": limit.metric,
                "max": f"{limit.value!r}{'x' if limit.relative else metric(limit.metric).unit}",
                **on[limit.metric],
            }
            for limit in limits
        ],
        "objectives": [
            {"name": "quality", "metric": "quality"},
            *({"name": name, "metric": name, **on[name]} for name in limited),
        ],
        "references": {"published": adaptation.teacher.layout.format(), "attention": start.format()},
        "quality": dict(quality),
    }


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.stem + ending)
