"""Compares proxies with the layouts that they stand for: weights, references, memory; prints a table.

    python -m benchmarks.quality.narrowing [--layouts 600] [--page docs/measured/proxies.md]

Per packaged space: the rank correlation (Spearman) of weights outside the embedding, over random layouts at deploy
scale and their proxies; how far the weights of the two references are apart; and, for each kind of mixer that remembers
more than a few tokens, its memory in the proxy as a share of full attention's cache, over that share at deploy scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from benchmarks.page import markdown, write_part
from nas.core.block import Block
from nas.core.layout import Layout, narrow
from nas.core.quality_config import QualityConfig
from nas.core.space import SearchSpace
from nas.model.text.corpus import BYTE_VOCAB
from nas.search.proposers import Sampler
from nas.search.spaces import list_spaces, load_space

MOE = "moe"


@dataclass(frozen=True)
class Narrowing:
    """Figures of one space.

    Args:
        space: its name.
        total: Spearman's rank correlation of weights outside the embedding, by kind of layouts: all, dense, MoE.
        active: the same of active weights.
        gap_deploy: weights of the attention reference / the published one's - 1, outside the embedding.
        gap_proxy: the same of their proxies.
        memory: kind of mixer -> least and greatest (share in the proxy / share at deploy scale) of full attention's
            cache that its memory takes.
    """

    space: str
    total: dict[str, float]
    active: dict[str, float]
    gap_deploy: float
    gap_proxy: float
    memory: dict[str, tuple[float, float]]


def study(space: SearchSpace, layouts: int, seed: int = 0) -> Narrowing:
    """Returns the figures of `space` over random layouts."""
    config = space.quality
    sampler, rng = Sampler(space), np.random.default_rng(seed)
    drawn = [sampler.draw(rng) for _ in range(layouts)]
    pairs = [(layout, _proxy(layout, config)) for layout in drawn]
    groups = {
        "all": pairs,
        "dense": [pair for pair in pairs if not _sparse(pair[0])],
        "MoE": [pair for pair in pairs if _sparse(pair[0])],
    }
    gaps = []
    for scale in (lambda layout: layout, lambda layout: _proxy(layout, config)):
        published, attention = (
            scale(Layout.parse(text)).params.non_embedding
            for text in (space.references.published, space.references.attention)
        )
        gaps.append(attention / published - 1)
    memory: dict[str, list[float]] = {}
    for layout, proxy in pairs:
        for kind, ratio in _memory_ratios(layout, proxy, config):
            memory.setdefault(kind, []).append(ratio)
    return Narrowing(
        space.name,
        {name: _spearman([[total(layout) for layout in pair] for pair in group]) for name, group in groups.items()},
        {name: _spearman([[active(layout) for layout in pair] for pair in group]) for name, group in groups.items()},
        gaps[0],
        gaps[1],
        {kind: (min(ratios), max(ratios)) for kind, ratios in memory.items()},
    )


def total(layout: Layout) -> int:
    """Returns the weights outside the embedding."""
    return layout.params.non_embedding


def active(layout: Layout) -> int:
    """Returns the weights outside the embedding that one token passes through."""
    return layout.params.active - (layout.params.total - layout.params.non_embedding)


def _proxy(layout: Layout, config: QualityConfig) -> Layout:
    return narrow(layout, config.proxy_d_model, BYTE_VOCAB, context=config.context, length=config.length)


def _sparse(layout: Layout) -> bool:
    return any(block.kind == MOE for layer in layout.layers for block in layer.blocks)


def _spearman(pairs: Sequence[Sequence[int]]) -> float:
    return float(spearmanr(np.array(pairs)).statistic) if len(pairs) > 2 else np.nan


def _memory_ratios(layout: Layout, proxy: Layout, config: QualityConfig) -> Iterator[tuple[str, float]]:
    for wide, narrowed in zip(layout.layers, proxy.layers, strict=True):
        for block, short in zip(wide.mixers, narrowed.mixers, strict=True):
            deployed = _remembered(block, layout.d_model, config.context)
            if deployed:
                proxy_memory = _remembered(short, proxy.d_model, config.length)
                share = deployed / (layout.d_model * config.context)
                yield block.kind, proxy_memory / (proxy.d_model * config.length) / share


def _remembered(block: Block, d_model: int, tokens: int) -> float:
    """Numbers that a mixer keeps of `tokens` tokens; without the last inputs of a convolution, whose taps stay."""
    full = block.resolve(d_model)
    return full.spec.memory(full, d_model) + full.spec.kv_bytes(full, d_model, tokens, element=1.0)


def table(studies: Sequence[Narrowing]) -> str:
    """Returns the figures as a Markdown table."""
    return markdown([_row(one) for one in studies])


def _row(one: Narrowing) -> dict[str, str]:
    def cell(correlations: dict[str, float]) -> str:
        return " / ".join("-" if np.isnan(value) else f"{value:.4f}" for value in correlations.values())

    memory = [f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in sorted(one.memory.items())]
    return {
        "space": f"`{one.space}`",
        "total weights, all / dense / MoE": cell(one.total),
        "active weights, all / dense / MoE": cell(one.active),
        "references, deploy -> proxy": f"{one.gap_deploy:+.2%} -> {one.gap_proxy:+.2%}",
        "memory, proxy / deploy": ", ".join(memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=600, help="random layouts of each space")
    parser.add_argument("--page", type=Path, help="that gets the table; left out: printed")
    options = parser.parse_args()
    rows = [study(load_space(name), options.layouts) for name in list_spaces()]
    write_part(options.page, "narrowing", table(rows))


if __name__ == "__main__":
    main()
