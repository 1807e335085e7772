"""`nas adapt --hours`: how many tokens library and healing can be trained on in a given time.

The parts of an adaptation are timed on the model itself, as `benchmarks/adapt_large.py` does: a step of training at one
depth of each kind of layer, the layers in front of it, a step of healing, the scores of one alternative, and one
measurement on the device. The rest is arithmetic. Trainings get what scores and measurements leave; their tokens are
scaled by the same factor. Of tokens whose residual streams are not kept from one depth to the next
(`nas.train.adapt.library.STREAM_BYTES`), each depth takes the time of all layers in front.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layer
from nas.core.replacement import Slot
from nas.train.adapt.library import Library, LibrarySettings

Alternatives = Mapping[Slot, Sequence[Block | None]]
RESERVE = 0.1
"""Share of the time that is left for what is not timed: assembling, checkpoints, the report and the files."""
_STEPS, _MULTIPLE = 3, 256


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of an adaptation.

    Args:
        library_token: of training all alternatives, for each token that each is trained on.
        again_token: more than that, for each token whose residual stream is not kept.
        kept: tokens whose residual streams are kept.
        healing_token: of healing, for each token.
        scores: of scoring all alternatives.
        measurements: of measuring on the device.
    """

    library_token: float
    again_token: float
    kept: int
    healing_token: float
    scores: float
    measurements: float

    def tokens(self, hours: float, library: int, healing: int) -> tuple[int, int]:
        """Returns tokens of library and healing that fit, in the given proportion, a multiple of 256 each.

        Raises:
            InvalidInput: scores and measurements alone take longer.
        """
        left = 3600 * hours * (1 - RESERVE) - self.scores - self.measurements
        whole = max(self.library_token * library + self.healing_token * healing, 1e-9)
        beyond = (left + self.again_token * self.kept) / (whole + self.again_token * library)
        factor = min(left / whole, beyond)  # the second is smaller where more tokens are trained on than are kept
        scaled = [int(factor * count) // _MULTIPLE * _MULTIPLE for count in (library, healing)]
        if min(scaled) <= 0:
            least = (self.scores + self.measurements) / 3600 / (1 - RESERVE)
            raise InvalidInput(
                f"{hours:g} hours are too few: scores and measurements take {least:.2g} hours of them",
                where="--hours",
            )
        return scaled[0], scaled[1]

    def describe(self, hours: float, library: int, healing: int) -> str:
        """Returns how the time is spent, as a sentence."""
        parts = {
            "library": self.library_token * library + self.again_token * max(0, library - self.kept),
            "scores": self.scores,
            "measurements": self.measurements,
            "healing": self.healing_token * healing,
        }
        shares = ", ".join(f"{name} {seconds / 3600:.2g} h" for name, seconds in parts.items())
        return (
            f"in {hours:g} hours, each alternative is trained on {library:,} tokens and the child on {healing:,}:"
            f" {shares}, the rest for what is not timed"
        )


class LibraryTimes(NamedTuple):
    """Seconds of a library: `Parts.library_token`, `Parts.again_token` and `Parts.scores`."""

    token: float
    again_token: float
    scores: float


def time_library(
    opened: Callable[[Path, LibrarySettings], Library], settings: LibrarySettings, alternatives: Alternatives
) -> LibraryTimes:
    """Times training and scoring of all alternatives.

    A depth of each kind of layer is trained for one step and for some; the difference is that of the steps.

    Args:
        opened: returns an empty library in a folder, with other settings.
        settings: of the library that is planned.
        alternatives: that it holds.
    """
    step_tokens = settings.sequences * settings.length
    found: dict[Layer, float] = {}
    depths: dict[Layer, int] = {}
    scores = layer_s = 0.0
    every = sorted({slot.depth for slot in alternatives})
    with tempfile.TemporaryDirectory() as folder:
        for depth in every:
            library = opened(Path(folder) / "layers", settings)
            layer = library.teacher.layout.layers[depth]
            if layer in depths:
                continue
            depths[layer] = depth
            layer_s = layer_s or _layer_seconds(library)
            own = {slot: blocks for slot, blocks in alternatives.items() if slot.depth == depth}
            taken = []
            for steps in (1, 1 + _STEPS):
                sized = settings.model_copy(update={"tokens": steps * step_tokens})
                library = opened(Path(folder) / f"{depth}-{steps}", sized)
                taken.append(_seconds(library, lambda: library.train(own)))  # noqa: B023 - called here
            found[layer] = max(0.0, taken[1] - taken[0]) / _STEPS / step_tokens
            layers = library.teacher.layout.layers
            alike = sum(layers[each] == layer for each in every)
            scores += alike * _seconds(library, lambda: library.scores(own))  # noqa: B023 - called here
    trained = sum(max(0.0, found[layers[depth]] - depths[layers[depth]] * layer_s) for depth in every)
    in_front = layer_s * sum(min(depth, 1) for depth in every)
    return LibraryTimes(trained + in_front, layer_s * sum(every) - in_front, scores)


def _layer_seconds(library: Library) -> float:
    """Returns seconds of a layer's forward pass for each token."""
    teacher, ids = library.teacher, library.selection.ids[:1].to(library.worker.device)
    depth = teacher.layout.depth
    with torch.no_grad():
        stream = teacher.before(ids, 0)
        teacher.between(stream, 0, depth)
        return _seconds(library, lambda: teacher.between(stream, 0, depth)) / depth / ids.numel()


def _seconds(library: Library, work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    if library.worker.device.type == "cuda":
        torch.cuda.synchronize(library.worker.device)
    return time.monotonic() - began
