"""Searches with every family of mixers, and with gated short convolutions and attention alone: what do the others add?

    python -m benchmarks.mixers run FOLDER [--base lfm2-full] [--seeds 0 1] [--trials 80]     # hours; continues
    python -m benchmarks.mixers report [--page docs/measured/mixers.md]

The LFM2 report (arXiv:2511.23404, section 2) found that they add nothing. Two spaces are searched with equal trials and
seeds: `all`, the base with each of its families of mixers, and `plain`, the same with convolutions and grouped-query
attention alone. The plain space loses

    1 - V(plain) / V(all)

of hypervolume, in draws from the noise of each layout's objectives. Beside it are the same of one seed and another of a
space, and of layouts of both that are dealt to two sides at random: no loss is told from none that is as likely there.
Neither space has anchors: those are layouts of the space, and qualities of two spaces would be of two scales. The
studies are in benchmarks/recorded/mixers.json.gz.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.page import fill, table
from benchmarks.search.recorded import Recorded, load, recorded, worst_point, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.figures import complete
from benchmarks.study.terms import OURS, Terms
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.pareto import front_mask, hypervolume
from nas.search.analysis.report import study_report
from nas.search.spaces import space_text

RECORDED = Path(__file__).parent / "recorded/mixers.json.gz"
PLAIN = ("conv", "gqa")
"""Mixers of the plain space."""
LOSS = 0.01
DRAWS = 2000
CHANCE = "layouts of both, dealt to two sides at random"

Floats = NDArray[np.float64]


def space(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the space `all` or `plain` of a base, without anchors."""
    mixers = {kind: sizes for kind, sizes in base["mixers"].items() if name == "all" or kind in PLAIN}
    limits = {kind: limit for kind, limit in base.get("limits", {}).items() if kind in mixers or kind in base["ffn"]}
    quality = {key: value for key, value in base["quality"].items() if key != "anchors"}
    return {**base, "name": f"{base['name']}-{name}", "mixers": mixers, "limits": limits, "quality": quality}


def run(folder: Path, base: str, seeds: Sequence[int], trials: int) -> None:
    """Searches both spaces with each seed, and records the studies that have ended."""
    content = yaml.safe_load(space_text(base))
    campaigns = {}
    for name in ("all", "plain"):
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, yaml.safe_dump(space(content, name), sort_keys=False).encode())
        campaigns[name] = Campaign((folder / name).resolve(), str(path), lambda text: print(text, file=sys.stderr))
    studies = []
    for terms in (Terms(OURS, seed, trials) for seed in seeds):
        for name, campaign in campaigns.items():
            campaign.run([terms])
            with campaign.store() as store:
                studies.append(recorded(study_report(store, terms.study), engine=OURS, side=name))
            write(studies, RECORDED)


class Fronts:
    """Complete layouts of studies, as points with noise.

    Args:
        studies: each with its `side`.
    """

    def __init__(self, studies: Sequence[Recorded]) -> None:
        rows: dict[str, Mapping[str, Any]] = {}
        for row in chain.from_iterable(map(complete, studies)):
            rows.setdefault(row["layout"], row)
        corner = worst_point(studies)
        self.layouts = list(rows)
        self._corner = np.array(list(corner.values()))
        self._points = np.array([[row["objectives"][name] for name in corner] for row in rows.values()])
        self._sd = np.array([[row.get("noise", {}).get(name, 0.0) for name in corner] for row in rows.values()])
        places = {layout: place for place, layout in enumerate(rows)}
        self._sides: dict[str, list[list[int]]] = {"all": [], "plain": []}
        for study in studies:
            self._sides[study["side"]].append([places[row["layout"]] for row in complete(study)])

    def losses(self, draws: int = DRAWS) -> dict[str, Floats]:
        """Returns draws of what one set of layouts loses to another."""
        generator = np.random.default_rng(0)
        sides = {name: sorted({*chain.from_iterable(studies)}) for name, studies in self._sides.items()}
        pairs = {"plain, to all": (sides["plain"], sides["all"])}
        for name, studies in self._sides.items():
            if len(studies) == 2:
                pairs[f"{name}, one seed to the other"] = (studies[0], studies[1])
        losses: dict[str, list[float]] = {name: [] for name in (*pairs, CHANCE)}
        for _ in range(draws):
            points = self._points + generator.standard_normal(self._points.shape) * self._sd
            for name, (part, other) in pairs.items():
                losses[name].append(self._loss(points, part, other))
            order = [int(place) for place in generator.permutation(len(points))]
            losses[CHANCE].append(self._loss(points, order[: len(sides["plain"])], order[-len(sides["all"]) :]))
        return {name: np.array(drawn) for name, drawn in losses.items()}

    def _loss(self, points: Floats, part: Sequence[int], other: Sequence[int]) -> float:
        return 1 - hypervolume(points[part], self._corner) / hypervolume(points[other], self._corner)

    def front(self) -> list[str]:
        """Returns the layouts on the front of all studies."""
        return [layout for layout, inside in zip(self.layouts, front_mask(self._points), strict=True) if inside]


def report(studies: Sequence[Recorded]) -> str:
    """Returns the tables: losses, and the mixers on the front of all studies."""
    fronts = Fronts(studies)
    losses = []
    for name, drawn in fronts.losses().items():
        low, middle, high = np.quantile(drawn, (0.025, 0.5, 0.975))
        losses.append((name, f"{middle:.1%} ({low:.1%} to {high:.1%})", f"{np.mean(drawn >= LOSS):.2f}"))
    mixers = [{mixer.kind for layer in Layout.parse(text).layers for mixer in layer.mixers} for text in fronts.front()]
    kinds = sorted(set().union(*mixers))
    shares = [(kind, f"{sum(kind in layout for layout in mixers)} of {len(mixers)}") for kind in kinds]
    searches = []
    for study in studies:
        trials = len([row for row in study["told"] if row["origin"] != "reference"])
        hours = f"{study['elapsed_s'] / 3600:.1f}"
        searches.append((study["side"], f"{study['seed']}", f"{trials}", f"{len(complete(study))}", hours))
    return "\n".join(
        (
            table(("space", "seed", "trials", "complete", "hours"), searches),
            table(("loss of hypervolume", "median, 95 %", f"chance of {LOSS:.0%} or more"), losses),
            table(("mixer", "layouts on the front"), shares),
        )
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--base", default="lfm2-full", help="name or file of a space")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    running.add_argument("--trials", type=int, default=80, help="of each study, references not counted")
    commands.add_parser("report").add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.folder, options.base, options.seeds, options.trials)
    elif options.page:
        fill(options.page, "mixers", report(load(RECORDED)))
    else:
        print(report(load(RECORDED)))


if __name__ == "__main__":
    main()
