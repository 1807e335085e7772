"""Draws random layouts of a search space, and repairs edited drafts so that they are inside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.model_choices import Frame, Frames, Half, check_reachable, choice_of, depths
from nas.core.space import DENSE, SearchSpace
from nas.search.proposers.editable_layout import Draft, Gene, closest, distance, layer_kinds, resample
from nas.search.proposers.layout_list import Listed
from nas.search.proposers.membership import reasons_outside

Rng = np.random.Generator
T = TypeVar("T")
Supported = Callable[[Layout], bool]

_DRAWS = 1000
_FRAME_DRAWS = 20_000
_REPAIR_STEPS = 24
"""Edits tried per gene before a draft is given up."""


class Sampler:
    """Draws layouts that keep every rule of a space.

    Example:
        >>> from nas.search.spaces import load_space
        >>> sampler = Sampler(load_space("lfm2-demo"))
        >>> layout = sampler.draw(np.random.default_rng(0))
        >>> sampler.admits(layout)
        True

    Args:
        space: the search space.
        supported: returns whether some runtime of the space carries a layout; others are not drawn.

    Raises:
        InvalidInput: the space holds no layout; the message says what range of weights its choices reach.
    """

    def __init__(self, space: SearchSpace, supported: Supported = lambda layout: True) -> None:
        self.space = space
        self.listed: Listed | None = None
        """The layouts of a space that lists them; None where the space is made of choices."""
        if space.layouts:
            listed = [layout for layout in space.listed() if supported(layout)]
            if not listed:
                raise InvalidInput(
                    f"no runtime of space {space.name!r} carries any of its {len(space.layouts)} layouts"
                )
            self.listed = Listed(space, listed)
        else:
            check_reachable(space)
        self.frames = Frames(space)
        self._supported = supported
        self._admitted: dict[str, bool] = {}
        self._depths: dict[Frame, tuple[int, ...]] = {}

    @classmethod
    def of(cls, layouts: Iterable[Layout], space: SearchSpace, supported: Supported = lambda layout: True) -> Sampler:
        """Returns a sampler of a finite list of layouts; all else, such as objectives and budgets, is of `space`."""
        return cls(space.listing(layouts), supported)

    def contains(self, layout: Layout) -> list[str]:
        """Returns why `layout` is no candidate of the space, one reason per rule; empty where it is one."""
        if self.listed is not None:
            return (
                [] if layout.id in self.listed else ["it is not among the layouts of the space that a runtime carries"]
            )
        reasons = reasons_outside(self.space, layout)
        return reasons or ([] if self._supported(layout) else ["no runtime of the space carries it"])

    def admits(self, layout: Layout) -> bool:
        """Returns whether `layout` is a candidate of the space; cached by its id."""
        if layout.id not in self._admitted:
            self._admitted[layout.id] = not self.contains(layout)
        return self._admitted[layout.id]

    def draw(self, rng: Rng, until: float = math.inf) -> Layout:
        """Returns a random layout.

        Frames are uniform over those that can meet the budget, then depths, then shares of the mixer kinds; half of
        the draws of a kind give all its layers the same arguments, so that uniform stacks are as frequent as others.

        Args:
            rng: its state determines the layout.
            until: time on the monotonic clock, in seconds, after which no further draw begins; there is at least one.

        Raises:
            InvalidInput: a thousand draws, or all until the deadline, gave no layout, or none that a runtime carries.
        """
        if self.listed is not None:
            return pick(self.listed.layouts, rng)
        refused = draws = 0
        while draws < _DRAWS and (draws == 0 or time.monotonic() < until):
            draws += 1
            draft = self._repaired(self._random_draft(rng), rng)
            if draft is None:
                continue
            layout = draft.layout(self.space.model)
            if not reasons_outside(self.space, layout):
                if self._supported(layout):
                    return layout
                refused += 1
        if refused:
            raise InvalidInput(f"{refused} layouts of space {self.space.name!r} were drawn, and no runtime carries one")
        why = (
            "budget and limits are too tight"
            if draws == _DRAWS
            else "the time for it ended; `nas space validate` draws more"
        )
        raise InvalidInput(f"{draws} draw(s) gave no layout of space {self.space.name!r}: {why}")

    def settle(self, draft: Draft, rng: Rng) -> Layout | None:
        """Returns a layout inside the space, made from `draft` by small edits; None where that fails.

        It is inside by construction; for speed this is not checked, since few settled layouts are proposed.
        """
        depths = self.depths(draft.frame)
        mixers, ffn = layer_kinds(self.frames, draft.frame)
        if not depths or not mixers or not ffn:
            return None
        depth = min(depths, key=lambda depth: (abs(depth - draft.depth), depth))
        length = min(draft.frame.period, depth) or depth
        options = [{kind: self.frames.halves(draft.frame, kind) for kind in kinds} for kinds in (mixers, ffn)]
        genes = tuple(_translated(gene, options, rng) for gene in resample(draft.genes, length))
        settled = Draft(draft.frame, depth, genes, self.lead(draft.frame, draft.lead, rng))
        repaired = self._repaired(settled, rng)
        layout = repaired.layout(self.space.model) if repaired else None
        return layout if layout is not None and self._supported(layout) else None

    def depths(self, frame: Frame) -> tuple[int, ...]:
        """Returns the depths at which `frame` can meet the parameter budget."""
        if frame not in self._depths:
            self._depths[frame] = depths(self.frames, frame)
        return self._depths[frame]

    def random_frame(self, rng: Rng) -> Frame:
        """Returns a random frame, uniform over those that can meet the parameter budget."""
        for _ in range(_FRAME_DRAWS):
            frame = self.frames.at([int(rng.integers(len(axis))) for axis in self.frames.axes])
            if self.depths(frame):
                return frame
        raise InvalidInput(
            f"none of {_FRAME_DRAWS:,} draws of widths and kernels meets the parameter budget at any depth"
        )

    def gene(self, frame: Frame, rng: Rng) -> Gene:
        """Returns a random gene of `frame`."""
        mixers, ffn = layer_kinds(self.frames, frame)
        return self.half(frame, pick(mixers, rng), rng), self.half(frame, pick(ffn, rng), rng)

    def half(self, frame: Frame, choice: str, rng: Rng) -> Half:
        """Returns random blocks of a choice."""
        return pick(self.frames.halves(frame, choice), rng)

    def lead(self, frame: Frame, before: Sequence[Half], rng: Rng) -> tuple[Half, ...]:
        """Returns dense feed-forwards of the leading layers: like those `before`, or random ones."""
        if not frame.leading_dense:
            return ()
        options = self.frames.halves(frame, DENSE)
        block = before[0] if before else pick(options, rng)
        return (closest(block, options),) * frame.leading_dense

    def _random_draft(self, rng: Rng) -> Draft:
        frame = self.random_frame(rng)
        depth = pick(self.depths(frame), rng)
        mixers, ffn = layer_kinds(self.frames, frame)
        choices = {kind: self._palette(frame, kind, rng) for kind in (*mixers, *ffn)}
        length = min(frame.period, depth) or depth
        genes = zip(_stack(mixers, choices, length, rng), _stack(ffn, choices, length, rng), strict=True)
        return Draft(frame, depth, tuple(genes), self.lead(frame, (), rng))

    def _palette(self, frame: Frame, choice: str, rng: Rng) -> Sequence[Half]:
        """Returns the blocks of a choice that one draft uses: half of the time always the same."""
        options = self.frames.halves(frame, choice)
        return [pick(options, rng)] if rng.random() < 0.5 else options

    def _repaired(self, draft: Draft, rng: Rng) -> Draft | None:
        """Returns `draft` edited, layer by layer, until it meets budget and limits; None where that fails."""
        far = distance(draft, self.space)
        if far == 0:
            return draft
        mixers, ffns = (
            [self.frames.halves(draft.frame, choice) for choice in choices]
            for choices in layer_kinds(self.frames, draft.frame)
        )
        for _ in range(_REPAIR_STEPS * len(draft.genes)):
            if far == 0:
                return draft
            index = int(rng.integers(len(draft.genes)))
            mixer, ffn = pick(pick(mixers, rng), rng), pick(pick(ffns, rng), rng)
            gene = (mixer, draft.genes[index][1]) if rng.random() < 0.5 else (draft.genes[index][0], ffn)
            edited = draft.with_gene(index, gene)
            if (now := distance(edited, self.space)) <= far:
                draft, far = edited, now
        return draft if far == 0 else None


def _translated(gene: Gene, options: Sequence[Mapping[str, Sequence[Half]]], rng: Rng) -> Gene:
    """Returns `gene` with the nearest `options`: by choice, those of the mixers, then those of the feed-forward."""
    pair = []
    for half, allowed in zip(gene, options, strict=True):
        current = choice_of(half)
        choice = current if current in allowed else pick(list(allowed), rng)
        pair.append(closest(half, allowed[choice]) if choice == current else pick(allowed[choice], rng))
    return pair[0], pair[1]


def _stack(kinds: Sequence[str], choices: Mapping[str, Sequence[Half]], length: int, rng: Rng) -> list[Half]:
    shares = rng.dirichlet(np.ones(len(kinds)))
    return [pick(choices[kinds[int(kind)]], rng) for kind in rng.choice(len(kinds), size=length, p=shares)]


def pick(items: Sequence[T], rng: Rng) -> T:
    """Returns one of `items`, all equally likely."""
    return items[int(rng.integers(len(items)))]
