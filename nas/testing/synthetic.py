"""A search problem without models or devices: layouts have known figures, so a search can be tested in seconds.

Quality follows a scaling law, recall that saturates with attention and suffers from gaps without it, preferences by
depth, and random interactions between neighbouring layers. Time and memory are computed from the layout, with random
costs between neighbours. Each seed gives another problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.search.proposers.api import Observation
from nas.search.proposers.sampling import Sampler

OBJECTIVES = ("quality", "latency", "memory")
_CONTEXT = 4096
_KINDS = ("C3", "C5", "C7", "A16/2", "A16/4", "A16/8", "A16/16")


def synthetic_space(pool: int = 256, seeds: int = 6) -> SearchSpace:
    """Returns a space of about 10^15 layouts of 20M to 60M weights, of which the budgets leave about a fifth."""
    limit = {"max": "1x", "workload": "chat"}
    return SearchSpace.model_validate(
        {
            "name": "synthetic",
            "model": {
                "d_model": [384, 512, 640],
                "depth": {"min": 8, "max": 14},
                "vocab": 8192,
                "params": {"total": {"min": "20M", "max": "60M"}},
                "leading_dense": [1, 2],
            },
            "mixers": {
                "conv": {"kernel": {"choices": [3, 5, 7], "scope": "layer"}},
                "gqa": {"heads": 16, "kv_heads": {"choices": [2, 4, 8, 16], "scope": "layer"}},
            },
            "ffn": {
                "swiglu": {"width": {"choices": [768, 1152, 1536, 2048], "scope": "layer"}},
                "moe": {"experts": [4, 8], "top_k": 2, "width": [192, 256, 384]},
            },
            "runtimes": [{"name": "none", "quantisation": "none"}],
            "workloads": {"chat": {"prompt": 512, "gen": 64, "context": _CONTEXT}},
            "budgets": [{"metric": name, **limit} for name in ("ttft", "decode_p50", "peak_rss")],
            "objectives": [
                {"name": "quality", "metric": "quality"},
                {"name": "latency", "metric": "decode_p50", "workload": "chat"},
                {"name": "memory", "metric": "peak_rss", "workload": "chat"},
            ],
            "references": {
                "published": "d512 v8192 ffn=swiglu:1536 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3]",
                "attention": "d512 v8192 ffn=swiglu:1536 [A16/8*11]",
            },
            "search": {"pool": pool, "seeds": seeds},
        }
    )


class SyntheticProblem:
    """One problem of the family.

    Args:
        seed: of the random interactions.
        noise: standard deviation of an observed quality; times vary by as much, relatively.
        space: instead of `synthetic_space()`.
    """

    def __init__(self, seed: int = 0, noise: float = 0.005, space: SearchSpace | None = None) -> None:
        self.space = space or synthetic_space()
        self.seed, self.noise = seed, noise
        rng = np.random.default_rng([29, seed])
        count = len(_KINDS)
        self._pair = rng.normal(0, 0.010, (count, count))
        self._triple = rng.normal(0, 0.012, (count, count, count)) * (rng.random((count, count, count)) < 0.2)
        self._preference = rng.normal(0, 0.012, (4, count))
        self._width_gain = 1 + 0.5 * np.sin(np.linspace(0, 3, 16) + rng.uniform(0, 3))
        self._hop = np.abs(rng.normal(0, 0.03, (count, count)))

    def truth(self, layout: Layout) -> dict[str, float]:
        """Returns noise-free figures, lower is better: quality (a loss), ttft, decode, memory, in arbitrary units."""
        kinds = [_KINDS.index(layer.mixers[0].format()) for layer in layout.layers]
        hops = 1 + sum(self._hop[a, b] for a, b in itertools.pairwise(kinds)) / 4
        cache = layout.kv_bytes(_CONTEXT)
        routed = 1.2 if layout.params.active < layout.params.total else 1.0
        return {
            "quality": self._loss(layout, kinds),
            "ttft": layout.flops(512) * hops * routed / 1e8,
            "decode": (0.5625 * layout.params.active * routed + 0.8 * cache) * hops / 1e7,
            "memory": (0.5625 * layout.params.total + cache) / 1e6 + 12,
        }

    def observe(self, layout: Layout) -> Observation:
        """Returns the figures with noise: always the same for the same layout."""
        rng = np.random.default_rng([31, self.seed, int(layout.id[:12], 16)])
        truth = self.truth(layout)
        figures = {
            name: value * math.exp(rng.normal(0, self.noise)) for name, value in truth.items() if name != "quality"
        }
        constraints = self._excess(figures)
        objectives = {"latency": math.log(figures["decode"]), "memory": math.log(figures["memory"])}
        if max(constraints.values()) > 0:
            return Observation(layout, "infeasible", objectives, constraints)
        objectives["quality"] = truth["quality"] + rng.normal(0, self.noise)
        return Observation(layout, "complete", objectives, constraints, rung=len(self.space.quality.rungs) - 1)

    def point(self, layout: Layout) -> NDArray[np.float64] | None:
        """Returns noise-free coordinates in the order of `OBJECTIVES`; None for a layout over a budget."""
        truth = self.truth(layout)
        if max(self._excess(truth).values()) > 0:
            return None
        return np.array([truth["quality"], math.log(truth["decode"]), math.log(truth["memory"])])

    @cached_property
    def reference_point(self) -> dict[str, float]:
        """The budgets, and the 75 % quantile of the loss of random layouts."""
        quality = float(np.quantile([figures["quality"] for figures in self._sample], 0.75))
        latency, memory = math.log(self._budgets["decode"]), math.log(self._budgets["memory"])
        return {"quality": quality, "latency": latency, "memory": memory}

    def _excess(self, figures: Mapping[str, float]) -> dict[str, float]:
        return {name: math.log(figures[name] / limit) for name, limit in self._budgets.items()}

    @cached_property
    def _sample(self) -> list[dict[str, float]]:
        sampler, rng = Sampler(self.space), np.random.default_rng([37, self.seed])
        return [self.truth(sampler.draw(rng)) for _ in range(300)]

    @cached_property
    def _budgets(self) -> dict[str, float]:
        """Limits that about a fifth of random layouts keep."""
        names = ("ttft", "decode", "memory")
        return {name: float(np.quantile([figures[name] for figures in self._sample], 0.4)) for name in names}

    def _loss(self, layout: Layout, kinds: list[int]) -> float:
        depth, active, total = layout.depth, layout.params.active, layout.params.total
        loss = 1.8 + 0.9 * ((0.7 * active + 0.3 * total) / 2e7) ** -0.25
        loss += 0.03 * math.log(layout.d_model / depth / 45) ** 2 + self._recall(kinds)
        preferences = sum(self._preference[4 * index // depth, kind] for index, kind in enumerate(kinds))
        pairs = sum(self._pair[a, b] for a, b in itertools.pairwise(kinds))
        triples = sum(self._triple[kinds[i], kinds[i + 1], kinds[i + 2]] for i in range(depth - 2))
        return float(loss + preferences + pairs + triples - self._feed_forward_gain(layout))

    def _recall(self, kinds: list[int]) -> float:
        """Returns the loss of recall: lower with attention and its heads, higher with long gaps without attention."""
        at = [index for index, kind in enumerate(kinds) if kind >= 3]
        recall = sum((0.5, 0.7, 0.9, 1.0)[kinds[index] - 3] for index in at)
        local = sum((0.7, 0.9, 1.0)[kind] for kind in kinds if kind < 3)
        gap = max(b - a for a, b in itertools.pairwise([-1, *at, len(kinds)])) / len(kinds)
        return 0.4 * math.exp(-recall / 1.5) + 0.25 * math.exp(-local / 2.5) + 0.1 * max(0.0, gap - 0.35)

    def _feed_forward_gain(self, layout: Layout) -> float:
        """Returns the gain of wide feed-forwards, by depth."""
        gain = 0.0
        for index, layer in enumerate(layout.layers):
            assert layer.ffn is not None, "layouts of this space have feed-forwards"
            width = layer.ffn.int("width") * (2 if layer.ffn.kind == "moe" else 1)
            gain += self._width_gain[16 * index // layout.depth] * math.log(width / layout.d_model) / layout.depth
        return 0.06 * gain
