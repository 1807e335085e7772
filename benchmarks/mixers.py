"""Searches with every family of mixers, and with gated short convolutions and attention alone: what do the others add?

    python -m benchmarks.mixers run FOLDER [--base benchmarks/mixers.yaml] [--seeds 0 1] [--trials 80]     # hours
    python -m benchmarks.mixers ablate FOLDER [--members 4]                                                # then
    python -m benchmarks.mixers report [FOLDER] [--page docs/measured/mixers.md]

The first two say how long they take; stopped or killed, they continue with the same command. `report FOLDER` is of the
studies as they are now.

The LFM2 report (arXiv:2511.23404, section 2) found that the others add nothing. Two spaces are searched with equal
trials and seeds: `all`, the base with each of its families of mixers, and `plain`, the same with convolutions and
grouped-query attention alone. The plain space loses

    1 - V(plain) / V(all)

of hypervolume, in draws from the noise of each layout's objectives. Beside it are the same of one seed and another of a
space, and of layouts of both that are dealt to two sides at random: no loss is told from none that is as likely there.
Neither space has anchors: those are layouts of the space, and qualities of two spaces would be of two scales.

`ablate` takes parts (`ABLATIONS`) out of the layouts that add most to the front of all studies. Proxies of the layouts
and of what is left are trained on the seeds of the space's `rescore`, and measured in a study of their own that lists
them; what the runtime does not carry has no figures of a device. Studies are in benchmarks/recorded/mixers.json.gz,
these trainings in mixers-trainings.jsonl.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import t

from benchmarks.page import fill, table
from benchmarks.quality.calibration import last_rung
from benchmarks.quality.truth import recorded as trainings
from benchmarks.quality.truth import train_missing
from benchmarks.search.recorded import Recorded, load, recorded, worst_point, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.figures import complete
from benchmarks.study.terms import OURS, Terms
from nas.cli.options import INTERRUPTED
from nas.core.block import Block
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, NasError
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.pareto import contributions, front_mask, hypervolume
from nas.core.quality_config import QualityConfig
from nas.core.stats import Z95
from nas.core.units import show_duration
from nas.infra.store.rows import StudyState
from nas.model.text.corpus import refer
from nas.search.proxy.job import TrainJob
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import QualityScale, Scores, fix_scale, paired_spread
from nas.search.spaces import load_space, space_text
from nas.search.study.check import support_filter

RECORDED = Path(__file__).parent / "recorded/mixers.json.gz"
BASE = Path(__file__).with_suffix(".yaml")
PLAIN = ("conv", "gqa")
"""Mixers of the plain space."""
SIDES = ("all", "plain")
ABLATION = "ablation"
QUALITIES = ("quality", "recall")
LOSS = 0.01
DRAWS = 2000
CHANCE = "layouts of both, dealt to two sides at random"
_UNTRAINED = 64
"""Steps of the proxies of the study that measures ablations: their quality is not read."""

Floats = NDArray[np.float64]


def _without_taps(block: Block) -> Block:
    taps = {arg.name: 0 for arg in block.spec.args if arg.name in ("conv", "canon")}
    return block.replace(**taps) if taps else block


def _keeps_state(block: Block) -> bool:
    """Returns whether a mixer is neither attention nor a gated short convolution."""
    return block.kind != "conv" and not block.spec.kv_bytes(block.resolve(1024), 1024, 1024, 2.0)


ABLATIONS: dict[str, Callable[[Block], Block | None]] = {
    "no short convolution in other mixers": _without_taps,
    "no linear and state mixers": lambda block: None if _keeps_state(block) else block,
    "no gated short convolutions": lambda block: None if block.kind == "conv" else block,
}
"""Name of an ablation -> the function that returns the block in place of a mixer; None: the layer has no mixer."""


def ablations(layout: str) -> dict[str, str]:
    """Returns the name of each ablation that changes a layout -> what is left of it."""
    whole, ablated = Layout.parse(layout), {}
    for name, change in ABLATIONS.items():
        layers = [
            replace(layer, mixers=tuple(mixer for block in layer.mixers if (mixer := change(block)) is not None))
            for layer in whole.layers
        ]
        if layers != list(whole.layers):
            ablated[name] = whole.with_layers(layers).format()
    return ablated


def space(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the space `all` or `plain` of a base, without anchors."""
    mixers = {kind: sizes for kind, sizes in base["mixers"].items() if name == "all" or kind in PLAIN}
    limits = {kind: limit for kind, limit in base.get("limits", {}).items() if kind in mixers or kind in base["ffn"]}
    quality = {key: value for key, value in base["quality"].items() if key != "anchors"}
    return {**base, "name": f"{base['name']}-{name}", "mixers": mixers, "limits": limits, "quality": quality}


