"""Formats the figures of a comparison as Markdown."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.study.stacks import HEIGHTS
from benchmarks.study.terms import ABLATED, CALLED
from nas.core.units import show_duration

Json = Mapping[str, Any]
_WINNERS = 15
_WIDTH = 120
_KINDS = {"conv": "convolution", "gqa": "attention", "mamba2": "Mamba-2"}


def page(found: Json, command: str, picture: str, conditions: str) -> str:
    """Returns the generated part of the page.

    Args:
        found: of `figures`.
        command: that creates it.
        picture: path of the plot, from the page.
        conditions: under which it was measured.
    """
    parts = [
        _head(found, command, conditions), _engines(found, picture), _front(found), _built(found), _ablation(found),
    ]  # fmt: skip
    return "\n\n".join(_wrapped(block) for part in parts if part for block in part.split("\n\n")) + "\n"


def _wrapped(block: str) -> str:
    """Wraps a paragraph; returns other Markdown unchanged."""
    if block.startswith(("#", "|", "!", " ")):
        return block
    return textwrap.fill(" ".join(block.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _head(found: Json, command: str, conditions: str) -> str:
    compared = [study for study in found["studies"] if not study["ablated"]]
    engines = list(dict.fromkeys(CALLED[study["engine"]] for study in compared))
    seeds = sorted({study["seed"] for study in compared})
    trials = sorted({study["trials"] for study in found["studies"]})
    spent = sum(study["elapsed_s"] for study in found["studies"])
    seeded = f"{'seeds' if len(seeds) > 1 else 'seed'} {_listed(map(str, seeds))}"
    return f"""    {command}

Studies of `{found["space"]}` on a real machine: {_listed(engines)}, {seeded}, each \
{_listed(map(str, trials))} trials. Every layout was exported, measured by \
[the protocol](../explanation/measurement-protocol.md) and, where it kept the budgets, \
trained in small; the quality of layouts on or near a study's front is that of [fresh seeds]\
(../explanation/reading-the-front.md). All studies together ran for {show_duration(spent)}. {conditions}

Budgets are equal in trials, not in seconds: results are found by the hash of their inputs, so the references and the
layouts that an earlier study had tried already cost a later one nothing. Hypervolume counts complete trials, in every
study from the same corner ({_corner(found["corner"])}); 1 is the front of all studies together. All engines but the
random one begin with the same heuristic layouts. Differences below those between the seeds of
one engine mean nothing."""


def _engines(found: Json, picture: str) -> str:
    compared = [study for study in found["studies"] if not study["ablated"]]
    whole = found["union_hypervolume"]
    marks = sorted({int(mark) for study in compared for mark in study["hypervolume"]})
    head = ["engine", "seed", *(f"@{mark}" for mark in marks), "complete", "stopped", "infeasible", "failed"]
    rows = [[*head, "measuring", "training", "wall time"]]
    for study in compared:
        ended = [str(study["ended"].get(state, 0)) for state in ("complete", "stopped", "infeasible", "failed")]
        volumes = [_share(study["hypervolume"].get(str(mark)), whole) for mark in marks]
        spent = [show_duration(study[name]) for name in ("device_s", "training_s", "elapsed_s")]
        rows.append([CALLED[study["engine"]], str(study["seed"]), *volumes, *ended, *spent])
    return f"""## Hypervolume over time

Share of the union front's hypervolume after so many trials, what became of the trials, and the seconds that their
stages took (whoever did them first).

{_table(rows)}

{_means(compared)}

![Hypervolume over trials and seconds of measuring]({picture})"""


def _means(compared: Sequence[Json]) -> str:
    shares: dict[str, list[float]] = {}
    for study in compared:
        shares.setdefault(CALLED[study["engine"]], []).append(study["share"] or 0.0)
    order = sorted(shares, key=lambda engine: -statistics.fmean(shares[engine]))
    told = (
        f"{engine} {statistics.fmean(shares[engine]):.3f} ({', '.join(f'{each:.3f}' for each in shares[engine])})"
        for engine in order
    )
    return f"Mean share at the end, with its seeds: {'; '.join(told)}."


def _front(found: Json) -> str:
    winners = found["front"]
    if not winners:
        return "## The front\n\nNo layout is complete."
    rows = [["layout", "quality", "latency", "memory", "adds", "p_front", "found by"]]
    for winner in winners[:_WINNERS]:
        ratios = (f"{winner[name]:.3f}" for name in ("quality", "latency", "memory", "adds", "p_front"))
        rows.append([f"`{winner['layout']}`", *ratios, ", ".join(winner["found_by"])])
    verb = "is" if len(winners) == 1 else "are"
    shown = f"; here are the {_WINNERS} that add most" if len(winners) > _WINNERS else ""
    return f"""## The front

{_counted(len(winners), "layout")} of all studies {verb} on the front{shown}.
Quality, latency and memory are ratios to the published reference; `adds` is the hypervolume that a layout alone adds;
`p_front` is [how sure its place is](../explanation/reading-the-front.md).

