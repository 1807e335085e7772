"""Healing: an assembled child is trained end to end against the trained model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed
from nas.core.strict import StrictKeys
from nas.model.nn.distillation import Direction
from nas.model.nn.fit import Precision, TrainingCheckpoint, TrainingState, fit, precision_of
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.train.adapt.library import LIBRARY_VERSION, SCHEDULE, Library
from nas.train.pretrain.data import Tokens
from nas.train.pretrain.loss import Distilled
from nas.train.pretrain.next_token import Packed, packed_phase

_CHECKPOINT_S = 60.0
_TOKENS_AT_ONCE = (1024, 32768)
"""Most tokens of a pass on a CPU, where activations take little memory beside two models, gradients and moments; and on
an accelerator."""


class Healing(StrictKeys):
    """Training of the assembled child, all weights, against the trained model (LFM2 report, section 3.3)."""

    tokens: int = Field(1 << 20, ge=1)
    length: int = Field(256, ge=8)
    batch_tokens: int = Field(4096, ge=8)
    lr: float = Field(3e-4, gt=0)
    precision: Precision = Field(
        "float32", description="of matrix products in training; its loss is computed in float32 from their logits"
    )
    weight: float = Field(0.9, gt=0, le=1, description="of the distillation term; the rest is cross-entropy")
    temperature: float = Field(1.0, ge=1)
    direction: Direction = Field("forward", description="of the divergence from the trained model (appendix A)")
    k: int = Field(32, ge=1)
    seed: int = Field(0, ge=0)


_NOTHING = 1e-6
"""Divergence, in nats per token, of a child with the model's own blocks, where only their bits are chosen."""


def batches_of(sources: Sequence[Tokens], healing: Healing) -> Packed:
    """Returns the text in batches for a healing.

    Raises:
        InvalidInput: there is less text than one sequence.
    """
    sequences = max(1, healing.batch_tokens // healing.length)
    return Packed("healing", sources, healing.length, sequences, healing.seed + 1)


def heal(start: Callable[[], Model], library: Library, text: Packed, healing: Healing, folder: Path) -> Model:
    """Returns a child, trained against the teacher's likeliest tokens; resumes from the checkpoint in `folder`.

    A child that is nearly the teacher is moved away from it by a rate that teaches weak children. If its divergence on
    the text of scores has grown, or the training diverges, it is trained again from its start at a tenth of the rate;
    if that does not help, it gets its start weights back.

    Args:
        start: assembles the child on the worker's device.
        library: of the teacher; its worker trains.
        text: of `batches_of`, from the library's sources.
        healing: settings.
        folder: of the checkpoint.
    """
    model = start()
    before = library.divergence(model)
    if before < _NOTHING:
        library.worker.log("nothing is healed: the child computes what the model does")
        return model
    for settings in (healing, healing.model_copy(update={"lr": healing.lr / 10})):
        try:
            train_child(model, library, text, settings, folder)
            after = library.divergence(model)
            if after < before:
                return model
            reason = f"divergence {before:.4g} nats per token before, {after:.4g} after"
        except CandidateFailed as error:
            reason = str(error)
        library.worker.log(f"healing with lr {settings.lr:g} is undone: {reason}")
        model = start()
    return model


def train_child(model: Model, library: Library, text: Packed, healing: Healing, folder: Path) -> float:
    """Trains a child, and returns the seconds of its steps; raises CandidateFailed if it diverges."""
    teacher, worker = library.teacher, library.worker
    steps = max(1, round(healing.tokens / (text.sequences * text.length)))
    distilled = Distilled(teacher.model, healing.weight, healing.temperature, healing.k, healing.direction)

    def rate(step: int) -> float:
        return healing.lr * SCHEDULE.factor(step, steps)

    phase = packed_phase(text, steps, rate, distilled, worker, _TOKENS_AT_ONCE)
    key = content_hash(
        [
            LIBRARY_VERSION,
            model.layout.to_json(),
            _digest(model),
            teacher.sha256,
            library.text_keys,
            healing.model_dump(),
        ]
    )
    checkpoint = TrainingCheckpoint(folder / f"{key}.safetensors", {"key": key}, interval_s=_CHECKPOINT_S)
    feeding = [layer.ffn for layer in model.layout.layers if layer.ffn is not None]
    # Experts scored by a softmax have no bias: its steps would soon be larger than most of their scores.
    softmax = any(block.kind == "moe" and block.get("softmax") for block in feeding)
    state = TrainingState(model, Optimiser(weight_decay=0.0, clip=1.0, balance_rate=0.0 if softmax else 1e-3), steps)
    fit(
        state,
        [phase],
        [checkpoint],
        worker,
        name=f"the child of {model.layout.params.total:,} weights",
        precision=lambda: precision_of(worker.device, healing.precision),
    )
    model.eval()
    return state.seconds


def _digest(model: Model) -> str:
    """Returns the SHA-256 of a model's weights, in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.cpu().contiguous().numpy())
    return digest.hexdigest()
