"""Search inside a trained model: library, costs on a device, exact selection, healing, files.

    OUT/teacher.safetensors  the imported model, where a folder of transformers was named
    OUT/plan.json            what was asked for; another request needs another folder
    OUT/measured/ID.json     figures of a layout on the device, by its id
    OUT/front.json           choices at several limits, with predicted and measured figures
    OUT/training/            checkpoint of the healing
    OUT/child.safetensors    healed weights of the chosen child
    OUT/report.json          what was measured and lost
    OUT/files/               the child's folder of transformers, GGUF files, card (`nas.train.release.files`)

Each step does nothing where its result is there: after a kill the same command continues, and gives the same child. The
library is a folder of its own, for all devices and budgets (`nas.train.adapt.library`).

Costs of alternatives add up only roughly (`nas.train.adapt.costs`), so the chosen child is measured itself; if it
exceeds a budget, the limits of the selection are lowered by the excess, some times.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from nas.core.block import Block
from nas.core.canonical import sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.core.limit import Limit
from nas.core.metrics import metric
from nas.core.replacement import (
    RECALL_GROUP,
    TEXT_GROUP,
    Slot,
    block_name,
    parsed,
    slots_of,
    with_blocks,
)
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import Worker
from nas.model.nn.mixes import ScoredText, compared
from nas.model.nn.model import Model
from nas.model.nn.weights import checkpoint_layout, load_weights, save_weights
from nas.model.text.documents import read_sources
from nas.train.adapt.alternatives import default_alternatives, further_mixers
from nas.train.adapt.checkpoints import import_once, is_imported, read_model
from nas.train.adapt.costs import Choices, Figures, Measure, Problem, replaced_by
from nas.train.adapt.healing import heal
from nas.train.adapt.hours import Parts, time_library
from nas.train.adapt.library import STREAM_BYTES, Library, LibrarySettings, Stream, TrainedTeacher, neighbouring_pairs
from nas.train.adapt.parallel import ParallelLibrary, Workers
from nas.train.adapt.selection import Option, select, total
from nas.train.adapt.settings import AdaptSettings
from nas.train.adapt.text import recall_text, report_sources, report_text
from nas.train.pretrain.data import Tokens, Vocabulary, tokenise
from nas.train.pretrain.next_token import ALL, Packed, bits_per_byte, held_out_windows
from nas.train.release.files import write_files
from nas.train.release.model_tokenizer import ModelTokenizer, read_model_tokenizer
from nas.train.release.options import FileOptions
from nas.train.release.tokenizer import MemberTokenizer

PLAN, FRONT, REPORT, CHILD = "plan.json", "front.json", "report.json", "child.safetensors"
TEACHER = "teacher.safetensors"
_ROUNDS = 4
"""Selections with lowered limits after a child that exceeds a budget."""
_MARGIN = 0.99
_WINDOW, _WINDOWS, _COUNTED = 256, 8, 1 << 20
"""Tokens of a window of held-out text, windows of a source, and counted tokens that a tokenizer is checked by."""


@dataclass(frozen=True)
class Child:
    """A choice of blocks.

    Args:
        choice: places that change, and their blocks; None: no block.
        predicted: sums of losses ("loss") and costs.
        measured: figures on the device.
        layout: of the child.
    """

    choice: Mapping[Slot, Block | None]
    predicted: Figures
    measured: Figures
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        blocks = [[slot.depth, slot.part, block_name(block)] for slot, block in sorted(self.choice.items())]
        return {
            "layout": self.layout.format(),
            "choice": blocks,
            "predicted": dict(self.predicted),
            "measured": dict(self.measured),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Child:
        """Reads what `to_json` returned."""
        choice = {Slot(depth, part): parsed(text, part) for depth, part, text in data["choice"]}
        return Child(choice, data["predicted"], data["measured"], Layout.parse(data["layout"]))


class Adaptation:
    """One adaptation of a trained model to budgets.

    Args:
        folder: of results.
        library_folder: of the library.
        teacher: a folder of transformers, or a checkpoint of the trained model, which names its layout.
        tokenizer: its tokenizer.json; the files of transformers beside it name special tokens and chat template.
        corpus: files and folders of text.
        budgets: limits that the child keeps.
        measure: figures of a layout on the device.
        device: names device, runtime and workload, for the plan.
        settings: of everything else.
        worker: this process.
        hours: that the whole should take; the tokens of library and healing are scaled to it by `claim`. None: they
            are those of the settings.
        workers: processes that train the library; None: this one, depth after depth.

    Raises:
        InvalidInput: the folder holds another adaptation, or text, tokenizer and model do not fit.
        Unsupported: no layout says the model, or its layers cannot be replaced one by one.
        InfrastructureFailed: the disk has no room for the imported model, the library or the child.

    What follows from the model's configuration, the request and the disk is checked before the weights are read. The
    plan is not written before `claim`; a refusal may leave the imported model, empty folders, and ids of the text in
    the cache.
    """

    def __init__(
        self,
        folder: Path,
        library_folder: Path,
        teacher: Path,
        tokenizer: Path,
        corpus: Sequence[Path],
        budgets: Sequence[Limit],
        measure: Measure,
        device: Mapping[str, Any],
        settings: AdaptSettings,
        worker: Worker,
        hours: float | None = None,
        workers: Workers | None = None,
    ) -> None:
        if hours is not None and workers is not None:
            raise InvalidInput(
                "the training of one process is timed: leave it out where workers train the library, and set"
                " library.tokens and healing.tokens in --config",
                where="--hours",
            )
        if not budgets:
            raise InvalidInput("name at least one budget, such as decode_p50<=20ms", where="--budget")
        self.folder, self.settings, self.worker, self._measure = folder, settings, worker, measure
        self.budgets = {limit.metric: limit.value for limit in budgets}
        layout = read_model(teacher).layout if teacher.is_dir() else checkpoint_layout(teacher)
        places = slots_of(layout)
        self.tokenizer = _tokenizer(tokenizer, layout)
        marks = self.tokenizer.marks if isinstance(self.tokenizer, ModelTokenizer) else None
        vocabulary = Vocabulary(tokenizer, layout.vocab, marks=marks)
        self._vocabulary = vocabulary
        if settings.healing.k >= layout.vocab:
            raise InvalidInput(f"healing.k is {settings.healing.k}, of a vocabulary of {layout.vocab:,}")
        further = further_mixers(settings.mixers, layout.d_model)
        self.alternatives = {slot: default_alternatives(layout, slot, settings.window, further) for slot in places}
        self.plan: dict[str, Any] = {
            "v": 1,
            "layout": layout.format(),
            "tokenizer": vocabulary.sha256,
            "budgets": self.budgets,
            "device": dict(device),
            "settings": settings.model_dump(mode="json"),
            **({} if hours is None else {"hours": hours}),
        }
        self._hours, self._workers = hours, workers
        self._check_plan()
        if (plan := folder / PLAN).is_file() and (tokens := json.loads(plan.read_bytes()).get("tokens")):
            self._scale(**tokens)
        (folder / "measured").mkdir(parents=True, exist_ok=True)
        self.checkpoint = self._imported(teacher, layout) if teacher.is_dir() else teacher
        self.teacher = TrainedTeacher.load(self.checkpoint, worker.device)
        self.sources: list[Tokens] = [
            tokenise(source, vocabulary, None, settings.library.seed, 1 << 20)
            for source in read_sources(corpus, settings.held_out)
        ]
        self.plan |= {"teacher": self.teacher.sha256, "text": [source.key for source in self.sources]}
        Packed("healing", self.sources, settings.healing.length, 1, 0)  # raises where there is too little text
        self.library = self._opened(library_folder, self.settings.library, worker)
        self._check_plan()
        _check_room(
            {self.library.folder: self.library.missing_bytes(self._needed()), folder: self._child_bytes(layout)}
        )

    def check_text(self) -> None:
        """Checks that the model predicts held-out text better than the frequencies of tokens do.

        A tokenizer of the same size as the model's own is found in this way. Frequencies are those of the training
        part, smoothed by Witten and Bell (1991, "The zero-frequency problem", method C).

        Raises:
            InvalidInput: it does not.
        """
        if (self.folder / PLAN).is_file():
            return
        vocab = self.teacher.layout.vocab
        counted = np.concatenate([source.train[:_COUNTED] for source in self.sources])
        counts = np.bincount(counted, minlength=vocab)
        seen = np.count_nonzero(counts)
        frequency = torch.from_numpy((counts + seen / vocab) / (len(counted) + seen))
        known = alone = tokens = 0.0
        for source in self.sources:
            for inputs, labels in islice(held_out_windows(source.held_out, _WINDOW), _WINDOWS):
                with torch.no_grad():
                    logits = self.teacher.model(inputs.to(self.worker.device))[0].float().cpu()
                text = ~torch.isin(labels[0], torch.tensor([self._vocabulary.start, self._vocabulary.end]))
                known += float(cross_entropy(logits, labels[0], reduction="none")[text].sum())
                alone -= float(frequency[labels[0][text]].log().sum())
                tokens += float(text.sum())
        if not known < alone:
            raise InvalidInput(
                f"with {self._vocabulary.path}, the model predicts held-out text no better than the frequencies of"
                f" tokens do ({known / tokens:.2f} and {alone / tokens:.2f} nats per token): name the tokenizer.json"
                " that it was trained with, or text of its kind",
                where="--tokenizer",
            )

    def claim(self) -> None:
        """Writes the plan: from now on the folder is of this adaptation.

        With `hours`, parts are timed first, once: the tokens that fit are in the plan, so that a run that continues
        trains on the same.

        Raises:
            InvalidInput: the hours are too few for scores and measurements.
        """
        if self._hours is not None and "tokens" not in self.plan:
            self._fit_into(self._hours)
        write_durably(self.folder / PLAN, _json(self.plan))

    def run(self) -> dict[str, Any]:
        """Runs what is missing, and returns the report.

        Raises:
            InvalidInput: no choice keeps the budgets.
        """
        self.claim()
        path = self.folder / REPORT
        if not path.is_file():
            with self.library.in_use():
                front, chosen = self._front()
                self.library.train({slot: (block,) for slot, block in chosen.choice.items()})
                write_durably(path, _json(self._report(front, chosen, self._healed(chosen))))
        report: dict[str, Any] = json.loads(path.read_bytes())
        return report

    def _needed(self) -> Mapping[Slot, Sequence[Block | None]]:
        """Returns the alternatives that what is missing reads at most: all, those of the chosen child, or none."""
        if (self.folder / REPORT).is_file():
            return {}
        if (self.folder / FRONT).is_file():
            return {slot: (block,) for slot, block in self._front()[1].choice.items()}
        return self.alternatives

    def _measured(self, layout: Layout) -> Figures:
        """Returns the figures of a layout, measured once.

        Raises:
            Unsupported: the runtime does not carry it.
        """
        path = self.folder / "measured" / f"{layout.id}.json"
        if not path.is_file():
            try:
                figures: dict[str, Any] = {name: float(value) for name, value in self._measure(layout).items()}
            except Unsupported as error:
                figures = {"unsupported": error.message}
            write_durably(path, _json({"layout": layout.format(), "figures": figures}))
        known: dict[str, Any] = json.loads(path.read_bytes())["figures"]
        if "unsupported" in known:
            raise Unsupported(known["unsupported"])
        if lacking := sorted(self.budgets.keys() - known.keys()):
            raise InvalidInput(f"{', '.join(lacking)} cannot be measured here", where="--budget")
        return known

    @property
    def choices(self) -> Choices:
        """The alternatives, with their costs."""
        return Choices(self.library, self.alternatives, self.settings, self._measured)

    def _front(self) -> tuple[list[Child], Child]:
        """Returns children at several limits, best first, and the best that keeps the budgets.

        Raises:
            InvalidInput: no choice keeps the budgets.
        """
        path = self.folder / FRONT
        if path.is_file():
            known = json.loads(path.read_bytes())
            return [Child.from_json(each) for each in known["front"]], Child.from_json(known["chosen"])
        problem = self.choices.problem()
        chosen = self._within(problem)
        first = next(iter(self.budgets))
        most = problem.base[first]
        least = most + sum(min(option.costs[first] for option in own) for own in problem.places.values())
        children = {chosen.layout.id: chosen}
        for point in range(self.settings.points):
            limit = least + (most - least) * point / (self.settings.points - 1)
            picked = select(problem.places, problem.base, {first: limit}, problem.terms)
            if picked is not None and (child := self._child(problem, picked)) is not None:
                children.setdefault(child.layout.id, child)
        front = _undominated(children.values(), first)
        write_durably(path, _json({"front": [each.to_json() for each in front], "chosen": chosen.to_json()}))
        return front, chosen

    def _healed(self, chosen: Child) -> Model:
        """Returns the child, trained end to end against the trained model."""
        path = self.folder / CHILD
        if path.is_file():
            model = Model(chosen.layout, None)
            load_weights(model, path)
            return model.to(self.worker.device).eval()
        model = heal(
            lambda: self.library.mix(chosen.choice), self.library, self.sources, self.settings.healing,
            self.folder / "training",
        )  # fmt: skip
        save_weights(model, path)
        return model

    def _bits_per_byte(self, model: Model) -> float:
        """Returns bits per byte of held-out text that nothing was chosen by."""
        with torch.no_grad():
            bits = bits_per_byte(
                lambda ids: model(ids.to(self.worker.device))[0],
                report_sources(self.sources, self._vocabulary, self.settings.report_tokens),
                self._vocabulary,
                self.settings.healing.length,
                self.worker.yield_hook,
            )
        return bits[ALL]

    def _fit_into(self, hours: float) -> None:
        """Times the parts of the adaptation, and scales the tokens of library and healing."""
        self.worker.log("timing the parts of the adaptation")
        layout, library, healing = self.teacher.layout, self.settings.library, self.settings.healing
        began = time.monotonic()
        self._measured(layout)
        measured = time.monotonic() - began
        count = 1 + len(self.choices.kinds) + len(set(layout.layers)) + self.settings.points
        quiet = replace(self.worker, log=lambda line: None)
        timed = time_library(lambda folder, settings: self._opened(folder, settings, quiet), library, self.alternatives)
        pairs = len(neighbouring_pairs(self.alternatives, self.settings.pairs, library.seed))
        parts = Parts(
            library_token=timed.token,
            again_token=timed.again_token,
            kept=STREAM_BYTES // (4 * Stream.numbers(layout)),
            healing_token=self._healing_seconds(quiet),
            scores=timed.scores * (1 + pairs / sum(map(len, self.alternatives.values()))),
            measurements=measured * count,
        )
        tokens = parts.tokens(hours, library.tokens, healing.tokens)
        self._scale(*tokens)
        self.library = self._opened(self.library.folder, self.settings.library, self.worker)
        self.worker.log(parts.describe(hours, *tokens))

    def _opened(self, folder: Path, settings: LibrarySettings, worker: Worker) -> Library:
        """Returns the library in a folder."""
        recall = self._recall_text(0) if settings.recall_tokens else None
        if self._workers is None:
            return Library(folder, self.teacher, self.sources, settings, worker, recall)
        return ParallelLibrary(
            folder, self.teacher, self.sources, settings, worker, recall, self.checkpoint, self._workers
        )

    def _scale(self, library: int, healing: int) -> None:
        """Sets the tokens of library and healing."""
        self.plan["tokens"] = {"library": library, "healing": healing}
        self.settings = self.settings.model_copy(
            update={
                "library": self.settings.library.model_copy(update={"tokens": library}),
                "healing": self.settings.healing.model_copy(update={"tokens": healing}),
            }
        )

    def _healing_seconds(self, quiet: Worker) -> float:
        """Returns seconds of healing for each token, of a child as large as the model."""
        healing = self.settings.healing
        tokens = max(1, healing.batch_tokens // healing.length) * healing.length
        taken = []
        with tempfile.TemporaryDirectory() as folder:
            library = self._opened(Path(folder), self.settings.library, quiet)
            for steps in (1, 3):
                sized = healing.model_copy(update={"tokens": steps * tokens})
                began = time.monotonic()
                heal(lambda: library.mix({}), library, self.sources, sized, Path(folder) / str(steps))
                taken.append(time.monotonic() - began)
        return max(0.0, taken[1] - taken[0]) / 2 / tokens

    def _imported(self, folder: Path, layout: Layout) -> Path:
        """Returns the checkpoint of a folder of transformers, imported once."""
        checkpoint = self.folder / TEACHER
        if not is_imported(folder, checkpoint):
            size = 4 * layout.params.total
            before = checkpoint.stat().st_size if checkpoint.is_file() else 0
            _check_room({self.folder: size - before + self._child_bytes(layout)})
            self.worker.log(f"importing {folder}: {size / 1e6:,.1f} MB")
            import_once(folder, checkpoint)
        return checkpoint

    def _child_bytes(self, layout: Layout) -> int:
        """Returns the disk space of the child, the checkpoint of its healing, and its files.

        The child takes four bytes a weight, a checkpoint three times as much (with moments, and twice while it is
        replaced), and its files about as much as the child again.
        """
        return 0 if (self.folder / CHILD).is_file() else 8 * 4 * layout.params.total

    def _check_plan(self) -> None:
        """Checks that the folder holds no other adaptation, as far as the plan is known."""
        path = self.folder / PLAN
        if not path.is_file():
            return
        before, wanted = json.loads(path.read_bytes()), {"hours": None} | json.loads(_json(self.plan))
        if other := ", ".join(sorted(key for key in wanted if before.get(key) != wanted[key])):
            raise InvalidInput(
                f"{self.folder} holds an adaptation with another {other}; name another folder", where="--output"
            )

    def _within(self, problem: Problem) -> Child:
        limits = dict(self.budgets)
        for _ in range(_ROUNDS):
            picked = select(problem.places, problem.base, limits, problem.terms)
            if picked is None:
                break
            child = self._child(problem, picked)
            excess = {} if child is None else {
                name: child.measured[name] / limit for name, limit in self.budgets.items()
                if child.measured[name] > limit
            }  # fmt: skip
            if child is not None and not excess:
                return child
            for name in excess or limits:
                limits[name] *= _MARGIN / excess.get(name, 1.0)
        listed = ", ".join(f"{name} <= {limit:g}" for name, limit in self.budgets.items())
        had = ", ".join(f"{name} {problem.base[name]:.4g}" for name in self.budgets)
        raise InvalidInput(f"no choice of blocks keeps {listed}; the model itself has {had}", where="--budget")

    def _child(self, problem: Problem, picked: Mapping[Slot, Option[Slot]]) -> Child | None:
        """Returns a choice with its figures; None: the runtime does not carry it."""
        choice = replaced_by(self.teacher.layout, picked)
        layout, _ = with_blocks(self.teacher.layout, choice)
        try:
            figures = self._measured(layout)
        except Unsupported as error:
            self.worker.log(f"a choice is left out: {error.message}")
            return None
        return Child(choice, total(picked, problem.base, problem.terms), figures, layout)

    def _report(self, front: Sequence[Child], chosen: Child, child: Model) -> dict[str, Any]:
        """Returns what was measured and lost, of the child on text that nothing was chosen by."""
        library, unhealed = self.settings.library, self.library.mix(chosen.choice)
        text = report_text(self.sources, library.length, library.score_tokens)
        if library.recall_tokens:
            text = text.with_windows_of(self._recall_text(1))

        def divergences(model: Model, ending: str = "") -> dict[str, float | None]:
            kl = compared(self.teacher.model, model, text, self.worker.yield_hook).kl
            means = text.means(kl)
            return {
                f"divergence{ending}": means[TEXT_GROUP],
                f"recall_divergence{ending}": means.get(RECALL_GROUP),
            }

        reported = report_sources(self.sources, self._vocabulary, self.settings.report_tokens)
        return {
            "teacher": {
                "layout": self.teacher.layout.format(),
                "bits_per_byte": self._bits_per_byte(self.teacher.model),
                "measured": dict(self._measured(self.teacher.layout)),
            },
            "child": chosen.to_json()
            | {
                "bits_per_byte": self._bits_per_byte(child),
                "bits_per_byte_before_healing": self._bits_per_byte(unhealed),
            }
            | divergences(child)
            | divergences(unhealed, "_before_healing"),
            "front": [each.to_json() for each in front],
            "budgets": self.budgets,
            "text": [source.name for source in self.sources],
            "held_out": {
                "selection": {"tokens": self.library.selection.ids.numel()},
                "report": {
                    "bytes": sum(each.held_out_bytes for each in reported),
                    "tokens": sum(len(each.held_out) for each in reported),
                    "divergence_tokens": int(text.groups[TEXT_GROUP].sum()),
                },
            },
        }

    def _recall_text(self, seed: int) -> ScoredText:
        library = self.settings.library
        return recall_text(self._vocabulary, library.length, library.recall_tokens, seed)


def _check_room(needed: Mapping[Path, int]) -> None:
    """Checks that disks have room.

    Args:
        needed: folder -> bytes.

    Raises:
        InfrastructureFailed: one has not.
    """
    disks: dict[int, int] = {}
    for folder, size in needed.items():
        disk = folder.stat().st_dev
        disks[disk] = disks.get(disk, 0) + size
        if (free := shutil.disk_usage(folder).free) < disks[disk]:
            raise InfrastructureFailed(
                f"{folder}: {disks[disk] / 1e6:,.1f} MB are needed, but the disk has {free / 1e6:,.1f} MB free;"
                " free some with `nas gc`, or name folders on another disk with --library and --output"
            )


def require_writable(folder: Path, where: str) -> None:
    """Creates a folder if it is missing, and checks that files can be written there.

    Raises:
        InvalidInput: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write to {folder}: {error.strerror}; name another folder", where=where) from error