def measuring(base: Mapping[str, Any], layouts: Sequence[str]) -> dict[str, Any]:
    """Returns the space in which listed layouts are measured, whatever their quality and budgets."""
    chosen = ("model", "mixers", "ffn", "pattern", "limits", "parallel", "budgets")
    return {
        **{key: value for key, value in base.items() if key not in chosen},
        "name": f"{base['name']}-{ABLATION}-{len(layouts)}",
        "layouts": list(layouts),
        "objectives": [each for each in base["objectives"] if METRICS[each["metric"]].source != "proxy"],
        "quality": {"rungs": [{"name": "untrained", "lm_steps": _UNTRAINED}], "min_reference": 1e-6},
        "protocol": {**base.get("protocol", {}), "remeasure": None},
    }


def campaign(folder: Path, side: str, content: Mapping[str, Any] | None = None) -> Campaign:
    """Returns the studies of a side; its space is written once, so that days later it is still the same.

    Raises:
        InvalidInput: the folder has studies of another base.
    """
    path = folder.resolve() / f"{side}.yaml"
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            write_durably(path, yaml.safe_dump(dict(content), sort_keys=False).encode())
        elif (before := yaml.safe_load(path.read_text())["name"]) != content["name"]:
            raise InvalidInput(f"{path} is {before}, not {content['name']}: name another folder")
    return Campaign(path.with_suffix(""), str(path), lambda text: print(f"{side}: {text}", file=sys.stderr, flush=True))


def collected(folder: Path, planned: Sequence[tuple[str, Terms]]) -> list[Recorded]:
    """Returns the studies as far as they are, each with its `side` and the `trials` that are planned."""
    studies = []
    for side, terms in planned:
        more = {"side": side, "trials": terms.trials}
        if (found := campaign(folder, side).report(terms)) is None:
            studies.append(more | {"study": terms.study, "seed": terms.seed, "state": "not begun", "told": []})
        else:
            studies.append(recorded(found, engine=OURS, **more))
    return studies


def planned(studies: Sequence[Recorded]) -> list[tuple[str, Terms]]:
    """Returns side and terms of recorded studies."""
    return [(study["side"], Terms(OURS, study["seed"], study["trials"])) for study in studies]


def run(folder: Path, base: str, seeds: Sequence[int], trials: int, path: Path = RECORDED) -> None:
    """Searches both spaces with each seed; records the studies as far as they are whenever one has ended."""
    content = yaml.safe_load(space_text(base))
    campaigns = {side: campaign(folder, side, space(content, side)) for side in SIDES}
    all_terms = [(side, Terms(OURS, seed, trials)) for seed in seeds for side in SIDES]
    for side, searches in campaigns.items():
        searches.tell([terms for each, terms in all_terms if each == side])
    ablated = [study for study in load(path) if study["side"] == ABLATION] if path.is_file() else []
    write([*collected(folder, all_terms), *ablated], path)
    for side, terms in all_terms:
        campaigns[side].run([terms])
        write([*collected(folder, all_terms), *ablated], path)


def ablate(folder: Path, members: int, minutes: float, path: Path = RECORDED) -> None:
    """Trains and measures layouts of the front and their ablations; records both.

    Raises:
        InvalidInput: the searches have not ended.
    """
    searches = [study for study in load(path) if study["side"] in SIDES]
    if waiting := len(searches) - len(ended(searches)):
        raise InvalidInput(f"{waiting} of {len(searches)} searches have not ended: `run` continues them")
    front = Fronts(searches).front()[:members]
    layouts = [*dict.fromkeys(chain(front, *(ablations(layout).values() for layout in front)))]
    base = load_space(folder / "all.yaml")
    carried = support_filter(base)
    listed = [layout for layout in layouts if carried(Layout.parse(layout))]
    content = yaml.safe_load((folder / "all.yaml").read_text())
    measured, terms = campaign(folder, ABLATION, measuring(content, listed)), Terms(OURS, 0, len(listed))
    measured.tell([terms])
    jobs = {layout: _jobs(base.quality, layout, folder) for layout in (_published(searches), *layouts)}
    todo = {job.key: (layout, job) for layout, of_layout in jobs.items() for job in of_layout}
    first = jobs[_published(searches)]
    train_missing({job.key: todo[job.key] for job in first}, trainings_of(path), minutes)
    done = trainings(trainings_of(path))
    seconds = sum(done[job.key]["cpu_seconds"] for job in first) / len(first) * len(todo.keys() - done.keys())
    print(f"trainings: about {show_duration(seconds)} left", file=sys.stderr, flush=True)
    train_missing(todo, trainings_of(path), minutes)
    measured.run([terms])
    write([*searches, *collected(folder, [(ABLATION, terms)])], path)


