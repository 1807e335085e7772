"""Simulates quality: a layout as a circuit that builds up skills from the bottom to the top.

The stack carries a state of four skills (local, recall, long, compose). A mixer adds to them, less the fuller they are
and only as far as what it needs has been built below it; it wears others down. Feed-forwards turn skills into loss, and
which skills they ask for changes with height. So the effect of a layer depends on all layers under it: pairs, triples
and places interact without a table that says so. What a problem adds on top of that are its `Traits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from nas.core.block import Block
from nas.core.layout import Layout

_SKILLS = 4
_SUPPLY = {
    "conv": (0.50, 0.00, 0.02, 0.15),
    "gqa": (0.08, 0.55, 0.30, 0.20),
    "swa": (0.30, 0.30, 0.05, 0.20),
    "mamba2": (0.30, 0.15, 0.45, 0.15),
}
_LOCAL = ("conv", "mamba2")
_HEAVY = (0.6, 0.25, 0.1, 0.05)
"""Share of a feed-forward's demand by skill at the bottom; turned around at the top."""


@dataclass(frozen=True)
class Traits:
    """Difficulties of a problem, each 0 for none.

    Args:
        conflict: how much is lost where two mixers that disturb each other are neighbours.
        rugged: standard deviation of a random effect of each triple of neighbouring mixers, arguments included.
        placement: how much each kind of mixer gains around one height that is its own.
        trap: how much evenly spaced hybrids, which are usually good, lose against a run of global mixers at one height.
        appetite: how unevenly feed-forwards are useful over the height.
    """

    conflict: float = 0.05
    rugged: float = 0.003
    placement: float = 0.02
    trap: float = 0.0
    appetite: float = 0.5


class Circuit:
    """The quality of one problem.

    Args:
        traits: its difficulties.
        rng: draws all effects.
    """

    def __init__(self, traits: Traits, rng: np.random.Generator) -> None:
        self._traits = traits
        self._seed = int(rng.integers(1 << 32))
        kinds = list(_SUPPLY)
        self._supply = {kind: np.array(_SUPPLY[kind]) * rng.uniform(0.7, 1.3, _SKILLS) for kind in kinds}
        self._wear = {kind: rng.uniform(0, 0.12, _SKILLS) for kind in kinds}
        self._need = {kind: (int(rng.integers(_SKILLS)), float(rng.uniform(0.1, 0.4))) for kind in kinds}
        self._need["gqa"] = (0, float(rng.uniform(0.2, 0.5)))
        self._clash = {(a, b): bool(rng.random() < 0.35) for a in kinds for b in kinds}
        self._height = {kind: float(rng.uniform(0.1, 0.9)) for kind in kinds}
        self._run_at = float(rng.uniform(0.2, 0.8))
        self._hunger = float(rng.uniform(0, math.pi))
        self._skew = rng.permutation(_SKILLS)
        self._routing = float(rng.uniform(0.15, 0.4))
        self._triple = cache(self._draw_triple)
        self._strength = cache(self._draw_strength)

    def loss(self, layout: Layout) -> float:
        """Returns the loss; lower is better."""
        depth = layout.depth
        state = np.full(_SKILLS, 0.02)
        gain = extra = 0.0
        low = np.array(_HEAVY)[self._skew]
        blocks = [layer.mixers[0] for layer in layout.layers]
        for index, mixer in enumerate(blocks):
            height = (index + 0.5) / depth
            state = self._mixed(state, mixer)
            if index and self._clash[blocks[index - 1].kind, mixer.kind]:
                extra += self._traits.conflict / depth
            if index > 1 and self._traits.rugged:
                extra += self._triple(blocks[index - 2], blocks[index - 1], mixer)
            away = (height - self._height[mixer.kind]) / 0.15
            extra -= self._traits.placement * math.exp(-0.5 * away * away) * 4 / depth
            ffn = layout.layers[index].ffn
            assert ffn is not None, "layouts of these spaces have feed-forwards"
            demand = (1 - height) * low + height * low[::-1]
            gain += self._fed(ffn, layout.d_model, height) * float(demand @ state) / depth
        shape = math.log(layout.d_model / depth / 45)
        return 2.6 - 0.8 * gain - 0.12 * float(state.mean()) + 0.04 * shape * shape + extra + self._trap(blocks)

    def _mixed(self, state: np.ndarray, mixer: Block) -> np.ndarray:
        skill, least = self._need[mixer.kind]
        ready = 1 / (1 + math.exp(-12 * (state[skill] - least)))
        ready = 0.25 + 0.75 * ready
        added = self._supply[mixer.kind] * self._strength(mixer) * ready
        fresh: np.ndarray = state * (1 - self._wear[mixer.kind]) + added * (1 - state)
        return fresh

    def _fed(self, ffn: Block, d_model: int, height: float) -> float:
        """Returns the strength of a feed-forward: its width, for experts with diminishing returns of their number."""
        arguments = dict(ffn.args)
        width = float(arguments["width"])
        if ffn.kind == "moe":
            top = float(arguments["top_k"])
            width *= top * (float(arguments["experts"]) / top) ** self._routing
        eager = 1 + self._traits.appetite * math.sin(math.pi * 1.5 * height + self._hunger)
        return 0.35 * eager * math.log1p(width / d_model)

    def _trap(self, blocks: list[Block]) -> float:
        """A valley: single global mixers cost, a run of them near one height gains more than they ever lose."""
        if not self._traits.trap:
            return 0.0
        best, run, singles = 0.0, 0, 0
        for index, block in enumerate(blocks):
            run = 0 if block.kind in _LOCAL else run + 1
            alone = run == 1 and (index + 1 == len(blocks) or blocks[index + 1].kind in _LOCAL)
            singles += alone
            middle = (index + 1 - run / 2) / len(blocks)
            near = math.exp(-(((middle - self._run_at) / 0.2) ** 2))
            best = max(best, near * (min(run, 4) / 4) ** 2)
        return self._traits.trap * (0.25 * singles - 1.5 * best)

    def _draw_strength(self, mixer: Block) -> float:
        """Draws strengths: more heads, longer kernels and larger states do more, with a random preference for each."""
        rng = self._random(mixer.format())
        size = 1.0
        for name, scale in (("kv_heads", 8), ("kernel", 5), ("window", 256), ("state", 64)):
            if (value := dict(mixer.args).get(name)) is not None:
                size *= (float(value) / scale) ** 0.25
        return size * float(rng.uniform(0.85, 1.15))

    def _draw_triple(self, *blocks: Block) -> float:
        rng = self._random(" ".join(block.format() for block in blocks))
        return float(rng.normal(0, self._traits.rugged))

    def _random(self, text: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, *text.encode()])