def _tokenizer(path: Path, layout: Layout) -> MemberTokenizer:
    """Returns a tokenizer that is the model's as far as its size shows; embeddings may have rows without a token.

    Raises:
        InvalidInput: it has more tokens than the embedding has rows, or no end of a text.
    """
    known = read_model_tokenizer(path)
    if known.size > layout.vocab:
        raise InvalidInput(
            f"{path} has {known.size:,} tokens, but the model's embedding {layout.vocab:,} rows; name the"
            " tokenizer.json that the model was trained with",
            where="--tokenizer",
        )
    return known


def write_child(one: Adaptation, report: Mapping[str, Any], gguf: Sequence[str], pte_context: int | None) -> list[str]:
    """Writes the child's folder of transformers, GGUF files and card, and returns the paths of all files.

    Args:
        one: an adaptation that has run.
        report: of the run, for the card.
        gguf: quantisations of the GGUF files.
        pte_context: most tokens of a text in a .pte; None: no .pte.

    Raises:
        InfrastructureFailed: a file cannot be written.
    """
    child, teacher, held_out = report["child"], report["teacher"], report["held_out"]
    weights = one.folder / CHILD
    options = FileOptions(
        name="child",
        tokenizer=one.tokenizer,
        gguf=tuple(gguf),
        pte_context=pte_context,
        budgets={name: f"{limit:g} {metric(name).unit}" for name, limit in report["budgets"].items()},
        provenance={
            "adapted from": f"`{teacher['layout']}` (SHA-256 {one.teacher.sha256})",
            "text": ", ".join(report["text"]),
            "held-out text": f"{held_out['selection']['tokens']:,} tokens to choose blocks and to judge healing;"
            f" another {held_out['report']['bytes']:,} bytes for the figures below",
            "bits per byte on held-out text": f"{child['bits_per_byte']:.4f}, of the model it comes from"
            f" {teacher['bits_per_byte']:.4f}, before healing {child['bits_per_byte_before_healing']:.4f}",
            **{
                f"{name}, {metric(name).unit}": f"{child['measured'][name]:.4g}, of the model it comes from"
                f" {teacher['measured'][name]:.4g}"
                for name in report["budgets"]
            },
        },
    )
    folder = one.folder / "files"
    layout = Layout.parse(child["layout"])
    files = write_files(folder, layout, Checkpoint(weights, sha256_of(weights)), options, one.worker.log)
    return [str(folder / each.path) for each in files.files]


def _undominated(children: Iterable[Child], name: str) -> list[Child]:
    """Returns the children that no other one beats in predicted loss and the measured figure `name`, best first."""
    best, found = math.inf, []
    for child in sorted(children, key=lambda each: (each.predicted["loss"], each.measured[name])):
        if child.measured[name] < best:
            best = child.measured[name]
            found.append(child)
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
