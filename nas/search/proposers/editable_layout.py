"""Drafts of layouts: a frame, and a few genes that unfold into a stack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nas.core.block import Block
from nas.core.layout import Layer, Layout
from nas.core.model_choices import Frame, Frames, Half, choice_of, frame_cost, half_cost
from nas.core.space import ModelSpace, SearchSpace
from nas.core.tower import Tower
from nas.search.proposers.membership import EXPERTS

Gene = tuple[Half, Half]
"""A layer's mixers and feed-forward."""


@dataclass(frozen=True)
class Draft:
    """A layout before it is checked.

    Args:
        frame: model-wide choices.
        depth: layers.
        genes: one per layer, or one per layer of the period, which repeat.
        lead: feed-forwards of the first layers, where the genes put experts there.
    """

    frame: Frame
    depth: int
    genes: tuple[Gene, ...]
    lead: tuple[Half, ...] = ()

    def stack(self) -> list[Gene]:
        """Returns mixers and feed-forward of every layer."""
        stack = [self.genes[index % len(self.genes)] for index in range(self.depth)]
        for index, dense in enumerate(self.lead[: self.depth]):
            if choice_of(stack[index][1]) == EXPERTS:
                stack[index] = (stack[index][0], dense)
        return stack

    def layout(self, model: ModelSpace) -> Layout:
        """Returns the layout; raises `InvalidInput` where its blocks are not valid at this width."""
        layers = [Layer(mixers, ffn) for mixers, (ffn,) in self.stack()]
        frame = self.frame
        return Layout.of(
            frame.d_model,
            frame.vocab,
            layers,
            tied=model.tied,
            norms=model.norms,
            quantisation=frame.quantisation,
            vectors=frame.vectors,
            tower=Tower.parse(frame.tower) if frame.tower else None,
        )

    def with_gene(self, index: int, gene: Gene) -> Draft:
        """Returns a copy with one gene changed."""
        return replace(self, genes=(*self.genes[:index], gene, *self.genes[index + 1 :]))


def distance(draft: Draft, space: SearchSpace) -> float:
    """Returns the distance of a draft from the parameter budget and the limits: 0 where it meets them.

    A layer too many or too few counts 1, a weight count its relative distance from the range.
    """
    stack = draft.stack()
    # Few halves are different, and equal ones are mostly one object.
    halves = {id(half): half for gene in stack for half in gene}
    uses = Counter(id(half) for gene in stack for half in gene)
    far = 0.0
    counts = Counter[str]()
    if space.limits:
        for key, half in halves.items():
            counts[choice_of(half)] += uses[key]
    for kind, limit in space.limits.items():
        far += max(0, limit.min - counts[kind], counts[kind] - (counts[kind] if limit.max is None else limit.max))
    total, active, inner = frame_cost(draft.frame, space.model, draft.depth)
    for key, half in halves.items():
        cost, count = half_cost(half, draft.frame.d_model), uses[key]
        total, active, inner = total + count * cost[0], active + count * cost[1], inner + count * cost[2]
    budget = space.model.params
    for number, weights in ((total, budget.total), (active, budget.active), (inner, budget.non_embedding)):
        over = number if weights.max is None else weights.max
        far += max(0, weights.min - number, number - over) / number
    return far


def resample(genes: Sequence[Gene], length: int) -> tuple[Gene, ...]:
    """Returns the genes stretched or thinned to `length`, order and proportions kept."""
    if len(genes) == length:
        return tuple(genes)
    return tuple(genes[(2 * index + 1) * len(genes) // (2 * length)] for index in range(length))


def closest(half: Half, options: Sequence[Half]) -> Half:
    """Returns the option, of the same kinds, that differs least from `half` in its arguments, on logarithms."""
    return half if half in options else min(options, key=lambda option: sum(map(_gap, half, option)))


def _gap(first: Block, second: Block) -> float:
    gap, a, b = 0.0, dict(first.args), dict(second.args)
    for name in sorted(a.keys() | b.keys()):  # so that the sum is the same in every process
        x, y = float(a.get(name, 0)), float(b.get(name, 0))
        gap += abs(math.log(x / y)) if x > 0 and y > 0 else float(x != y)
    return gap


def layer_kinds(frames: Frames, frame: Frame) -> tuple[list[str], list[str]]:
    """Returns the choices of mixers and of feed-forwards that a gene of `frame` may use, each with valid blocks."""
    space = frames.space
    mixers = [choice for choice in space.mixer_choices if frames.halves(frame, choice)]
    ffn = [frame.ffn] if frame.ffn else [block.kind for block in space.ffn]
    return mixers, [kind for kind in ffn if frames.halves(frame, kind)]
