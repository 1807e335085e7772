"""Merging of runs: folders of models with towers that were trained from one another, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.core.family import FamilyRecord
from nas.train.posttrain.merging import MergeSettings, merge
from nas.train.release.model_tokenizer import CONFIG, GENERATION, MODEL, TEMPLATE
from nas.train.release.shards import SINGLE
from nas.train.towers.codec import copy_codec
from nas.train.towers.release import CODEC, PROCESSOR, TowerFolder, modality_of

RECORD = "merge.json"
_ALIKE = (MODEL, "tokenizer.json")
_BESIDE = (*_ALIKE, PROCESSOR, GENERATION, CONFIG, TEMPLATE, "special_tokens_map.json")
_MOST_BYTES = 64 << 20


class MergedFolder(FamilyRecord):
    """Record of a merge, in `RECORD`.

    Args:
        models: SHA-256 of each model's files of weights, in order.
        base: the same of what they were trained from; null for a soup.
        settings: of the merge.
        weights: SHA-256 of model.safetensors.
    """

    models: tuple[str, ...]
    base: str | None
    settings: MergeSettings
    weights: str


def merge_runs(folders: Sequence[Path], base: Path | None, settings: MergeSettings, output: Path) -> MergedFolder:
    """Merges folders of `nas family vision` or `audio` into one, with the tokenizer and processor of the first.

    Args:
        folders: with equal layouts, towers, tokenizers and codecs.
        base: that they were trained from; only a soup needs none.
        settings: of the merge.
        output: folder of the result: none of the others, and none that a training wrote.

    Raises:
        InvalidInput: a folder is none, or differs from the first; the output holds a trained model; or see
            `nas.train.posttrain.merging.merge`.
        InfrastructureFailed: the result cannot be written.
    """
    if len(folders) < 2:
        raise InvalidInput("name two folders or more to merge")
    sources = [*folders, *([] if base is None else [base])]
    if output.resolve() in [folder.resolve() for folder in sources]:
        raise InvalidInput("is one of the folders that are merged", where="--output")
    modality = modality_of(folders[0])
    if modality is None:
        raise InvalidInput(
            "no model with a tower: `nas family vision` and `audio` write such folders", where=str(folders[0])
        )
    if (output / modality.record).is_file():
        raise InvalidInput("holds a trained model; name another folder", where=str(output))
    for folder in sources:
        TowerFolder.read(folder, modality)
        if not (folder / SINGLE).is_file():
            raise InvalidInput(f"has no {SINGLE}: shards are not merged", where=str(folder))
        for name in _ALIKE:
            if (folder / name).read_bytes() != (folders[0] / name).read_bytes():
                raise InvalidInput(f"{name} is another than in {folders[0]}", where=str(folder))
        if _codec_hashes(folder) != _codec_hashes(folders[0]):
            raise InvalidInput(f"{CODEC} is another than in {folders[0]}", where=str(folder))
    output.mkdir(parents=True, exist_ok=True)
    written = merge(folders, base, settings, output / SINGLE)
    for name in _BESIDE:
        if (folders[0] / name).is_file() and (folders[0] / name).stat().st_size <= _MOST_BYTES:
            write_durably(output / name, (folders[0] / name).read_bytes())
    if (codec := folders[0] / CODEC).is_dir():
        copy_codec(codec, output / CODEC)
    hashes = [sha256_of(folder / SINGLE) for folder in sources]
    record = MergedFolder(
        models=tuple(hashes[: len(folders)]),
        base=None if base is None else hashes[-1],
        settings=settings,
        weights=written.sha256,
    )
    write_durably(output / RECORD, record.model_dump_json(indent=1).encode())
    return record


def _codec_hashes(folder: Path) -> list[str]:
    """Returns the SHA-256 of the files of a model's codec; none where it does not speak."""
    files = (folder / CODEC / name for name in (SINGLE, MODEL))
    return [sha256_of(file) for file in files if file.is_file()]
