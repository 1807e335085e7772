"""The type of each tensor of a GGUF file, so that it keeps budgets on a device and loses least: `nas quantise`.

    slot        the tensors of one role in one part of the depth, such as attn_v of the first third
    loss        what a type in one slot adds to the divergence of a file of Q8_0 from the source, in nats a token
    cost        of a type in a slot: its bytes; of a figure of the device, its share of what a whole file of that type
                differs by from a file of Q8_0

The sums of losses and costs are minimised exactly (`nas.train.adapt.selection`). They are what is expected of a file;
the selected one is compared with the source as a whole, on text of its own, and measured on the device. Where a figure
breaks a budget nevertheless, the selection is repeated with a budget that is lower by what it was off. Figures that are
reported of the chosen file decided nothing: it is compared on a third text, and measured once more.

Divergences are kept by content in the user's cache, so a command that was stopped continues where it was.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from nas.core import paths
from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import write_durably
from nas.core.errors import CandidateFailed, InvalidInput, NasError, Unsupported
from nas.core.limit import Limit
from nas.core.measurement import Figure
from nas.core.progress import Log, Progress
from nas.core.scoring import chance_to_keep
from nas.core.stats import Z95, mean_interval
from nas.core.units import show_number
from nas.core.workload import Workload
from nas.measure.protocol.bench import BenchOptions, bench_each
from nas.measure.protocol.file_choice import Check, figures_of
from nas.measure.runtimes.llama_cpp.binding import (
    WINDOW,
    Divergence,
    divergence,
    quantise_file,
    write_importance,
    write_predictions,
)
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.writing import replacing
from nas.train.adapt.selection import Option, select, total

TYPES = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "iq4_nl", "iq4_xs", "q3_k")
"""Types that are tried; llama.cpp's names. Those of 256 numbers a block do not fit all tensors."""
BASE = "q8_0"
KL = "kl"
"""Nats a token of the divergence from the source."""
_NATS = "nats/token"
BESIDE = ("q8_0", "q4_k_m", "q4_0")
"""llama.cpp's mixtures that the chosen file is compared with."""
SOURCE = "source"
"""Name of the source among files made from it."""
_FILE_SIZE = "file_size"
MOST_BYTES = 1 << 18
"""Of a text that is read."""
_VERSION = 2
"""Of the kept divergences."""
DIVERGENCES, IMPORTANCE = "divergences", ".imatrix.gguf"
"""Folder in the user's cache of kept divergences, and the suffix of kept importance matrices there."""
_TRIES = 4
"""Selections at most, each with budgets that are lower by what the last file was off."""
_LEAST = 1e-9
"""Least loss of a type other than `BASE`, in nats a token."""


class Slot(NamedTuple):
    """Tensors that have one type.

    Args:
        role: the tensors' name without their layer, such as attn_v.
        part: of the depth, from 0; 0 of tensors that are in no layer.
    """

    role: str
    part: int

    def __str__(self) -> str:
        return f"{self.role}.{self.part + 1}"


class KlLimit(Limit):
    """A budget of the divergence, in nats a token."""

    def check(self, divergence: Divergence) -> Check:
        """Returns whether a file keeps it, by the noise over windows of text."""
        kl, half = mean_interval(divergence.kl)
        figure = Figure(value=kl, low=kl - half, high=kl + half, n=len(divergence.kl), unit=_NATS)
        return Check(self, figure, chance_to_keep(kl - self.value, half / Z95))

    def __str__(self) -> str:
        return f"{self.metric} <= {self.value:g} {_NATS}"


@dataclass(frozen=True)
class QuantiseRequest:
    """What is quantised for what.

    Args:
        source: GGUF file with tokenizer; best of F16, BF16 or F32.
        chosen_on: text by which types are chosen.
        reported_on: text by which nothing is chosen or decided.
        importance_from: text of the importance matrix; empty: none is used.
        limits: budgets of the file and of figures on the device.
        kl: largest divergence; None: no budget.
        minimise: a metric, or `KL`.
        types: that are tried, of `TYPES`.
        parts: that the depth is divided into.
        windows: of `WINDOW` tokens by which types are chosen; of the other texts twice as many.
        device: as in spaces.
        workload: of figures on the device.
        repetitions: of each measurement.
        threads: of this machine.
        db: URL, or None for the default database.
        decided_on: text by which the budget of the divergence is judged, so that types are chosen again.
    """

    source: Path
    chosen_on: str
    reported_on: str
    importance_from: str
    limits: Sequence[Limit]
    kl: float | None
    minimise: str
    types: Sequence[str]
    parts: int
    windows: int
    device: str
    workload: Workload
    repetitions: int
    threads: int
    db: str | None = None
    decided_on: str = ""

    @property
    def budgets(self) -> list[Limit]:
        """Budgets of figures, and that of the divergence."""
        return [*self.limits, *([] if self.kl is None else [KlLimit(KL, self.kl)])]

    @property
    def measured(self) -> list[str]:
        """Metrics of the device that budgets or the objective name."""
        names = [*(limit.metric for limit in self.limits), self.minimise]
        return [name for name in dict.fromkeys(names) if name not in (KL, _FILE_SIZE)]