def _jobs(config: QualityConfig, layout: str, folder: Path) -> list[TrainJob]:
    """Returns the trainings of the last rung, with the seeds of fronts."""
    return rung_jobs(last_rung(config.rescored), 0, Layout.parse(layout), refer(config.corpus, folder))


def _published(studies: Sequence[Recorded]) -> str:
    return str(next(row["layout"] for row in studies[0]["told"] if row["origin"] == "reference"))


def trainings_of(path: Path) -> Path:
    """Returns the file of the ablations' trainings beside that of the studies."""
    return path.with_name(path.name.partition(".")[0] + "-trainings.jsonl")


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
        """Returns the layouts on the front of all studies, first those that add most hypervolume."""
        inside = np.flatnonzero(front_mask(self._points))
        adds = contributions(self._points[inside], self._corner)
        return [self.layouts[place] for place in inside[np.argsort(-np.array(adds), kind="stable")]]


class Ablated:
    """Qualities and figures of a device, of layouts and their ablations.

    Args:
        studies: of which one may be the ablations' own.
        trained: rows of trainings.
    """

    def __init__(self, studies: Sequence[Recorded], trained: Iterable[Mapping[str, Any]]) -> None:
        runs: dict[str, dict[int, dict[str, float]]] = {}
        for row in trained:
            runs.setdefault(row["layout"], {}).setdefault(row["seed"], {}).update(row["scores"])
        self._measured = {
            row["layout"]: row for study in studies if study["side"] == ABLATION for row in complete(study)
        }
        self.devices = sorted({name for row in self._measured.values() for name in row["objectives"]})
        self._of_seeds: dict[str, dict[str, Mapping[int, float]]] = {name: {} for name in QUALITIES}
        if (theirs := runs.pop(_published(studies), None)) is None:
            return
        whole = set.intersection(*map(set, theirs.values()))  # others are trained with some of the seeds, for recall
        everywhere = {seed: {group: scores[group] for group in whole} for seed, scores in theirs.items()}
        scale = fix_scale("long", everywhere, minimum=QualityConfig().min_reference).rescored(theirs)
        for layout, scores in runs.items():
            if len(qualities := scale.per_seed(scores)) == len(theirs):
                self._of_seeds["quality"][layout] = qualities
                recalls = {seed: scale.quality({seed: scores[seed]}).recall for seed in _having(scale, scores)}
                self._of_seeds["recall"][layout] = {
                    seed: recall for seed, recall in recalls.items() if recall is not None
                }

    def value(self, name: str, layout: str) -> str:
        """Returns a quality, or a figure of a device as a ratio to the published reference's."""
        if name in self._of_seeds:
            return f"{fmean(values.values()):.3f}" if (values := self._of_seeds[name].get(layout)) else "-"
        row = self._measured.get(layout)
        return "-" if row is None else f"{math.exp(row['objectives'][name]):.2f}"

    def change(self, name: str, layout: str, ablated: str) -> tuple[float, float] | None:
        """Returns by how much `ablated` differs from a layout, and half of the 95 % interval; None: one has none.

        Of a quality, the difference: its noise is that of all layouts together. Of a device, the change as a share.
        """
        if name in self._of_seeds:
            rows = self._of_seeds[name]
            if not (rows.get(layout) and rows.get(ablated)):
                return None
            spread = paired_spread([row for row in rows.values() if row])
            half = spread.sd * math.sqrt(2 / len(rows[layout])) * float(t.ppf(0.975, max(spread.dof, 1)))
            return fmean(rows[ablated].values()) - fmean(rows[layout].values()), half
        if layout not in self._measured or ablated not in self._measured:
            return None
        before, after = (self._measured[each] for each in (layout, ablated))
        change = math.expm1(after["objectives"][name] - before["objectives"][name])
        return change, Z95 * (1 + change) * math.hypot(*(row["noise"].get(name, 0.0) for row in (before, after)))

    def tables(self, layouts: Sequence[str]) -> str:
        """Returns each layout with its ablations, and the mean change of each ablation."""
        names = [*self._of_seeds, *self.devices]
        rows, changes = list[list[str]](), dict[str, list[list[tuple[float, float] | None]]]()
        for layout in layouts:
            if layout not in self._of_seeds["quality"]:
                continue
            rows.append([f"`{layout}`", "as it is", *(self.value(name, layout) for name in names)])
            for ablation, ablated in ablations(layout).items():
                of_pair = [self.change(name, layout, ablated) for name in names]
                rows.append(["", ablation, *map(_changed, names, of_pair)])
                if any(of_pair):
                    changes.setdefault(ablation, []).append(of_pair)
        means = [
            [
                ablation,
                len(pairs),
                *(_mean_change(name, [pair[place] for pair in pairs]) for place, name in enumerate(names)),
            ]
            for ablation, pairs in changes.items()
        ]
        return table(("layout", "", *names), rows) + "\n" + table(("ablation", "layouts", *names), means)