{_table(rows)}"""


def _built(found: Json) -> str:
    stacks = found["stacks"]
    if "front" not in stacks:
        return ""
    front = stacks["front"]
    kinds = list(stacks["proposed"]["mixers"][HEIGHTS[0]])
    places = [(kind, height) for kind in kinds for height in HEIGHTS]
    rows = [
        [
            "",
            "layouts",
            "layers",
            "with experts",
            *(f"{_called(kind)}, {height}" for kind in kinds for height in HEIGHTS),
        ]
    ]
    names = {"front": "on the front", "proposed": "proposed by all", "random": "proposed at random"}
    for name, stack in stacks.items():
        shares = (f"{stack['mixers'][height].get(kind, 0.0):.2f}" for kind, height in places)
        row = [names[name], str(stack["layouts"]), f"{stack['depth']:.1f}", f"{stack['experts']:.2f}", *shares]
        rows.append(row)
    return f"""## Which layouts win

{_words(front, stacks.get("random", stacks["proposed"]))}

Share of each mixer in the bottom, middle and top third of the stacks (the bottom is next to the embedding), and of
layouts with a mixture of experts:

{_table(rows)}"""


def _words(front: Json, drawn: Json) -> str:
    layers = _listed(f"{front['layers'][kind]:.1f} of {_called(kind)}" for kind in front["layers"])
    having = _listed(f"{front['having'][kind]:.0%} have {_called(kind)}" for kind in front["having"])
    moved = []
    for kind in front["layers"]:
        heights = {height: front["mixers"][height].get(kind, 0.0) for height in HEIGHTS}
        most = max(heights, key=lambda height: heights[height])
        before = statistics.fmean(drawn["mixers"][height].get(kind, 0.0) for height in HEIGHTS)
        now = statistics.fmean(heights.values())
        moved.append(
            f"{_called(kind).capitalize()} holds {now:.0%} of the layers on the front and {before:.0%} of those drawn "
            f"at random; most of it stands at the {most} ({heights[most]:.0%} of the layers there)."
        )
    return (
        f"A stack on the front has {front['depth']:.1f} layers on average: {layers}. Of these layouts {having}, and "
        f"{front['experts']:.0%} have experts. {' '.join(moved)}"
    )


def _ablation(found: Json) -> str:
    ablation = found["ablation"]
    if ablation is None:
        return ""
    rows = [
        [
            "space",
            "seed",
            "hypervolume",
            "share of both fronts together",
            "best quality",
            "attention layers on the front",
        ]
    ]
    for half, name in (("with", f"with {_called(ABLATED)}"), ("without", f"without {_called(ABLATED)}")):
        for study in ablation[half]:
            best, attention = study["best_quality"], study["attention_layers_on_front"]
            rows.append(
                [
                    name, str(study["seed"]), f"{study['hypervolume']:.4f}", _number(study["share"]), _number(best),
                    _number(attention, 1),
                ]
            )  # fmt: skip
    front = ablation["front_with"]
    return f"""## Are convolution and a little attention enough?

The same engine (ours), seeds and budget in the same space with and without {_called(ABLATED)}; everything else, the
runner's build included, is equal.

{_table(rows)}

{_verdict(ablation)} Of {_counted(front["layouts"], "layout")} on the front of the studies with {_called(ABLATED)},
{front["of_them_with_blocks"]} with such a layer; the others alone reach
{_share(front["hypervolume_of_those_without_blocks"], front["hypervolume"])} of that front's hypervolume."""


def _verdict(ablation: Json) -> str:
    halves = {half: [study["share"] or 0.0 for study in ablation[half]] for half in ("with", "without")}
    means = {half: statistics.fmean(shares) for half, shares in halves.items()}
    spread = max(max(shares) - min(shares) for shares in halves.values())
    gap = means["with"] - means["without"]
    told = f"With it the mean share is {means['with']:.3f}, without it {means['without']:.3f}"
    if min(map(len, halves.values())) < 2:
        return f"{told}. One seed of each cannot say what is chance."
    if abs(gap) <= spread:
        return f"{told}: less apart than two seeds of one of them ({spread:.3f}), so this does not tell them apart."
    better = "helps here" if gap > 0 else "does not pay here at this budget"
    return f"{told}: further apart than two seeds of one of them ({spread:.3f}). Having {_called(ABLATED)} {better}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _called(kind: str) -> str:
    return _KINDS.get(kind, kind)


def _corner(corner: Json) -> str:
    told = (
        f"{name} {-value:.3f}" if name == "quality" else f"{name} {math.exp(value):.3f} of the reference's"
        for name, value in corner.items()
    )
    return ", ".join(told)


def _share(volume: float | None, whole: float) -> str:
    return "" if volume is None or not whole else f"{volume / whole:.3f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _listed(items: Any) -> str:
    words = list(items)
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
