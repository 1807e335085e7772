"""`nas adapt --hours`: how many tokens library and healing can be trained on in a given time.

The parts of an adaptation are timed on the model itself: training steps at one depth of each kind of layer, the forward
pass of a layer, steps of healing, the scores of one depth of each kind, and one measurement on the device. Trainings
get the time that scores and measurements leave; their tokens are scaled by one factor. If the residual streams of all
tokens do not fit in memory (`nas.train.adapt.library.STREAM_BYTES`), each depth recomputes all layers below it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nas.core.errors import InvalidInput
from nas.core.progress import Log, Progress
from nas.core.replacement import Alternative, Slot
from nas.core.units import show_duration
from nas.model.nn.fit import precision_of
from nas.train.adapt.library import Library, LibrarySettings

Alternatives = Mapping[Slot, Sequence[Alternative]]
RESERVE = 0.1
"""Share of the time for what is not timed: assembling, checkpoints, the report and the files."""
_STEPS = 3
"""Training steps that are timed."""
_MULTIPLE = 256
"""Numbers of tokens are multiples of it."""


@dataclass(frozen=True)
class PartTimes:
    """Seconds of the parts of an adaptation.

    Args:
        library_token: of training all alternatives, for each token that each is trained on.
        recomputed_token: in addition, for each token whose residual stream is recomputed at every depth.
        stored_tokens: tokens whose residual streams fit in memory.
        healing_token: of healing, for each token.
        scores: of scoring all alternatives.
        measurements: of measuring on the device.
    """

    library_token: float
    recomputed_token: float
    stored_tokens: int
    healing_token: float
    scores: float
    measurements: float

    def tokens(self, hours: float, library: int, healing: int) -> tuple[int, int]:
        """Returns tokens of library and healing that fit, in the given proportion, a multiple of 256 each.

        Raises:
            InvalidInput: scores and measurements alone take longer.
        """
        budget = 3600 * hours * (1 - RESERVE) - self.scores - self.measurements
        trainings = max(self.library_token * library + self.healing_token * healing, 1e-9)
        recomputed = (budget + self.recomputed_token * self.stored_tokens) / (
            trainings + self.recomputed_token * library
        )
        factor = min(budget / trainings, recomputed)  # the second is smaller if streams are recomputed
        scaled = [int(factor * tokens) // _MULTIPLE * _MULTIPLE for tokens in (library, healing)]
        if min(scaled) <= 0:
            least = (self.scores + self.measurements) / 3600 / (1 - RESERVE)
            raise InvalidInput(
                f"{hours:g} hours are too few: scores and measurements take {least:.2g} hours of them", where="--hours"
            )
        return scaled[0], scaled[1]

    def parts(self, library: int, healing: int) -> dict[str, float]:
        """Returns part -> its seconds, for so many tokens of library and healing."""
        recomputed = self.recomputed_token * max(0, library - self.stored_tokens)
        return {
            "measurements": self.measurements,
            "library": self.library_token * library + recomputed,
            "scores": self.scores,
            "healing": self.healing_token * healing,
        }

    def describe(self, hours: float, library: int, healing: int) -> str:
        """Returns how the time is spent, as a sentence."""
        parts = self.parts(library, healing)
        shares = ", ".join(f"{name} {show_duration(seconds)}" for name, seconds in parts.items())
        return (
            f"in {hours:g} hours, each alternative is trained on {library:,} tokens and the child on {healing:,}:"
            f" {shares}, the rest for what is not timed"
        )


class LibraryTimes(NamedTuple):
    """Seconds of a library, as of `PartTimes`."""

    token: float
    recomputed_token: float
    scores: float


def time_library(
    opened: Callable[[Path, LibrarySettings], Library],
    settings: LibrarySettings,
    alternatives: Alternatives,
    log: Log,
    scratch: Path,
) -> LibraryTimes:
    """Times training and scoring of all alternatives, at one depth of each kind of layer.

    Args:
        opened: returns an empty library in a folder, with other settings.
        settings: of the library.
        alternatives: that it holds.
        log: takes one line for each kind of layer.
        scratch: folder for the libraries meanwhile.
    """
    depths = sorted({slot.depth for slot in alternatives})
    step_tokens = settings.sequences * settings.length
    token = scores = 0.0
    with tempfile.TemporaryDirectory(dir=scratch) as folder:

        def library(depth: int, steps: int) -> Library:
            sized = settings.model_copy(update={"tokens": steps * step_tokens})
            return opened(Path(folder, f"{depth}-{steps}"), sized)

        layers, layer_token = library(0, 1).teacher.layout.layers, _layer_seconds(library(0, 1))
        first = {layers[depth]: depth for depth in reversed(depths)}
        for number, (layer, depth) in enumerate(first.items()):
            log(Progress("timed kinds of layers", number, len(first), "training of their alternatives"))
            count = sum(layers[other] == layer for other in depths)
            blocks = {slot: blocks for slot, blocks in alternatives.items() if slot.depth == depth}
            step = _step_seconds(lambda steps: library(depth, steps).train(blocks)) / step_tokens  # noqa: B023 - called here
            token += count * max(0.0, step - _recomputed(depth) * layer_token)
            trained = library(depth, 1).train(blocks)
            log(Progress("timed kinds of layers", number, len(first), "scores of their alternatives"))
            scores += count * _seconds_of(lambda: library(depth, 1).scores(trained))  # noqa: B023 - called here
        log(Progress("timed kinds of layers", len(first), len(first)))
    return LibraryTimes(token, layer_token * sum(map(_recomputed, depths)), scores)


def _recomputed(depth: int) -> int:
    """Returns the layers that a depth runs only if the streams of the depth below are not stored."""
    return max(0, depth - 1)


def _step_seconds(train: Callable[[int], object]) -> float:
    """Returns the seconds of a step of `train(steps)`, from a training of a few steps and one of some more."""
    train(1)  # what only the first training takes, such as loading kernels, is not timed
    few, more = (_seconds_of(lambda: train(steps)) for steps in (2, 2 + _STEPS))  # noqa: B023 - called here
    return max(0.0, more - few) / _STEPS


def _seconds_of(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes, with what it has queued on accelerators, and without what was there."""
    _synchronise()
    began = time.monotonic()
    work()
    _synchronise()
    return time.monotonic() - began


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _layer_seconds(library: Library) -> float:
    """Returns the seconds of a layer's forward pass for each token, as a step of a training computes it."""
    teacher, settings, device = library.teacher, library.settings, library.worker.device
    rows = max(1, settings.sequences * settings.length // settings.window)
    ids, depth = library.selection.ids[:rows].to(device), teacher.layout.depth
    with torch.no_grad(), precision_of(device, settings.precision):
        stream = teacher.before(ids, 0)
        teacher.between(stream, 0, depth)
        return _seconds_of(lambda: teacher.between(stream, 0, depth)) / depth / ids.numel()
