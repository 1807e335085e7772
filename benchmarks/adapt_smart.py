"""Which layers of the tiny teacher keep attention: SMART, sums of scores, and all choices tried: `RECORDED`.

SMART is a baseline (Yang et al. 2025, Zebra-Llama, section 3.1.2 and appendix B): it knows one cheap mixer and a number
of layers that keep theirs; scores are what a layer that is kept gains where all others are cheap.

All other layers get one cheap mixer, trained as `nas adapt` trains its library. The divergence of each of the sixteen
assembled choices, before healing, is computed on text that nothing was chosen by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.page import table
from nas.core.block import Block
from nas.core.durable import write_durably
from nas.core.replacement import TEXT_GROUP, Slot
from nas.model.nn.mixes import compared
from nas.train.adapt.library import Library
from nas.train.adapt.selection import Option, Term, select
from nas.train.adapt.text import report_text
from nas.train.pretrain.data import Tokens

RECORDED = Path(__file__).parent / "recorded/adapt-smart.json"
CHEAP = {
    "Mamba-2": Block.parse("M16(expand=1,groups=6,heads=6)", "mixer"),
    "short convolution": Block.parse("C3", "mixer"),
}
RULES = {"smart": "SMART", "sums": "sums of scores", "pairs": "sums and pairs", "best": "best of all"}


def run(library: Library, sources: Sequence[Tokens]) -> None:
    """Writes `RECORDED`."""
    report = {name: _compared(library, sources, block) for name, block in CHEAP.items()}
    write_durably(RECORDED, (json.dumps(report, indent=1) + "\n").encode())
    print(table_of(report))


def table_of(report: dict[str, Any]) -> str:
    """Returns for each number of layers that keep attention which ones, and the divergence of that child."""
    rows = []
    for name, result in report.items():
        for count, chosen in result["chosen"].items():
            cells = (f"{result['divergence'][layers]:.3f} ({layers})" for layers in map(chosen.get, RULES))
            rows.append([name, count, *cells])
    return table(["cheap mixer", "layers kept", *RULES.values()], rows)


def sensitivities(library: Library, cheap: Mapping[Slot, Block | None]) -> list[float]:
    """Returns by how much the divergence falls if one place alone keeps its block (equation 12), nats per token."""
    all_cheap = library.divergence(library.mix(cheap))
    others = ({slot: block for slot, block in cheap.items() if slot != alone} for alone in cheap)
    return [all_cheap - library.divergence(library.mix(mix)) for mix in others]


def smart_layers(sensitivity: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns the layers that keep their mixer.

    The first and the last are the most sensitive ones of the first and last floor(L / count) layers. The others are
    spread between them with gaps that differ by at most one layer, so that their sensitivities add up to the most.
    """
    layers = len(sensitivity)
    assert 0 <= count <= layers
    if count < 2:  # one partition, whose ends are the same layer
        return tuple(sorted(range(layers), key=lambda i: -sensitivity[i])[:count])
    size = layers // count
    first = max(range(size), key=lambda i: sensitivity[i])
    last = max(range(layers - size, layers), key=lambda i: sensitivity[i])
    narrow, wider = divmod(last - first - count + 1, count - 1)

    @lru_cache(None)
    def rest(at: int, gaps: int, wide: int) -> tuple[float, tuple[int, ...]]:
        """Returns the best sum and layers behind `at`, with `gaps` gaps, `wide` of which are wider."""
        if gaps == 1:  # the last gap ends in front of `last`
            return 0.0, ()
        candidates = []
        for extra in {min(1, wide), 0 if wide < gaps else 1}:
            layer = at + narrow + 1 + extra
            total, behind = rest(layer, gaps - 1, wide - extra)
            candidates.append((sensitivity[layer] + total, (layer, *behind)))
        return max(candidates)

    return (first, *rest(first, count - 1, wider)[1], last)


def _compared(library: Library, sources: Sequence[Tokens], block: Block) -> dict[str, Any]:
    slots = [Slot(depth, "mixer") for depth in range(library.teacher.layout.depth)]
    library.train({slot: (block,) for slot in slots})
    text = report_text(sources, library.settings.length, library.settings.score_tokens)

    def divergence(layers: Sequence[int]) -> float:
        mix = library.mix({slot: block for slot in slots if slot.depth not in layers})
        return text.means(compared(library.teacher.model, mix, text).kl)[TEXT_GROUP]

    every = [layers for count in range(len(slots) + 1) for layers in combinations(range(len(slots)), count)]
    divergences = {_name(layers): divergence(layers) for layers in every}
    gains = sensitivities(library, dict.fromkeys(slots, block))
    scores = library.scores({slot: (block,) for slot in slots})
    terms = [
        Term(((a.depth, "cheap"), (b.depth, "cheap")), term.text)
        for ((a, _), (b, _)), term in library.pair_terms(
            [((a, block), (b, block)) for a, b in combinations(slots, 2)]
        ).items()
    ]
    places = {
        slot.depth: [Option[int]("own", 0.0, {"kept": 1.0}), Option("cheap", scores[slot, block].text, {"kept": 0.0})]
        for slot in slots
    }

    def selected(count: int, terms: Sequence[Term[int]]) -> str:
        selection = select(places, {"kept": 0.0}, {"kept": count}, terms)
        assert selection is not None
        return _name([depth for depth, option in selection.items() if option.name == "own"])

    chosen = {
        str(count): {
            "smart": _name(smart_layers(gains, count)),
            "sums": selected(count, []),
            "pairs": selected(count, terms),
            "best": min((_name(layers) for layers in every if len(layers) == count), key=divergences.__getitem__),
        }
        for count in range(1, len(slots))
    }
    return {"divergence": divergences, "sensitivity": gains, "chosen": chosen}


def _name(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
