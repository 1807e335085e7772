"""Replacement of single blocks of a trained model: places, layouts and state dicts of mixes, and scores of a library.

A mix has other blocks than the trained model at some places. The file of scores, which `nas adapt --write-space` writes
and a search space names, holds what each replacement costs in quality; the quality of a mix is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nas.core.block import Block
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layer, Layout
from nas.core.quantisation import Place, Quantisation

T = TypeVar("T")
TEXT_GROUP = "lm/library"
"""Group of positions that a divergence is the mean over: all of held-out text."""
RECALLABLE_GROUP = "lm/library.recall"
"""Those of `TEXT_GROUP` that complete a pair of tokens which occurred before. It counts in no quality."""
RECALL_GROUP = "lm/recall"
"""Answers in generated text."""
Part = Literal["mixer", "ffn", "layer"]
_PLACES: tuple[tuple[Part, str], ...] = (("mixer", "mixers.0"), ("ffn", "ffn"))
"""Part of a layer, and the name of its block in state dicts."""
_ROLES: tuple[tuple[Part, str], ...] = (("mixer", "mixers"), ("ffn", "ffn"))
"""Part of a layer, and its role in names of quantisations."""


@dataclass(frozen=True, order=True, slots=True)
class Slot:
    """Place of a block: mixer or feed-forward of the layer at `depth`; "layer" stands for both."""

    depth: int
    part: Part

    def block(self, layout: Layout) -> Block | None:
        """Returns the block of `layout` at this place, which is a mixer's or a feed-forward's."""
        layer = layout.layers[self.depth]
        return layer.mixer if self.part == "mixer" else layer.ffn


@dataclass(frozen=True, slots=True)
class Stored:
    """A block, and how a file stores its tensors.

    Args:
        block: the block.
        quantisation: a runtime's name, without parts.
    """

    block: Block
    quantisation: str


Alternative = Block | Stored | None
"""What a place may have; None: nothing."""


def block_of(alternative: Alternative) -> Block | None:
    """Returns the block, however it is stored."""
    return alternative.block if isinstance(alternative, Stored) else alternative


def slots_of(layout: Layout) -> tuple[Slot, ...]:
    """Returns the places of all blocks, by depth.

    Raises:
        Unsupported: layers share weights or caches, or have several mixers.
    """
    for i, layer in enumerate(layout.layers):
        if layer.share is not None or len(layer.mixers) > 1 or any("kv" in dict(block.args) for block in layer.mixers):
            raise Unsupported(
                f"layer {i}: models whose layers share weights or caches, or have parallel mixers, cannot be adapted"
            )
    parts: tuple[Part, Part] = ("mixer", "ffn")
    places = (Slot(depth, part) for depth in range(layout.depth) for part in parts)
    return tuple(place for place in places if place.block(layout) is not None)


def lender_of(alternative: Alternative) -> Slot | None:
    """Returns the place whose keys and values a block reads (`kv=n`) and which keeps its trained block, if any."""
    block = block_of(alternative)
    depth = dict(block.args).get("kv") if block else None
    return None if depth is None else Slot(int(depth), "mixer")


def with_blocks(layout: Layout, choice: Mapping[Slot, Alternative]) -> tuple[Layout, list[int]]:
    """Returns the layout with other blocks at some places, and the depth that each of its layers had.

    Where `layout` names a quantisation, so does the other one: that of each block, its place's where the choice says
    nothing.

    Raises:
        InvalidInput: no layer is left, or a block reads keys and values of one that is replaced.
    """
    layers: list[Layer] = []
    depths: list[int] = []
    for depth, layer in enumerate(layout.layers):
        mixer = block_of(choice.get(Slot(depth, "mixer"), layer.mixer))
        ffn = block_of(choice.get(Slot(depth, "ffn"), layer.ffn))
        if mixer is not None or ffn is not None:
            if mixer is not None and (lender := lender_of(mixer)) is not None:
                _check_lender(depth, lender, layout, choice)
                mixer = mixer.replace(kv=depths.index(lender.depth))
            layers.append(Layer((mixer,) if mixer else (), ffn))
            depths.append(depth)
    child = layout.architecture.with_layers(layers)
    if layout.quantisation:
        child = replace(child, quantisation=_stored_as(layout, child, depths, choice))
    return child, depths


def _stored_as(layout: Layout, child: Layout, depths: Sequence[int], choice: Mapping[Slot, Alternative]) -> str:
    """Returns the quantisation of a layout whose layers had these depths in `layout`."""
    before = Quantisation.parse(layout.quantisation)
    parts: dict[Place, str] = {("embedding", None): before.at("embedding")}
    for new, depth in enumerate(depths):
        for part, role in _ROLES:
            if Slot(new, part).block(child) is not None:
                chosen = choice.get(Slot(depth, part))
                kind = chosen.quantisation if isinstance(chosen, Stored) else before.at(role, depth, layout.depth)
                parts[role, new] = kind
    return Quantisation.of(before.others, parts)


def _check_lender(depth: int, lender: Slot, layout: Layout, choice: Mapping[Slot, Alternative]) -> None:
    trained = lender.block(layout)
    if block_of(choice.get(lender, trained)) != trained:
        raise InvalidInput(
            f"layer {depth} reads keys and values of layer {lender.depth}, whose mixer is replaced: its block was"
            " trained on those of the trained model"
        )


def assembled(
    layout: Layout,
    weights: Mapping[str, T],
    choice: Mapping[Slot, Block | None],
    blocks: Mapping[Slot, Mapping[str, T]],
) -> tuple[Layout, dict[str, T]]:
    """Returns the layout and the state dict of the model with other blocks at some places.

    Args:
        layout: of the trained model.
        weights: its state dict.
        choice: blocks at the places that change; None: no block.
        blocks: state dicts of those that are blocks.
    """
    child, depths = with_blocks(layout, choice)
    state = {name: tensor for name, tensor in weights.items() if not name.startswith("layers.")}
    for new, depth in enumerate(depths):
        for part, place in _PLACES:
            slot, old, to = Slot(depth, part), f"layers.{depth}.", f"layers.{new}."
            if choice.get(slot, slot.block(layout)) is None:
                continue
            tensors = blocks.get(slot) or _under(weights, f"{old}{place}.")
            state |= {f"{to}{place}.{name}": tensor for name, tensor in tensors.items()}
            for norm in (f"{part}_norm.", f"{part}_out_norm."):
                state |= {f"{to}{norm}{name}": tensor for name, tensor in _under(weights, f"{old}{norm}").items()}
    return child, state


def _under(weights: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def block_name(alternative: Alternative) -> str:
    """Returns the block's one-line form, followed by how it is stored if that is part of it; '-' for none."""
    if isinstance(alternative, Stored):
        return f"{alternative.block.format()} {alternative.quantisation}"
    return alternative.format() if alternative else "-"