def _having(scale: QualityScale, runs: Mapping[int, Scores]) -> list[int]:
    """Returns the seeds that have every group of quality and recall."""
    return [seed for seed, scores in runs.items() if {*scale.reference, *scale.noisy_recall} <= scores.keys()]


def _changed(name: str, change: tuple[float, float] | None) -> str:
    if change is None:
        return "-"
    return f"{change[0]:+.3f} ± {change[1]:.3f}" if name in QUALITIES else f"{change[0]:+.1%} ± {change[1]:.1%}"


def _mean_change(name: str, changes: Sequence[tuple[float, float] | None]) -> str:
    means = [change[0] for change in changes if change is not None]
    if not means:
        return "-"
    form = "+.3f" if name in QUALITIES else "+.1%"
    return f"{fmean(means):{form}} ({min(means):{form}} to {max(means):{form}})"


def ended(studies: Iterable[Recorded]) -> list[Recorded]:
    """Returns the searches that came to their end."""
    return [study for study in studies if study["side"] in SIDES and study["state"] == StudyState.COMPLETE.value]


def report(studies: Sequence[Recorded], trained: Iterable[Mapping[str, Any]] = ()) -> str:
    """Returns the tables: how far the studies are, losses, the mixers on the front of all, and ablations."""
    searches = []
    for study in studies:
        trials = len([row for row in study["told"] if row["origin"] != "reference"])
        about = (study["side"], study["seed"], study["state"], f"{trials} of {study['trials']}", len(complete(study)))
        searches.append((*about, f"{study.get('elapsed_s', 0.0) / 3600:.1f}"))
    progress = table(("space", "seed", "state", "trials", "complete", "hours"), searches)
    compared = list(filter(complete, ended(studies)))
    if {study["side"] for study in compared} != set(SIDES):
        return progress + "\nNo losses: not every space has a study that ended with a layout within its budgets.\n"
    fronts = Fronts(compared)
    losses = []
    for name, drawn in fronts.losses().items():
        low, middle, high = np.quantile(drawn, (0.025, 0.5, 0.975))
        losses.append((name, f"{middle:.1%} ({low:.1%} to {high:.1%})", f"{np.mean(drawn >= LOSS):.2f}"))
    front = fronts.front()
    mixers = [{mixer.kind for layer in Layout.parse(text).layers for mixer in layer.mixers} for text in front]
    kinds = sorted(set().union(*mixers))
    shares = [(kind, f"{sum(kind in layout for layout in mixers)} of {len(mixers)}") for kind in kinds]
    parts = [
        progress,
        table(("loss of hypervolume", "median, 95 %", f"chance of {LOSS:.0%} or more"), losses),
        table(("mixer", "layouts on the front"), shares),
    ]
    if rows := list(trained):
        parts.append(Ablated(studies, rows).tables(front))
    return "\n".join(parts)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running, ablating, reporting = (commands.add_parser(name) for name in ("run", "ablate", "report"))
    for command in (running, ablating):
        command.add_argument("folder", type=Path, help="of the studies; the same continues them")
    running.add_argument("--base", default=str(BASE), help="name or file of a space")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    running.add_argument("--trials", type=int, default=80, help="of each study, references not counted")
    ablating.add_argument("--members", type=int, default=4, help="layouts of the front, first those that add most")
    ablating.add_argument("--minutes", type=float, default=600.0, help="begin no training after this time")
    reporting.add_argument("folder", type=Path, nargs="?", help="of studies that may not have ended")
    reporting.add_argument("--page", type=Path, help="whose part `mixers` is written")
    for command in (running, ablating, reporting):
        command.add_argument("--table", type=Path, default=RECORDED, help="file of the studies that are recorded")
    options = parser.parse_args()
    try:
        if options.command == "run":
            run(options.folder, options.base, options.seeds, options.trials, options.table)
        elif options.command == "ablate":
            ablate(options.folder, options.members, options.minutes, options.table)
        else:
            studies = load(options.table)
            if options.folder is not None:
                studies = collected(options.folder, planned(studies))
            text = report(studies, trainings(trainings_of(options.table)).values())
            if options.page:
                fill(options.page, "mixers", text)
            else:
                print(text)
    except NasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