class Score(NamedTuple):
    """What a file loses, on text that decided nothing.

    Args:
        name: of the file.
        size: bytes.
        kl: nats a token, with the half width of the 95 % interval over windows of text.
        bits_per_byte: of the text.
        same_top: share of positions with the source's likeliest token.
    """

    name: str
    size: int
    kl: tuple[float, float]
    bits_per_byte: float
    same_top: float

    @staticmethod
    def of(name: str, size: int, divergence: Divergence) -> Score:
        """Returns the score of a file."""
        return Score(name, size, mean_interval(divergence.kl), divergence.bits_per_byte, fmean(divergence.same_top))

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        kl, half = self.kl
        interval = None if math.isinf(half) else [kl - half, kl + half]
        return {**self._asdict(), "kl": kl, "kl_ci95": interval}


@dataclass(frozen=True)
class Quantised:
    """A chosen file.

    Args:
        types: type of each slot.
        expected: sums by which it was chosen: `KL`, file_size and figures of the device.
        score: of the whole file.
        beside: scores of llama.cpp's mixtures.
        checks: budgets and what was measured of the whole file once it was chosen.
        figures: of the file, and of the device if any was needed.
    """

    types: Mapping[Slot, str]
    expected: Mapping[str, float]
    score: Score
    beside: Sequence[Score]
    checks: Sequence[Check] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def keeps_all(self) -> bool:
        """Whether no budget is broken."""
        return all(check.verdict != "broken" for check in self.checks)


def require_source(model: Path, log: Log) -> None:
    """Checks that a GGUF file can be quantised and compared with the result.

    Raises:
        InvalidInput: it holds no tokenizer, is split, or is of an architecture of the patched llama.cpp.
    """
    gguf = GgufFile.read(model)
    if gguf.header.tokenizer == "none":
        raise InvalidInput("holds no tokenizer, so no text can tell what types lose", where=str(model))
    if len(gguf.files) > 1:
        raise InvalidInput("is split into shards: join them with llama.cpp's llama-gguf-split", where=str(model))
    if LLAMA_CPP.needs_patched(model):
        raise InvalidInput("llama.cpp's own quantiser does not read this architecture", where=str(model))
    coarse = sorted({tensor.type_name for tensor in gguf.tensors.values()} - {"F32", "F16", "BF16"})
    if coarse:
        log(f"{model.name} is quantised already ({', '.join(coarse)}): what that lost is not counted")


