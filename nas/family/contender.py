"""A model that takes part in a comparison: a member, a reference model, a layout or a model file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nas.core.canonical import result_key
from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.family.references.decoder import Decoder
from nas.family.references.reference import Reference
from nas.runtimes.base import Artifact, RandomWeights, Runtime
from nas.runtimes.llama_cpp.stock_model import QUANTISATION, StockModel, write_stock_model
from nas.service.keys import export_key
from nas.service.stage_work import DEPLOY_SEED
from nas.store import artifacts, results
from nas.store.store import Store

_WEIGHTS = RandomWeights(DEPLOY_SEED)


@dataclass(frozen=True)
class Contender:
    """One model.

    Args:
        name: in tables.
        parameters: all of them.
        active: those that one token uses.
        architecture: the runtime's name.
        subject: what is written, or was.
        member: of the family that is compared.
        searched: whether the family's search used the device of the comparison.
        source: page of a published configuration.
        flash_attn: whether its graph works with fused attention.
        patched: needs our build of the runtime.
    """

    name: str
    parameters: int
    active: int
    architecture: str
    subject: Layout | StockModel | Path
    member: bool = False
    searched: bool = False
    source: str = ""
    flash_attn: bool = True
    patched: bool = False


def of_reference(reference: Reference) -> Contender:
    """A reference model."""
    config = reference.config
    return Contender(
        reference.name, reference.parameters, reference.active, reference.architecture,
        config.model() if isinstance(config, Decoder) else config,
        source=reference.source, flash_attn=reference.flash_attn,
    )  # fmt: skip


def of_layout(name: str, layout: Layout, runtime: Runtime) -> Contender:
    """A layout.

    Raises:
        Unsupported: the runtime does not carry it.
    """
    support = runtime.supports(layout)
    if support.arch is None:
        raise Unsupported(f"{runtime.name} does not carry {name}: {'; '.join(support.reasons)}")
    params = layout.params
    return Contender(
        name, params.total, params.active, support.arch, layout, patched=support.verdict == "patched"
    )  # fmt: skip


def artifact_of(contender: Contender, store: Store, runtime: Runtime, scratch: Path) -> Artifact:
    """The Q4_0 model of a contender in the store: random weights as a recipe, which the device makes the file from.

    Raises:
        InvalidInput: its file cannot be read.
        InfrastructureFailed: the disk is full.
    """
    subject = contender.subject
    if isinstance(subject, Path):
        stored = artifacts.put_file(store, subject)
        return Artifact(
            sha256=stored.sha256, size=stored.size, runtime=runtime.name, quantisation=QUANTISATION, layout_id="",
            arch=contender.architecture, patched=contender.patched, weights=f"file:{subject.name}",
        )  # fmt: skip
    if isinstance(subject, Layout):
        key = export_key(subject, runtime, QUANTISATION, _WEIGHTS.describe())
        return _once(store, key, scratch, lambda to: runtime.export(subject, QUANTISATION, _WEIGHTS, to, recipe=True))
    key = result_key(
        "export", model=subject.id, runtime=runtime.name, quantisation=QUANTISATION, weights=_WEIGHTS.describe(),
        writer=runtime.writer_version,
    )  # fmt: skip
    return _once(store, key, scratch, lambda to: _stock_artifact(subject, runtime, to))


def _stock_artifact(model: StockModel, runtime: Runtime, destination: Path) -> Artifact:
    written = write_stock_model(model, _WEIGHTS, destination, recipe=True)
    return Artifact(
        sha256=written.file.sha256, size=written.file.size, runtime=runtime.name, quantisation=QUANTISATION,
        layout_id="", arch=model.architecture, weights=_WEIGHTS.describe(), recipe=written.recipe,
    )  # fmt: skip


def _once(store: Store, key: str, scratch: Path, export: Callable[[Path], Artifact]) -> Artifact:
    """What was exported under `key` before, if the store still has it."""
    row = results.get(store, key)
    if row is not None and "value" in row.payload:
        artifact = Artifact.model_validate(row.payload["value"])
        if artifacts.get(store, artifact.stored.sha256) is not None:
            return artifact
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        destination = Path(folder) / "model"
        artifact = export(destination)
        artifacts.put_file(store, destination)
    results.put(store, key, "export", {"value": artifact.model_dump(mode="json")})
    return artifact
