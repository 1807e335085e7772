"""Search inside a trained model: library, costs on a device, exact selection, healing, files.

    OUT/teacher.safetensors  the imported model, where a folder of transformers or a GGUF file was named
    OUT/teacher.tokenizer/   the tokenizer of a GGUF file
    OUT/request.json         what was requested; another request needs another folder
    OUT/device.json          conditions of all figures (`nas.train.adapt.device`)
    OUT/front.json           choices at several limits, with predicted and measured figures
    OUT/training/            checkpoint of the healing
    OUT/child.safetensors    healed weights of the chosen child
    OUT/report.json          what was measured and lost
    OUT/curve/ID.json        the same of a further child of the front, and its healed weights beside it
    OUT/files/               the child's folder of transformers, GGUF files, card (`nas.train.release.files`)

Each step does nothing where its result exists: after a kill the same command continues, and gives the same child. The
library is a folder of its own, for all devices and budgets (`nas.train.adapt.library`).

Costs of alternatives add up only roughly (`nas.train.adapt.costs`), so the chosen child is measured itself, by the rule
of studies: where the chance that it keeps the budgets is not below 1 - SURE (`nas.core.scoring`), fresh repetitions
settle whether kept or broken is likelier. If it exceeds a budget, the limits of the selection are lowered by the
excess; `_ROUNDS` choices are tried.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from nas.core.canonical import sha256_of
from nas.core.errors import CandidateFailed, InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.core.limit import Limit
from nas.core.measurement import Figure
from nas.core.metrics import metric
from nas.core.progress import Progress
from nas.core.replacement import RECALL_GROUP, TEXT_GROUP, Alternative, Slot, Stored, block_name, parsed, with_blocks
from nas.core.stats import t_critical
from nas.core.units import show_number
from nas.measure.protocol.file_choice import Check
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.executorch.variants import NAME as EXECUTORCH
from nas.measure.runtimes.llama_cpp.variants import NAME as LLAMA_CPP
from nas.model.nn.fit import Worker
from nas.model.nn.mixes import ScoredText, compared
from nas.model.nn.model import Model
from nas.model.nn.weights import load_weights, save_weights
from nas.train.adapt.costs import Choices, Figures, Problem, replaced_by
from nas.train.adapt.device import Bench, BenchOf, figure_of, write_json
from nas.train.adapt.healing import heal, train_child
from nas.train.adapt.hours import RESERVE, PartTimes, time_library
from nas.train.adapt.library import (
    STREAM_BYTES,
    Library,
    LibrarySettings,
    Stream,
    TrainedTeacher,
    neighbouring_pairs,
    rounding_runtime,
)
from nas.train.adapt.parallel import ParallelLibrary, Workers
from nas.train.adapt.request import AdaptRequest
from nas.train.adapt.selection import Option, select, total
from nas.train.adapt.text import recall_text, report_sources, report_text
from nas.train.pretrain.cost import STATE_BYTES, UTILISATION, gpu_costs
from nas.train.pretrain.data import Tokens, Vocabulary
from nas.train.pretrain.next_token import ALL, Packed, bits_of, held_out_windows, window_nats
from nas.train.release.files import write_files
from nas.train.release.found_tokenizer import FoundTokenizer
from nas.train.release.options import DEFAULT_PTE_CONTEXT, FileOptions
from nas.train.release.tokenizer import MemberTokenizer

REQUEST = "request.json"
FRONT = "front.json"
REPORT = "report.json"
CHILD = "child.safetensors"
_TRAINING = "training"
_CHILD_MEASUREMENTS = 3
"""Of a chosen child: one, and fresh ones of twice the repetitions."""
_TIMED_STEPS = 3
"""Steps of healing that are timed."""
_ROUNDS = 4
"""Choices that are tried."""
_MARGIN = 0.99
"""Factor of a lowered limit, beyond the excess."""
_WINDOW = 256
"""Tokens of a window of held-out text that a tokenizer is checked by."""
_WINDOWS = 8
"""Windows of each source that a tokenizer is checked by."""
_COUNTED = 1 << 20
"""Tokens of each source whose frequencies a tokenizer is checked by."""


@dataclass(frozen=True)
class Child:
    """A choice of blocks, and of quantisations where these are chosen.

    Args:
        choice: slots that change, and what they have.
        predicted: sums of losses ("loss") and costs.
        measured: figures on the device.
        layout: of the child.
        chances: budget's metric -> chance that it is kept.
    """

    choice: Mapping[Slot, Alternative]
    predicted: Figures
    measured: Figures
    layout: Layout
    chances: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        blocks = [[slot.depth, slot.part, block_name(block)] for slot, block in sorted(self.choice.items())]
        return {
            "layout": self.layout.format(),
            "choice": blocks,
            "predicted": dict(self.predicted),
            "measured": dict(self.measured),
            "chances": dict(self.chances),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Child:
        """Reads what `to_json` returned."""
        choice = {Slot(depth, part): parsed(text, part) for depth, part, text in data["choice"]}
        return Child(choice, data["predicted"], data["measured"], Layout.parse(data["layout"]), data["chances"])


class Selected(NamedTuple):
    """What the selection gave.

    Args:
        teacher: figures of the trained model.
        front: children at several limits, best first.
        chosen: the best one that keeps the budgets.
    """

    teacher: Figures
    front: Sequence[Child]
    chosen: Child


@dataclass(eq=False)
class Adaptation:
    """An adaptation of a trained model to budgets; `nas.train.adapt.prepare.prepare` makes it.

    Args:
        request: what was requested.
        record: content of request.json, which `claim` writes.
        bench_of: returns what measures layouts on the device.
        worker: this process.
        workers: processes that train the library; None: this one, depth after depth.
        tokenizer: of the trained model.
        vocabulary: of the tokenizer.
        teacher: the trained model.
        sources: the text.
        healing_text: batches of the text for healing.
        alternatives: slot -> what may replace what the model has there.

    Raises:
        InvalidInput: there is too little text for the library.
        InfrastructureFailed: places choose quantisations, and there is no build here that rounds.
    """

    request: AdaptRequest
    record: dict[str, Any]
    bench_of: BenchOf
    worker: Worker
    workers: Workers | None
    tokenizer: MemberTokenizer
    vocabulary: Vocabulary
    teacher: TrainedTeacher
    sources: Sequence[Tokens]
    healing_text: Packed
    alternatives: Mapping[Slot, Sequence[Alternative]]
    library: Library = field(init=False)
    bench: Bench = field(init=False)

    def __post_init__(self) -> None:
        self.library = self._open_library(self.request.library_folder, self.request.library, self.worker, self.workers)
        slot, block = next((slot, block) for slot in self.alternatives if (block := slot.block(self.teacher.layout)))
        for name in self.request.bits:  # a build that rounds is missed before anything is trained
            self.library.module(slot, Stored(block, name))
        self.bench = self.bench_of(self.choices.examples)

    @property
    def folder(self) -> Path:
        """Folder of results."""
        return self.request.output

    @property
    def limits(self) -> list[Limit]:
        """Budgets that the child keeps; relative ones are multiples of the model's own figures."""
        return [
            Limit(name, float(value.removesuffix("x")), True) if isinstance(value, str) else Limit(name, value)
            for name, value in self.record["budgets"].items()
        ]

    @property
    def choices(self) -> Choices:
        """The alternatives, with their costs."""
        return Choices(self.library, self.layout, self.alternatives, self.request, self._measured)

    @property
    def layout(self) -> Layout:
        """Layout of the trained model, with the quantisation of its file where places choose one."""
        stored = self.request.deploy_quantisation if self.request.bits else ""
        return replace(self.teacher.layout, quantisation=stored)

    def check_text(self) -> None:
        """Checks that the model predicts held-out text better than the frequencies of tokens do.

        A tokenizer of the same size as the model's own is found in this way. Frequencies are those of the training
        part, smoothed by Witten and Bell (1991, "The zero-frequency problem", method C).

        Raises:
            InvalidInput: it does not.
        """
        if (self.folder / REQUEST).is_file():
            return
        vocab = self.teacher.layout.vocab
        counted = np.concatenate([source.train[:_COUNTED] for source in self.sources])
        counts = np.bincount(counted, minlength=vocab)
        types = np.count_nonzero(counts)
        frequency = torch.from_numpy((counts + types / vocab) / (len(counted) + types))
        model_nats = frequency_nats = tokens = 0.0
        for source in self.sources:
            for inputs, labels in islice(held_out_windows(source.held_out, _WINDOW), _WINDOWS):
                with torch.no_grad():
                    logits = self.teacher.model(inputs.to(self.worker.device))[0].float().cpu()
                text = ~torch.isin(labels[0], torch.tensor(self.vocabulary.special))
                model_nats += float(cross_entropy(logits, labels[0], reduction="none")[text].sum())
                frequency_nats -= float(frequency[labels[0][text]].log().sum())
                tokens += float(text.sum())
        if not model_nats < frequency_nats:
            raise InvalidInput(
                f"with {self.vocabulary.path}, the model predicts held-out text no better than the frequencies of"
                f" tokens do ({model_nats / tokens:.2f} and {frequency_nats / tokens:.2f} nats per token): name the"
                " tokenizer.json that it was trained with, or text of its kind",
                where="--tokenizer",
            )

    def claim(self) -> None:
        """Writes the record of the request: from now on the folder belongs to this adaptation.

        With `hours`, parts are timed first, once: the tokens that fit are recorded, so that a run that continues trains
        on the same.

        Raises:
            InvalidInput: the hours are too few for scores and measurements.
        """
        if self.request.hours is not None and "tokens" not in self.record:
            self._fit_into(self.request.hours)
        write_json(self.folder / REQUEST, self.record)

    def run(self) -> dict[str, Any]:
        """Runs what is missing, and returns the report.

        Raises:
            InvalidInput: no choice keeps the budgets.
        """
        if self.request.library.recall_tokens:
            self._recall_text(1)  # what the report needs is refused before anything is trained
        self.claim()
        path = self.folder / REPORT
        if not path.is_file():
            with self.library.in_use():
                selected = self._select()
                self.library.train({slot: (block,) for slot, block in selected.chosen.choice.items()})
                child = self._healed(selected.chosen, self.folder / CHILD)
                write_json(path, self._report(selected, child))
        report: dict[str, Any] = json.loads(path.read_bytes())
        windows = {"scores": self.request.library.window, "healing": self.request.healing.length}
        return report | {"windows": windows, "curve": self._curve() if self.request.front else []}

    def _curve(self) -> list[dict[str, Any]]:
        """Returns what the chosen child and further ones of the front lose after healing, most first."""
        selected = self._select()
        others = [child for child in selected.front if child.choice and child.layout != selected.chosen.layout]
        places = np.linspace(0, len(others) - 1, min(self.request.front, len(others)))  # the ends of the front, too
        rows = []
        with self.library.in_use():
            for child in [selected.chosen, *(others[round(place)] for place in places)]:
                path = self.folder / "curve" / f"{child.layout.id}.json"
                if not path.is_file():
                    path.parent.mkdir(exist_ok=True)
                    weights = self.folder / CHILD if child is selected.chosen else path.with_suffix(".safetensors")
                    row = child.to_json() | self._lost(child.layout, self._healed(child, weights), weights)
                    write_json(path, row)
                rows.append(json.loads(path.read_bytes()))
        return sorted(rows, key=lambda row: -row["bits_per_byte"])

    def required_blocks(self) -> Mapping[Slot, Sequence[Alternative]]:
        """Returns the alternatives that missing results depend on: all, those of the chosen child, or none."""
        if (self.folder / REPORT).is_file():
            return {}
        if (self.folder / FRONT).is_file():
            return {slot: (block,) for slot, block in self._select().chosen.choice.items()}
        return self.alternatives

    def _measured(self, layout: Layout) -> Figures:
        """Returns the figures of a layout that the device has.

        Raises:
            Unsupported: the runtime does not carry it.
            CandidateFailed: it does not run, or a budget's metric is not among them.
            InvalidInput: of the model itself, a budget's metric is not among them.
        """
        figures = self.bench.measure(layout).figures
        try:
            return self._values(figures)
        except CandidateFailed as error:
            if layout == self.layout:
                raise InvalidInput(str(error), where="--budget") from error
            raise

    def _values(self, figures: Mapping[str, Figure]) -> Figures:
        for limit in self.limits:
            try:
                figure_of(figures, limit.metric)
            except InvalidInput as error:
                raise CandidateFailed("unmeasured", error.message) from error
        return {name: figure.value for name, figure in figures.items() if figure.value is not None}

    def _select(self) -> Selected:
        """Returns children at several limits, and the best that keeps the budgets.

        Raises:
            InvalidInput: no choice keeps the budgets.
        """
        path = self.folder / FRONT
        if path.is_file():
            record = json.loads(path.read_bytes())
            front = [Child.from_json(child) for child in record["front"]]
            return Selected(record["teacher"], front, Child.from_json(record["chosen"]))
        with self.bench.opened():
            problem = self.choices.problem()
            chosen = self._within(problem)
            first = self.limits[0].metric
            most = problem.base[first]
            least = most + sum(min(option.costs[first] for option in options) for options in problem.options.values())
            children = {chosen.layout.id: chosen}
            for point in range(self.request.points):
                self.worker.log(Progress("measured points of the front", point, self.request.points))
                limit = least + (most - least) * point / (self.request.points - 1)
                picked = select(problem.options, problem.base, {first: limit}, problem.terms)
                if picked is not None and (child := self._child(problem, picked)) is not None:
                    children.setdefault(child.layout.id, child)
        self.worker.log(Progress("measured points of the front", self.request.points, self.request.points))
        front = _undominated(children.values(), first)
        record = {"front": [child.to_json() for child in front], "chosen": chosen.to_json()}
        write_json(path, record | {"teacher": dict(problem.base)})
        return Selected(problem.base, front, chosen)

    def _healed(self, child: Child, path: Path) -> Model:
        """Returns a child, trained end to end against the trained model; its weights are kept in `path`."""
        if path.is_file():
            model = Model(child.layout.architecture, None)
            load_weights(model, path)
            return model.to(self.worker.device).eval()
        self.library.train({slot: (block,) for slot, block in child.choice.items()})
        model = heal(
            lambda: self.library.mix(child.choice),
            self.library,
            self.healing_text,
            self.request.healing,
            self.folder / _TRAINING,
        )
        save_weights(model, path)
        shutil.rmtree(self.folder / _TRAINING, ignore_errors=True)
        return model

    @cached_property
    def _reported(self) -> list[Tokens]:
        """Sources with the held-out text that nothing is chosen by."""
        return report_sources(self.sources, self.vocabulary, self.request.report_tokens)

    @cached_property
    def _teacher_nats(self) -> dict[str, list[float]]:
        return self._nats(self.teacher.model, "model")

    @cached_property
    def _stored_nats(self) -> dict[str, list[float]]:
        """Those of the model with the weights that its file has."""
        rounded = self._rounded(self.layout, self.teacher.checkpoint, self.teacher.sha256)
        return self._nats(rounded, "model as stored")

    def _lost(self, layout: Layout, healed: Model, weights: Path) -> dict[str, Any]:
        """Returns bits per byte of a child, and changes from the model's of each source and all.

        Where quantisations are chosen, "stored" holds the same of the weights in files, the model's and the child's.
        """
        lost = self._lost_by(self._nats(healed, "child"))
        if layout.quantisation:
            rounded = self._rounded(layout, weights, sha256_of(weights))
            lost["stored"] = self._lost_by(self._nats(rounded, "child as stored"), self._stored_nats)
        return lost

    def _lost_by(
        self, nats: Mapping[str, Sequence[float]], before: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, Any]:
        """Returns bits per byte, and the changes from `before`; None: the model's."""
        before = before or self._teacher_nats
        changes = {name: relative_change(before[name], nats[name]) for name in before}
        changes[ALL] = relative_change([*chain(*before.values())], [*chain(*nats.values())])
        return {"bits_per_byte": bits_of(nats, self._reported)[ALL], "bits_per_byte_change": changes}

    def _rounded(self, layout: Layout, weights: Path, sha256: str) -> nn.Module:
        """Returns a model with the weights that its file has."""
        assert self.library.rounding is not None, "quantisations are chosen"
        rounded = self.library.rounding.rounded(layout.architecture, layout.quantisation, Checkpoint(weights, sha256))
        return rounded.to(self.worker.device).eval().requires_grad_(False)

    def _nats(self, model: nn.Module, name: str) -> dict[str, list[float]]:
        """Returns source -> nats of each window of held-out text that nothing was chosen by."""
        length, reported = self.request.healing.length, self._reported
        windows = sum(-(-(len(source.held_out) - 1) // length) for source in reported)
        hook = self._hook(f"bits per byte of the {name}", windows)
        with torch.no_grad():
            nats = window_nats(
                lambda ids: model(ids.to(self.worker.device))[0], reported, self.vocabulary, length, hook
            )
        self.worker.log(Progress(f"bits per byte of the {name}", windows, windows))
        return nats

    def _hook(self, name: str, passes: int) -> Callable[[], None]:
        """Returns the hook of so many passes, which says how many are done."""
        numbers = count()

        def hook() -> None:
            self.worker.log(Progress(name, next(numbers), passes))
            self.worker.yield_hook()

        return hook

    def plan(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """Returns what `run` would take: tokens, FLOPs, bytes, seconds of parts that are timed here, and GPUs.

        Args:
            price_per_hour: of a GPU.

        Raises:
            InvalidInput: the hours are too few for scores and measurements.
        """
        library, healing = self.request.library.tokens, self.request.healing.tokens
        hours = self.request.hours if "tokens" not in self.record else None
        disk_bytes = self.library.missing_bytes(self.required_blocks()) + child_bytes(
            self.folder, self.teacher.layout, self.request.front
        )
        state_bytes = (4 + STATE_BYTES) * self.teacher.layout.params.total
        self.worker.log(
            f"{sum(self._flops(library, healing).values()):.2g} FLOPs for {library:,} and {healing:,} tokens,"
            f" {disk_bytes / 1e9:,.1f} GB of disk and {state_bytes / 1e9:,.1f} GB of memory"
        )
        times = self._timed(hours)
        if hours is not None:
            library, healing = times.tokens(hours, library, healing)
        seconds, flops = times.parts(library, healing), self._flops(library, healing)
        return {
            "alternatives": sum(map(len, self.alternatives.values())),
            "places": len(self.alternatives),
            "tokens": {"library": library, "healing": healing},
            "seconds": seconds | {"total": sum(seconds.values()) / (1 - RESERVE)},
            "disk_bytes": disk_bytes,
            "state_bytes": state_bytes,
            "flops": flops,
            "utilisation": UTILISATION,
            "gpus": [asdict(cost) for cost in gpu_costs(sum(flops.values()), state_bytes, price_per_hour)],
        }

    def _flops(self, library: int, healing: int) -> dict[str, float]:
        """Returns part -> FLOPs, for so many tokens of library and healing; a backward pass takes two forward ones."""
        layout, settings = self.teacher.layout, self.request.library
        context = max(1, settings.length // 2)
        blocks = [alternative for listed in self.alternatives.values() for alternative in listed]
        trainings = {
            (slot, self.library.trainable(slot, alternative))
            for slot, listed in self.alternatives.items()
            for alternative in listed
        }
        trained = sum(block.spec.flops(block, layout.d_model, context) for _, block in trainings if block is not None)
        child = layout.flops(max(1, self.request.healing.length // 2))
        return {
            "library": library * (3 * trained + layout.flops(context)),
            "scores": len(blocks) * settings.score_tokens * layout.flops(context),
            "healing": healing * 4 * child * (1 + self.request.front),
        }

    def _fit_into(self, hours: float) -> None:
        """Scales the tokens of library and healing so that the adaptation takes `hours`."""
        times = self._timed(hours)
        tokens = times.tokens(hours, self.request.library.tokens, self.request.healing.tokens)
        self.request = self.request.with_tokens(*tokens)
        self.record["tokens"] = dict(zip(("library", "healing"), tokens, strict=True))
        self.library = self._open_library(self.request.library_folder, self.request.library, self.worker)
        self.worker.log(times.describe(hours, *tokens))

    def _timed(self, hours: float | None) -> PartTimes:
        """Times the parts of the adaptation in this process; refuses too few hours as soon as it is clear."""
        log = self.worker.log
        log("timing the parts of the adaptation: a measurement")
        layout, library, healing = self.layout, self.request.library, self.request.healing
        with self.bench.opened():
            measured = self.bench.measure(layout).seconds
        count = 1 + len(self.choices.kinds) + len(set(layout.layers)) + self.request.points + _CHILD_MEASUREMENTS
        times = PartTimes(0.0, 0.0, 0, 0.0, 0.0, measurements=measured * count)
        if hours is not None:
            times.tokens(hours, library.tokens, healing.tokens)
        quiet = replace(self.worker, log=lambda line: None)
        training = time_library(
            lambda folder, settings: self._open_library(folder, settings, quiet),
            library,
            self.alternatives,
            log,
            self._scratch(),
        )
        pairs = len(neighbouring_pairs(self.alternatives, self.request.pairs, library.seed))
        times = replace(
            times,
            library_token=training.token,
            recomputed_token=training.recomputed_token,
            stored_tokens=STREAM_BYTES // (4 * Stream.numbers(layout)),
            scores=training.scores * (1 + pairs / sum(map(len, self.alternatives.values()))),
        )
        if hours is not None:
            times.tokens(hours, library.tokens, healing.tokens)
        log("timing the parts of the adaptation: steps of healing")
        return replace(times, healing_token=self._healing_seconds(quiet) * (1 + self.request.front))

    def _healing_seconds(self, quiet: Worker) -> float:
        """Returns seconds of healing for each token, of a child as large as the model."""
        tokens, scratch = self.healing_text.sequences * self.healing_text.length, self._scratch()
        library = self._open_library(scratch, self.request.library, quiet)

        def seconds(steps: int) -> float:
            healing = self.request.healing.model_copy(update={"tokens": steps * tokens})
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                return train_child(library.mix({}), library, self.healing_text, healing, Path(folder))

        seconds(1)  # what only the first training takes, such as loading kernels, does not count
        return seconds(_TIMED_STEPS) / _TIMED_STEPS / tokens

    def _scratch(self) -> Path:
        """Returns a folder for files meanwhile, which are large: where there is room for checkpoints of the healing."""
        folder = self.folder / _TRAINING
        folder.mkdir(exist_ok=True)
        return folder

    def _open_library(
        self, folder: Path, settings: LibrarySettings, worker: Worker, workers: Workers | None = None
    ) -> Library:
        """Opens a library; recall is scored where it counts, and other scores than those of sums are of all text."""
        exact = self.request.pairs or self.request.write_space is not None
        settings = settings.model_copy(update={"score_error": 0.0}) if exact else settings
        counts = self.request.recall or self.request.write_space is not None
        recall = self._recall_text(0) if counts and settings.recall_tokens else None
        rounding = rounding_runtime(self.request.runtime if self.request.bits else None)
        if workers is None:
            return Library(folder, self.teacher, self.sources, settings, worker, recall, rounding)
        return ParallelLibrary(folder, self.teacher, self.sources, settings, worker, recall, rounding, workers)

    def _within(self, problem: Problem) -> Child:
        """Returns the best child that keeps the budgets as measured.

        Raises:
            InvalidInput: no choice keeps them.
        """
        budgets = self._budgets(problem.base)
        limits, attempts = dict(budgets), 0
        for _ in range(_ROUNDS):
            self.worker.log("selecting and measuring a child")
            picked = select(problem.options, problem.base, limits, problem.terms)
            if picked is None:
                break
            attempts += 1
            if (child := self._child(problem, picked, decide=True)) is None:
                predicted = total(picked, problem.base, problem.terms)
                limits = {name: _MARGIN * min(limit, predicted[name]) for name, limit in limits.items()}
                continue
            excess = {name: child.measured[name] / limit for name, limit in budgets.items()}
            excess = {name: ratio for name, ratio in excess.items() if ratio > 1}
            if not excess:
                return child
            for name, ratio in excess.items():
                limits[name] *= _MARGIN / ratio
        limits_text = ", ".join(f"{name} <= {limit:g}" for name, limit in budgets.items())
        figures = ", ".join(f"{name} {show_number(problem.base[name])}" for name in budgets)
        none = f"none of the choices of blocks that were tried, {attempts}," if attempts else "no choice of blocks"
        raise InvalidInput(f"{none} keeps {limits_text}; the model itself has {figures}", where="--budget")

    def _child(self, problem: Problem, picked: Mapping[Slot, Option[Slot]], *, decide: bool = False) -> Child | None:
        """Returns a choice with its figures; None: the runtime does not carry it, it does not run or lacks a figure.

        decide: its figures are fresh ones, unless the first ones break a budget.
        """
        choice = replaced_by(self.layout, picked)
        layout, _ = with_blocks(self.layout, choice)
        try:
            figures = self.bench.measure(layout).figures
            values = self._values(figures)
            if decide and not any(check.verdict == "broken" for check in self._checks(figures, problem.base)):
                figures = self.bench.measure(layout, fresh=True).figures
                values = self._values(figures)
        except (Unsupported, CandidateFailed) as error:
            self.worker.log(f"a choice is left out: {error}")
            return None
        checks = self._checks(figures, problem.base)
        chances = {check.limit.metric: check.chance for check in checks if check.chance is not None}
        predicted = total(picked, problem.base, problem.terms)
        return Child(choice, predicted, values, layout, chances)

    def _budgets(self, base: Figures) -> dict[str, float]:
        """Returns metric -> limit in its unit, for a model with the figures `base`."""
        return {limit.metric: limit.of(base).value for limit in self.limits}

    def _checks(self, figures: Mapping[str, Figure], base: Figures) -> list[Check]:
        relative = [limit for limit in self.limits if limit.relative]
        teacher = self.bench.measure(self.layout).figures if relative else {}
        return [
            Check.of(
                limit.of(base), figure_of(figures, limit.metric), teacher[limit.metric] if limit.relative else None
            )
            for limit in self.limits
        ]

    def _report(self, selected: Selected, healed: Model) -> dict[str, Any]:
        """Returns what was measured, and what the child loses on text that nothing was chosen by."""
        self.worker.log("comparing the child and the model on text that nothing was chosen by")
        chosen = selected.chosen
        library, unhealed = self.request.library, self.library.mix(chosen.choice)
        text = report_text(self.sources, library.window, library.score_tokens)
        if library.recall_tokens:
            text = text.with_windows_of(self._recall_text(1))

        def divergences(model: Model, ending: str = "") -> dict[str, float | None]:
            name = f"divergence of the child{ending.replace('_', ' ')}"
            passes = sum(1 for _ in text.passes(self.layout.vocab))
            kl = compared(self.teacher.model, model, text, self._hook(name, passes)).kl
            means = text.means(kl)
            return {f"divergence{ending}": means[TEXT_GROUP], f"recall_divergence{ending}": means.get(RECALL_GROUP)}

        reported = self._reported
        before_healing = self._lost_by(self._nats(unhealed, "child before healing"))
        layout = self.layout
        stored = {"stored": self._lost_by(self._stored_nats)} if layout.quantisation else {}
        return {
            "teacher": {
                "layout": layout.format(),
                "bits_per_byte": bits_of(self._teacher_nats, reported)[ALL],
                "measured": dict(selected.teacher),
            }
            | stored,
            "child": chosen.to_json()
            | self._lost(chosen.layout, healed, self.folder / CHILD)
            | {"bits_per_byte_before_healing": before_healing["bits_per_byte"]}
            | divergences(healed)
            | divergences(unhealed, "_before_healing"),
            "front": [child.to_json() for child in selected.front],
            "budgets": self._budgets(selected.teacher),
            "text": [source.name for source in self.sources],
            "held_out": {
                "selection": {"tokens": self.library.selection.ids.numel()},
                "report": {
                    "bytes": sum(source.held_out_bytes for source in reported),
                    "tokens": sum(len(source.held_out) for source in reported),
                    "divergence_tokens": int(text.groups[TEXT_GROUP].sum()),
                },
            },
        }

    def _recall_text(self, seed: int) -> ScoredText:
        library = self.request.library
        return recall_text(self.vocabulary, library.window, library.recall_tokens, seed)


def relative_change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Returns the relative change of a sum over windows of text, and its 95 % interval; None: there is one window.

    The error is that of a ratio of sums (Cochran 1977, Sampling Techniques, eq. 6.13): the text is a sample of windows,
    on which both were computed.
    """
    x, y = np.asarray(before), np.asarray(after)
    ratio = float(y.sum() / x.sum())
    if len(x) == 1:
        return ratio - 1, None, None
    error = math.sqrt(len(x) * np.var(y - ratio * x, ddof=1)) / float(x.sum())
    half = t_critical(0.95, len(x) - 1) * error
    return ratio - 1, ratio - 1 - half, ratio - 1 + half


def child_bytes(folder: Path, layout: Layout, front: int) -> int:
    """Returns the bytes of what is missing in `folder`: the child and its files, further ones, and checkpoints."""
    # The front may have fewer children than that: then these bytes are asked for without need.
    further = max(0, front - len(list((folder / "curve").glob("*.safetensors"))))
    missing = further + 2 * (not (folder / CHILD).is_file())
    # Four bytes a weight; of one healing at a time a checkpoint of six times as much (moments; two while one is
    # replaced), and half of that for the first rate's, if that was too high.
    return (missing + 9 * (missing > 0)) * 4 * layout.params.total


def write_child(adaptation: Adaptation, report: Mapping[str, Any]) -> list[str]:
    """Writes the child's folder of transformers, GGUF files and card, and returns the paths of all files.

    Args:
        adaptation: has run.
        report: of the run, for the card.

    Raises:
        InfrastructureFailed: a file cannot be written.
    """
    child, teacher, held_out = report["child"], report["teacher"], report["held_out"]
    request, weights, layout = adaptation.request, adaptation.folder / CHILD, Layout.parse(child["layout"])
    chosen = request.runtime == LLAMA_CPP and layout.quantisation and layout.quantisation not in request.gguf
    stored_as = (layout.quantisation,) if chosen else ()
    options = FileOptions(
        name="child",
        tokenizer=adaptation.tokenizer,
        gguf=(*stored_as, *request.gguf),
        context=FoundTokenizer(adaptation.tokenizer, request.model).context,
        pte_context=DEFAULT_PTE_CONTEXT if request.pte else None,
        pte=layout.quantisation or None if request.runtime == EXECUTORCH else None,
        budgets={name: f"{limit:g} {metric(name).unit}" for name, limit in report["budgets"].items()},
        provenance={
            "adapted from": f"`{teacher['layout']}` (SHA-256 {adaptation.teacher.sha256})",
            "text": ", ".join(report["text"]),
            "held-out text": f"{held_out['selection']['tokens']:,} tokens to choose blocks and to judge healing;"
            f" another {held_out['report']['bytes']:,} bytes for the figures below",
            "bits per byte on held-out text": f"{child['bits_per_byte']:.4f}, of the model it comes from"
            f" {teacher['bits_per_byte']:.4f}, before healing {child['bits_per_byte_before_healing']:.4f}",
            **_stored_bits(layout, teacher, child),
            **{
                f"{name}, {metric(name).unit}": f"{show_number(child['measured'][name])}, of the model it comes from"
                f" {show_number(teacher['measured'][name])}"
                for name in report["budgets"]
            },
        },
    )
    folder = adaptation.folder / "files"
    files = write_files(
        folder, layout.architecture, Checkpoint(weights, sha256_of(weights)), options, adaptation.worker.log
    )
    return [str(folder / file.path) for file in files.files]


def _stored_bits(layout: Layout, teacher: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a card says of bits per byte with the weights of files, where quantisations are chosen."""
    if not layout.quantisation:
        return {}
    before = Layout.parse(teacher["layout"]).quantisation
    comparison = f"of the model it comes from, as {before}, {teacher['stored']['bits_per_byte']:.4f}"
    return {f"bits per byte as {layout.quantisation}": f"{child['stored']['bits_per_byte']:.4f}, {comparison}"}


def _undominated(children: Iterable[Child], name: str) -> list[Child]:
    """Returns the children that no other one beats in predicted loss and the measured figure `name`, best first."""
    front: list[Child] = []
    for child in sorted(children, key=lambda child: (child.predicted["loss"], child.measured[name])):
        if not front or child.measured[name] < front[-1].measured[name]:
            front.append(child)
    return front