class Quantiser:
    """Chooses types for one source.

    Args:
        request: what is wanted.
        build: of llama.cpp, with its own programs.
        folder: for files meanwhile; several times as large as the source.
        log: takes one line at a time.
    """

    def __init__(self, request: QuantiseRequest, build: Build, folder: Path, log: Log) -> None:
        self._request, self._build, self._folder, self._log = request, build, folder, log
        self._sha256 = sha256_of(request.source)
        self._cache = paths.cache() / DIVERGENCES
        self._cache.mkdir(parents=True, exist_ok=True)
        self._texts: dict[str, str] = {}

    def choose(self, destination: Path) -> Quantised:
        """Writes the chosen file and returns what it loses.

        Raises:
            InvalidInput: no choice keeps the budgets, or the text is too short.
            CandidateFailed: llama.cpp fails on the source.
            InfrastructureFailed: this machine lacks memory, disk or time for it.
        """
        request = self._request
        for text in ("reported_on", *["decided_on"] * (request.kl is not None)):
            self._predictions(text)  # first, as it finds that the text is too short
        fitting = {kind for slot in self.slots for kind in self.options(slot)}
        if unfit := [kind for kind in request.types if kind not in fitting]:
            self._log(f"{', '.join(unfit)} left out: no tensor has rows of a multiple of the type's block")
        base_kl = self._divergence({}, "chosen_on").mean_kl
        losses = self._losses(base_kl)
        figures = self._type_figures(losses) if request.measured else {}
        beside = list(self._beside())
        allowed = {limit.metric: limit.value for limit in request.budgets}
        for attempt in range(1, _TRIES + 1):
            types, expected = self._selected(losses, base_kl, figures, allowed)
            self._write(types, destination)
            broken = {} if attempt == _TRIES else self._broken(types, destination)
            if not broken:
                break
            for name, value in broken.items():
                allowed[name] *= min(0.99, expected[name] / value)
            self._log(f"the file breaks {' and '.join(broken)}: choosing again ({attempt + 1})")
        score = Score.of("chosen", destination.stat().st_size, self._divergence(types, "reported_on"))
        measured = self._figures(destination, measured=bool(request.measured))
        return Quantised(types, expected, score, beside, self._checks(measured, types, "reported_on"), measured)

    @cached_property
    def slots(self) -> dict[Slot, list[str]]:
        """Slot -> names of its tensors: those that llama.cpp's quantiser quantises."""
        tensors = self._base.tensors
        names = [name for name, tensor in tensors.items() if tensor.kind == Type.Q8_0]
        depth = 1 + max((_place(name)[1] for name in names), default=0)
        slots: dict[Slot, list[str]] = {}
        for name in names:
            role, layer = _place(name)
            part = 0 if layer < 0 else layer * self._request.parts // depth
            slots.setdefault(Slot(role, part), []).append(name)
        if not slots:
            raise Unsupported("holds no tensors that llama.cpp quantises", where=str(self._request.source))
        return slots

    @cached_property
    def _base(self) -> GgufFile:
        path = self._folder / "base.gguf"
        quantise_file(self._build, self._request.source, BASE, path, self._request.threads, {})
        return GgufFile.read(path)

    @cached_property
    def importance(self) -> Path | None:
        """A copy of the importance matrix, computed if no other run kept it; None: the request has no text for one.

        Raises:
            CandidateFailed: llama-imatrix fails on the source or on the text.
        """
        request = self._request
        if not request.importance_from:
            return None
        key = content_hash([_VERSION, self._sha256, self._build.runner.build, request.importance_from])
        path, copy = self._cache / f"{key}{IMPORTANCE}", self._folder / "importance.gguf"
        try:
            shutil.copyfile(path, copy)  # since `nas gc` may remove the other one meanwhile
            os.utime(path)
        except FileNotFoundError:
            self._log("computing the importance matrix")
            write_importance(self._build, request.source, request.importance_from, copy, request.threads)
            with replacing(path) as partial:
                shutil.copyfile(copy, partial)
        return copy

    def options(self, slot: Slot) -> list[str]:
        """Returns the types that fit all tensors of a slot, `BASE` first."""
        rows = [self._base.tensors[name].shape[-1] for name in self.slots[slot]]
        kinds = [BASE, *(kind for kind in self._request.types if kind != BASE)]
        return [kind for kind in kinds if all(row % GGML_QUANT_SIZES[_type(kind)][0] == 0 for row in rows)]

    def _bytes(self, slot: Slot, kind: str) -> float:
        block, size = GGML_QUANT_SIZES[_type(kind)]
        return sum(math.prod(self._base.tensors[name].shape) // block * size for name in self.slots[slot])

    def _weights(self, slot: Slot) -> float:
        return float(sum(math.prod(self._base.tensors[name].shape) for name in self.slots[slot]))

    def _losses(self, base_kl: float) -> dict[tuple[Slot, str], float]:
        """Returns what each type in each slot adds. Fewer bits always add something, so of equals `BASE` is chosen."""
        pairs = [(slot, kind) for slot in self.slots for kind in self.options(slot) if kind != BASE]
        losses = {(slot, BASE): 0.0 for slot in self.slots}
        for number, (slot, kind) in enumerate(pairs):
            self._log(Progress("divergences of single types", number, len(pairs), f"{slot} {kind}"))
            try:
                loss = self._divergence({slot: kind}, "chosen_on").mean_kl - base_kl
            except CandidateFailed as error:
                self._log(f"{kind} is left out of {slot}: {str(error).splitlines()[0]}")
                continue
            losses[slot, kind] = max(_LEAST, loss)
        self._log(Progress("divergences of single types", len(pairs), len(pairs)))
        return losses

    def _type_figures(self, losses: Mapping[tuple[Slot, str], float]) -> dict[str, Mapping[str, float]]:
        """Returns type -> figures of the device of a file of it, in those slots that have it in `losses`."""
        kinds = [BASE, *(kind for kind in self._request.types if kind != BASE)]
        fitting = {kind: [slot for slot in self.slots if (slot, kind) in losses] for kind in kinds}
        files = []
        for kind in kinds:
            if fitting[kind]:
                files.append(self._folder / f"{kind}.gguf")
                self._write(dict.fromkeys(fitting[kind], kind), files[-1])
        figures: dict[str, Mapping[str, float]] = {}
        for number, (file, report) in enumerate(zip(files, self._measured(files), strict=True)):
            self._log(Progress("measured types", number + 1, len(files), file.stem))
            if isinstance(report, NasError):
                if file.stem == BASE:
                    raise report
                self._log(f"{file.stem} is left out: {str(report).splitlines()[0]}")
                continue
            values = {name: report[name].value for name in self._request.measured}
            if unread := [name for name, value in values.items() if value is None]:
                why = report[unread[0]].reason or "not read"
                raise InvalidInput(f"{unread[0]} of {file.stem} is not known: {why}", where="--budget")
            figures[file.stem] = {name: value for name, value in values.items() if value is not None}
            file.unlink()
        return figures

    def _selected(
        self,
        losses: Mapping[tuple[Slot, str], float],
        base_kl: float,
        figures: Mapping[str, Mapping[str, float]],
        allowed: Mapping[str, float],
    ) -> tuple[dict[Slot, str], dict[str, float]]:
        """Returns the type of each slot, and the sums by which it was chosen."""
        objective = self._request.minimise
        fitting: dict[str, float] = {}
        for slot, kind in losses:
            fitting[kind] = fitting.get(kind, 0.0) + self._weights(slot)
        options: dict[Slot, list[Option[Slot]]] = {slot: [] for slot in self.slots}
        for (slot, kind), loss in losses.items():
            if figures and kind not in figures:
                continue
            share = self._weights(slot) / fitting[kind]
            costs = {KL: loss, _FILE_SIZE: self._bytes(slot, kind) / 1e6}
            costs |= {name: share * (figures[kind][name] - figures[BASE][name]) for name in self._request.measured}
            options[slot].append(Option(kind, costs[objective], costs))
        fixed = self._base.files[0].stat().st_size - sum(self._bytes(slot, BASE) for slot in self.slots)
        base = {KL: base_kl, _FILE_SIZE: fixed / 1e6, **(figures[BASE] if figures else {})}
        choice = select(options, base, allowed)
        if choice is None:
            minima = []
            for limit in self._request.budgets:
                name = limit.metric
                least = base[name] + sum(min(option.costs[name] for option in row) for row in options.values())
                lower = f", lowered to {show_number(allowed[name])}" if allowed[name] < limit.value else ""
                minima.append(f"{name} {show_number(least)} (limit {show_number(limit.value)}{lower})")
            text = f"no choice of types keeps the budgets; least, each alone: {', '.join(minima)}"
            raise InvalidInput(text, where="--budget")
        sums = total(choice, base)
        return {slot: option.name for slot, option in choice.items()}, {name: sums[name] for name in base}

    def _broken(self, types: Mapping[Slot, str], path: Path) -> dict[str, float]:
        """Returns metrics whose budgets a file breaks -> their values."""
        figures = self._figures(path, measured=any(limit.metric != _FILE_SIZE for limit in self._request.limits))
        checks = self._checks(figures, types, "decided_on")
        values = {check.limit.metric: check.figure.value for check in checks if check.verdict == "broken"}
        return {name: value for name, value in values.items() if value is not None}

    def _figures(self, path: Path, *, measured: bool) -> dict[str, Figure]:
        """Returns the size of a file, and its figures of the device if it is `measured`."""
        size = path.stat().st_size / 1e6
        figures = {_FILE_SIZE: Figure(value=size, low=size, high=size, n=1, log_sd=0.0, unit="MB")}
        if measured:
            (report,) = self._measured([path])
            if isinstance(report, NasError):
                raise report
            figures |= report
        return figures

    def _checks(self, figures: Mapping[str, Figure], types: Mapping[Slot, str], text: str) -> list[Check]:
        """Returns each budget with the figure of a file, that of the divergence on a text."""
        return [
            limit.check(self._divergence(types, text))
            if isinstance(limit, KlLimit)
            else Check.of(limit, figures[limit.metric])
            for limit in self._request.budgets
        ]

    def _measured(self, files: Sequence[Path]) -> list[dict[str, Figure] | NasError]:
        request = self._request
        benches = [
            BenchOptions(
                subject=file,
                runtime="llama.cpp",
                quantisation=None,
                device=request.device,
                workload=request.workload,
                repetitions=request.repetitions,
                db=request.db,
            )
            for file in files
        ]
        reports = bench_each(benches, self._log)
        return [report if isinstance(report, NasError) else figures_of(report) for report in reports]

    def _beside(self) -> Iterator[Score]:
        """Yields the scores of `BESIDE`, but for those that llama.cpp does not make of the source."""
        for name in BESIDE:
            try:
                yield self.mixture(name)
            except CandidateFailed as error:
                self._log(f"{name} is left out: {str(error).splitlines()[0]}")

    def mixture(self, name: str, *, importance: bool = True) -> Score:
        """Returns the score of one of llama.cpp's `MIXTURES`, by default with the same importance matrix."""
        path, matrix = self._folder / "beside.gguf", self.importance if importance else None
        quantise_file(self._build, self._request.source, name, path, self._request.threads, None, matrix)
        score = self.score(name, path, importance=matrix is not None)
        path.unlink()
        return score

    def score(self, name: str, path: Path, *, importance: bool = False) -> Score:
        """Returns the score of a file of one of llama.cpp's `MIXTURES`, made with the matrix or not, or of `SOURCE`."""
        divergence = self._kept_divergence(["mixture", name], path, "reported_on", importance=importance)
        return Score.of(name, path.stat().st_size, divergence)

    def _write(self, types: Mapping[Slot, str], path: Path) -> None:
        names = {name: _type(kind) for slot, kind in types.items() for name in self.slots[slot]}
        request = self._request
        quantise_file(self._build, request.source, BASE, path, request.threads, names, self.importance)

    def _divergence(self, types: Mapping[Slot, str], text: str) -> Divergence:
        """Returns how a file with the types of some slots, `BASE` elsewhere, differs from the source."""
        names = sorted((name, kind) for slot, kind in types.items() if kind != BASE for name in self.slots[slot])
        return self._kept_divergence(["types", names], None, text, types)

    def _kept_divergence(
        self,
        what: Sequence[Any],
        path: Path | None,
        text: str,
        types: Mapping[Slot, str] | None = None,
        *,
        importance: bool = True,
    ) -> Divergence:
        matrix = self._request.importance_from if importance else ""
        key = content_hash([_VERSION, self._sha256, self._build.runner.build, matrix, self._text(text), *what])
        record = self._cache / f"{key}.json"
        if record.is_file():
            return Divergence(**json.loads(record.read_text(encoding="utf-8")))
        scratch = self._folder / "compared.gguf"
        if path is None:
            self._write(types or {}, scratch)
        result = divergence(self._build, path or scratch, self._predictions(text), self._request.threads)
        scratch.unlink(missing_ok=True)
        write_durably(record, json.dumps(result._asdict()).encode())
        return result

    def _text(self, name: str) -> str:
        """Returns what is compared: the text and how much of it."""
        request = self._request
        windows = request.windows * (1 if name == "chosen_on" else 2)
        return content_hash([getattr(request, name), WINDOW, windows])

    def _predictions(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.is_dir():
            self._log("computing the source's predictions")
            request = self._request
            windows = request.windows * (1 if name == "chosen_on" else 2)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                partial = Path(scratch) / name
                partial.mkdir()
                text: str = getattr(request, name)
                write_predictions(self._build, request.source, text, windows, partial, request.threads)
                partial.rename(folder)
        return folder


def _type(name: str) -> Type:
    """Returns a type by llama.cpp's name, such as q4_k."""
    return Type[name.upper()]


_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")


def _place(name: str) -> tuple[str, int]:
    """Returns role and layer of a tensor; -1: it is in no layer."""
    match = _LAYER.fullmatch(name)
    return (match[2], int(match[1])) if match else (name.removesuffix(".weight"), -1)