def parsed(text: str, part: Part) -> Alternative:
    """Reads what `block_name` wrote."""
    if text == "-":
        return None
    name, _, quantisation = text.partition(" ")
    block = Block.parse(name, "mixer" if part == "mixer" else "ffn")
    return Stored(block, quantisation) if quantisation else block


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class ScoredBlock(BaseModel):
    """An alternative of a library, with its score."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: int = Field(ge=0)
    part: Literal["mixer", "ffn"]
    block: str = Field(description="one-line form; '-': no block")
    kl: dict[str, _Number] = Field(
        description="group of positions -> divergence of the model with this one replacement, nats a token"
    )
    key: _Digest | None = Field(description="of the trained block in the library; null where there is none")
    sha256: _Digest | None = Field(description="of that file")


class ScoredPair(BaseModel):
    """What two replacements cost together beyond the sum of their scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: tuple[tuple[int, Part, str], tuple[int, Part, str]] = Field(description="depth, part and block of both")
    kl: dict[str, _Number] = Field(description="group of positions -> divergence, nats a token")


class LibraryScores(BaseModel):
    """The scores of a library, and what is needed to assemble and evaluate mixes of its blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    v: Literal[2] = 2
    layout: str = Field(description="of the trained model")
    teacher: str = Field(description="absolute path of its checkpoint")
    teacher_sha256: _Digest
    library: str = Field(description="absolute path of the library's folder")
    text: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="file of held-out tokens, beside this one")
    text_sha256: _Digest
    uniform: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        description="group of positions -> divergence of a model that knows nothing, nats a token"
    )
    blocks: tuple[ScoredBlock, ...]
    pairs: tuple[ScoredPair, ...] = ()

    @model_validator(mode="after")
    def _groups_are_those_of_uniform(self) -> Self:
        if not self._counted:
            raise ValueError("uniform has no group that counts")
        for kl in (*(block.kl for block in self.blocks), *(pair.kl for pair in self.pairs)):
            if missing := self.uniform.keys() - kl.keys():
                raise ValueError(f"a score is of no {', '.join(sorted(missing))}")
        return self

    @staticmethod
    def read(path: Path) -> LibraryScores:
        """Reads a file that `nas adapt --write-space` wrote.

        Raises:
            InvalidInput: there is no such file, or it is another one.
        """
        try:
            scores = LibraryScores.model_validate_json(path.read_bytes())
            Layout.parse(scores.layout)
            return scores
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}; `nas adapt --write-space` writes it") from error
        except (ValidationError, InvalidInput) as error:
            first = str(error).splitlines()[0]
            raise InvalidInput(f"{path} is no file of scores of `nas adapt --write-space`: {first}") from error

    def choice(self, layout: Layout) -> dict[Slot, ScoredBlock]:
        """Returns the replacements that make `layout` of the trained model.

        Raises:
            InvalidInput: it is no mix of the library's blocks, or one of them reads keys and values of a block that is
            replaced; the message names the first place.
        """
        teacher = Layout.parse(self.layout)
        for name in ("d_model", "vocab", "tied", "norms", "softcap", "depth"):
            if (value := getattr(layout, name)) != (expected := getattr(teacher, name)):
                raise InvalidInput(f"{name} is {value}, of the library's model {expected}: {layout.format()}")
        chosen: dict[Slot, ScoredBlock] = {}
        for depth, layer in enumerate(layout.layers):
            if len(layer.mixers) > 1 or layer.share is not None:
                raise InvalidInput(f"layer {depth} shares weights or has parallel mixers, no library holds such layers")
            parts: tuple[tuple[Part, Block | None], ...] = (("mixer", layer.mixer), ("ffn", layer.ffn))
            for part, block in parts:
                slot, name = Slot(depth, part), block_name(block)
                if name == block_name(slot.block(teacher)):
                    continue
                if (slot, name) not in self._alternatives:
                    alternatives = (
                        ", ".join(alternative for place, alternative in self._alternatives if place == slot) or "none"
                    )
                    raise InvalidInput(
                        f"layer {depth}: the library has no {name} as {part}; alternatives there: {alternatives}"
                    )
                chosen[slot] = self._alternatives[slot, name]
        blocks = {slot: parsed(scored.block, slot.part) for slot, scored in chosen.items()}
        for slot in chosen:
            if (lender := lender_of(slot.block(layout))) is not None:
                _check_lender(slot.depth, lender, teacher, blocks)
        return chosen

    def scores(self, layout: Layout) -> dict[str, float]:
        """Returns group -> nats a token above a model that knows nothing, by the sum of scores, with those of pairs."""
        chosen = [((slot.depth, slot.part, scored.block), scored.kl) for slot, scored in self.choice(layout).items()]
        names = {name for name, _ in chosen}
        terms = [scored.kl for scored in self.pairs if names.issuperset(scored.blocks)]
        added = [kl for _, kl in chosen] + terms
        return {group: most - math.fsum(kl[group] for kl in added) for group, most in self.uniform.items()}

    def quality(self, scores: Mapping[str, float]) -> float:
        """Returns the mean over groups of score / that of the trained model."""
        return math.fsum(scores[group] / most for group, most in self._counted.items()) / len(self._counted)

    @cached_property
    def _counted(self) -> Mapping[str, float]:
        return {group: most for group, most in self.uniform.items() if group != RECALLABLE_GROUP}

    @cached_property
    def _alternatives(self) -> Mapping[tuple[Slot, str], ScoredBlock]:
        return {(Slot(scored.depth, scored.part), scored.block): scored for scored in self.blocks}
