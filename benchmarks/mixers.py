"""Searches with every family of mixers, and with gated short convolutions and attention alone: what do the others add?

    python -m benchmarks.mixers run FOLDER [--base benchmarks/mixers.yaml] [--seeds 0 1] [--trials 80]     # hours
    python -m benchmarks.mixers confirm FOLDER [--members 3]                                               # then
    python -m benchmarks.mixers report [FOLDER] [--page docs/measured/mixers.md]

The first two say how long they take; stopped or killed, they continue with the same command. `report FOLDER` is of the
searches as they are now.

The LFM2 report (arXiv:2511.23404, section 2) found that the others add nothing. Two spaces are searched with equal
trials and seeds, in one database, so that both have the same figures of the references: `all`, the base with each of
its families of mixers, and `plain`, the same with convolutions and grouped-query attention alone. Neither has anchors:
those are layouts of the space, and qualities of two spaces would be of two scales.

`confirm` measures the layouts on the front of either space once more, side by side, in a study of their own; and takes
parts (`ABLATIONS`) out of those that add most. Proxies of these and of what is left are trained on seeds that nothing
was chosen by; what the runtime does not carry has no figures of a device. Studies are in
benchmarks/recorded/mixers.json.gz, these trainings in mixers-trainings.jsonl.

The plain space loses

    1 - V(plain) / V(all)

of hypervolume, of layouts with quality on fresh seeds and the later figures of the device. Its interval is a basic
bootstrap of the objectives' noise, and too narrow: stated at 95 %, it holds the true loss in 85 % of simulations. What
the luck of a search makes is shown by the same of one seed and another of a space, and of seeds of both spaces dealt to
two sides. `all` contains `plain` but has to find it, so of all layouts
together, whoever proposed them, those without other families are compared with all, too.
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

from benchmarks.page import table, write_part
from benchmarks.quality.calibration import last_rung
from benchmarks.quality.truth import recorded as trainings
from benchmarks.quality.truth import train_missing
from benchmarks.search.recorded import Recorded, load, recorded, worst_point, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.figures import complete
from benchmarks.study.terms import OURS, Terms
from nas.cli.options import INTERRUPTED
from nas.core.block import Block
from nas.core.canonical import content_hash
from nas.core.durable import write_durably
from nas.core.errors import CandidateFailed, InvalidInput, NasError
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.pareto import contributions, front_mask, hypervolume
from nas.core.quality_config import QualityConfig
from nas.core.stats import Z95
from nas.infra.store.rows import StudyState
from nas.model.text.corpus import refer
from nas.search.analysis.record import read_study
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
CONFIRMED = "confirmed"
"""Side of the study that measures fronts again, and ablations."""
QUALITIES = ("quality", "recall")
LOSS = 0.01
DRAWS = 2000
_FURTHER = 100
"""From the seeds of fronts to those of ablations."""
_UNTRAINED = 64
"""Steps of the proxies of the study that measures ablations: their quality is not read."""

Floats = NDArray[np.float64]


def _is_plain(layout: str) -> bool:
    return all(mixer.kind in PLAIN for layer in Layout.parse(layout).layers for mixer in layer.mixers)


def _without_taps(block: Block) -> Block:
    taps = {arg.name: 0 for arg in block.spec.args if arg.name in ("conv", "canon")}
    return block.replace(**taps) if taps else block


def _keeps_state(block: Block) -> bool:
    """Returns whether a mixer is neither attention nor a gated short convolution."""
    return block.kind != "conv" and not block.spec.kv_bytes(block.resolve(1024), 1024, 1024, 2.0)


_WITHOUT_STATES = "no linear and state mixers"
_CONV = Block.of("conv", kernel=3)
ABLATIONS: dict[str, Callable[[Block], Block | None]] = {
    "no short convolution in other mixers": _without_taps,
    _WITHOUT_STATES: lambda block: None if _keeps_state(block) else block,
    "gated short convolutions for linear and state mixers": lambda block: _CONV if _keeps_state(block) else block,
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
        "name": f"{base['name']}-{CONFIRMED}-{content_hash(list(layouts))[:8]}",
        "layouts": list(layouts),
        "objectives": [each for each in base["objectives"] if METRICS[each["metric"]].source != "proxy"],
        "quality": {"rungs": [{"name": "untrained", "lm_steps": _UNTRAINED}], "min_reference": 1e-6},
        "protocol": {**base.get("protocol", {}), "remeasure": None},
    }


def campaign(folder: Path, name: str, content: Mapping[str, Any] | None = None, home: str = "searches") -> Campaign:
    """Returns the studies of the space `name`; its file is written once, so that days later it is still the same.

    Raises:
        InvalidInput: the folder has studies of another base.
    """
    path = folder.resolve() / f"{name}.yaml"
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            write_durably(path, yaml.safe_dump(dict(content), sort_keys=False).encode())
        elif (before := yaml.safe_load(path.read_text())["name"]) != content["name"]:
            raise InvalidInput(f"{path} is {before}, not {content['name']}: name another folder")
    return Campaign(path.parent / home, str(path), lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True))


def collected(campaigns: Mapping[str, Campaign], planned: Sequence[Terms]) -> list[Recorded]:
    """Returns the studies as far as they are, each with its `side`, layouts of `fresh` quality and `devices`."""
    studies = []
    for terms in planned:
        more = {"side": terms.side, "trials": terms.trials}
        if (found := campaigns[terms.side].report(terms)) is None:
            studies.append(more | {"study": terms.study, "seed": terms.seed, "state": "not begun", "told": []})
        else:
            more["fresh"] = sorted(row["layout"] for row in found["ranking"] if row["rescored"])
            with campaigns[terms.side].store() as store:
                more["devices"] = sorted(device.id for device in read_study(store, terms.study).log.devices)
            studies.append(recorded(found, engine=OURS, **more))
    return studies


def planned(studies: Iterable[Recorded]) -> list[Terms]:
    """Returns the terms of recorded searches."""
    return [Terms(OURS, study["seed"], study["trials"], study["side"]) for study in studies if study["side"] in SIDES]


def run(folder: Path, base: str, seeds: Sequence[int], trials: int, path: Path = RECORDED) -> None:
    """Searches both spaces with each seed; records the studies as far as they are whenever one has ended."""
    content = yaml.safe_load(space_text(base))
    campaigns = {side: campaign(folder, side, space(content, side)) for side in SIDES}
    all_terms = [Terms(OURS, seed, trials, side) for seed in seeds for side in SIDES]
    for side, searches in campaigns.items():
        searches.tell([terms for terms in all_terms if terms.side == side])
    write(collected(campaigns, all_terms), path)
    for terms in all_terms:
        campaigns[terms.side].run([terms])
        write(collected(campaigns, all_terms), path)


def confirm(folder: Path, members: int, minutes: float, path: Path = RECORDED) -> None:
    """Measures the fronts again beside ablations of their best layouts, and trains these; records both.

    Raises:
        InvalidInput: the searches have not ended.
    """
    searches = [study for study in load(path) if study["side"] in SIDES]
    if waiting := len(searches) - len(ended(searches)):
        raise InvalidInput(f"{waiting} of {len(searches)} searches have not ended: `run` continues them")
    fronts = Fronts(searches)
    hybrids = [layout for layout in fronts.front() if _WITHOUT_STATES in ablations(layout)]
    whole = (hybrids or fronts.front())[:members]
    ablated = [*chain.from_iterable(ablations(layout).values() for layout in whole)]
    base = load_space(folder / "all.yaml")
    carried = support_filter(base)
    layouts = dict.fromkeys([*chain.from_iterable(map(fronts.front, SIDES)), *whole, *ablated])
    listed = [layout for layout in layouts if carried(Layout.parse(layout))]
    content = measuring(yaml.safe_load((folder / "all.yaml").read_text()), listed)
    campaigns = {CONFIRMED: campaign(folder, content["name"], content, content["name"])}
    terms = Terms(OURS, 0, len(listed), CONFIRMED)
    campaigns[CONFIRMED].run([terms])
    write([*searches, *collected(campaigns, [terms])], path)
    jobs = {layout: _jobs(base.quality, layout, folder) for layout in (_published(searches), *whole, *ablated)}
    for done, (layout, of_layout) in enumerate(jobs.items()):
        print(f"trainings of {done} of {len(jobs)} layouts", file=sys.stderr, flush=True)
        try:
            train_missing({job.key: (layout, job) for job in of_layout}, trainings_of(path), minutes)
        except CandidateFailed as error:
            print(f"{layout}: {error}", file=sys.stderr)


def _jobs(config: QualityConfig, layout: str, folder: Path) -> list[TrainJob]:
    """Returns the trainings of the last rung, with other seeds than those of fronts, which chose the layouts."""
    jobs = rung_jobs(last_rung(config.rescored), 0, Layout.parse(layout), refer(config.corpus, folder))
    return [job.model_copy(update={"seed": job.seed + _FURTHER}) for job in jobs]


def _published(studies: Sequence[Recorded]) -> str:
    return str(next(row["layout"] for row in studies[0]["told"] if row["origin"] == "reference"))


def trainings_of(path: Path) -> Path:
    """Returns the file of the ablations' trainings beside that of the studies."""
    return path.with_name(path.name.partition(".")[0] + "-trainings.jsonl")


class Fronts:
    """Layouts with quality on fresh seeds, as points with noise; figures of a device are the later ones, if there are.

    Args:
        studies: each with its `side`; of the searches, those that have ended.

    Raises:
        InvalidInput: they are of several devices.
    """

    def __init__(self, studies: Sequence[Recorded]) -> None:
        if len(devices := {*chain.from_iterable(study.get("devices", ()) for study in studies)}) > 1:
            raise InvalidInput(f"studies of several devices cannot be compared: {', '.join(sorted(devices))}")
        again = {row["layout"]: row for study in studies if study["side"] == CONFIRMED for row in complete(study)}
        searches = [study for study in studies if study["side"] in SIDES]
        corner = worst_point(searches)
        rows: dict[str, Mapping[str, Any]] = {}
        self._sides: dict[str, list[list[int]]] = {side: [] for side in SIDES}
        for study in searches:
            fresh = study.get("fresh") or [row["layout"] for row in complete(study)]
            of_study = [row for row in complete(study) if row["layout"] in fresh]
            of_study = [row for row in of_study if not again or row["layout"] in again]
            for row in of_study:
                rows.setdefault(row["layout"], row)
            places = {layout: place for place, layout in enumerate(rows)}
            self._sides[study["side"]].append([places[row["layout"]] for row in of_study])
        self.layouts = list(rows)
        self._corner = np.array(list(corner.values()))

        def table_of(key: str) -> Floats:
            merged = [{**row.get(key, {}), **again.get(layout, {}).get(key, {})} for layout, row in rows.items()]
            return np.array([[row.get(name, 0.0) for name in corner] for row in merged])

        self._points, self._sd = table_of("objectives"), table_of("noise")

    def pairs(self) -> dict[str, tuple[list[int], list[int]]]:
        """Returns the sets of layouts that are compared: what the first lose to the second."""
        sides = {name: sorted({*chain.from_iterable(studies)}) for name, studies in self._sides.items()}
        everything = list(range(len(self.layouts)))
        without = [place for place in everything if _is_plain(self.layouts[place])]
        pairs = {
            "`plain`, to `all`": (sides["plain"], sides["all"]),
            "layouts without other families, to all layouts": (without, everything),
        }
        for name, studies in self._sides.items():
            if len(studies) == 2:
                pairs[f"luck: `{name}`, one seed to the other"] = (studies[0], studies[1])
        if all(len(studies) == 2 for studies in self._sides.values()):
            (a, b), (c, d) = self._sides["plain"], self._sides["all"]
            for first, second in ((a + c, b + d), (a + d, b + c)):
                pairs[f"luck: one seed of each, to the others ({len(pairs) - 3})"] = (first, second)
        return {name: pair for name, pair in pairs.items() if all(pair)}

    def losses(self, draws: int = DRAWS) -> dict[str, tuple[float, Floats]]:
        """Returns for each pair the loss, and draws of it by a basic bootstrap of the noise."""
        generator, pairs = np.random.default_rng(0), self.pairs()
        losses = {name: self._loss(self._points, *pair) for name, pair in pairs.items()}
        drawn: dict[str, list[float]] = {name: [] for name in pairs}
        for _ in range(draws):
            points = self._points + generator.standard_normal(self._points.shape) * self._sd
            for name, pair in pairs.items():
                drawn[name].append(2 * losses[name] - self._loss(points, *pair))
        return {name: (loss, np.array(drawn[name])) for name, loss in losses.items()}

    def _loss(self, points: Floats, part: Sequence[int], other: Sequence[int]) -> float:
        return 1 - hypervolume(points[part], self._corner) / hypervolume(points[other], self._corner)

    def front(self, side: str = "") -> list[str]:
        """Returns the layouts on the front of a side, or of all studies, first those that add most hypervolume."""
        places = sorted({*chain.from_iterable(self._sides[side])}) if side else range(len(self.layouts))
        inside = np.array(places)[front_mask(self._points[places])]
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
            row["layout"]: row for study in studies if study["side"] == CONFIRMED for row in complete(study)
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
    if {study["side"] for study in compared} != {*SIDES}:
        return progress + "\nNo losses: not every space has a study that ended with a layout within its budgets.\n"
    fronts = Fronts([*compared, *(study for study in studies if study["side"] == CONFIRMED)])
    losses = []
    for name, (loss, drawn) in fronts.losses().items():
        low, high = np.quantile(drawn, (0.025, 0.975))
        losses.append((name, f"{loss:.1%} ({low:.1%} to {high:.1%})", f"{np.mean(drawn >= LOSS):.2f}"))
    front = fronts.front()
    mixers = [{mixer.kind for layer in Layout.parse(text).layers for mixer in layer.mixers} for text in front]
    kinds = sorted(set().union(*mixers))
    shares = [(kind, f"{sum(kind in layout for layout in mixers)} of {len(mixers)}") for kind in kinds]
    parts = [
        progress,
        table(("loss of hypervolume", "95 % interval of noise", f"share of draws of {LOSS:.0%} or more"), losses),
        table(("mixer", "layouts on the front"), shares),
    ]
    if rows := list(trained):
        parts.append(Ablated(studies, rows).tables(front))
    return "\n".join(parts)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running, confirming, reporting = (commands.add_parser(name) for name in ("run", "confirm", "report"))
    for command in (running, confirming):
        command.add_argument("folder", type=Path, help="of the studies; the same continues them")
    running.add_argument("--base", default=str(BASE), help="name or file of a space")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    running.add_argument("--trials", type=int, default=80, help="of each study, references not counted")
    confirming.add_argument("--members", type=int, default=3, help="ablated layouts, first those that add most")
    confirming.add_argument("--minutes", type=float, default=600.0, help="begin no training after this time")
    reporting.add_argument("folder", type=Path, nargs="?", help="of studies that may not have ended")
    reporting.add_argument("--page", type=Path, help="whose part `mixers` is written")
    for command in (running, confirming, reporting):
        command.add_argument("--table", type=Path, default=RECORDED, help="file of the studies that are recorded")
    options = parser.parse_args()
    try:
        if options.command == "run":
            run(options.folder, options.base, options.seeds, options.trials, options.table)
        elif options.command == "confirm":
            confirm(options.folder, options.members, options.minutes, options.table)
        else:
            studies = load(options.table)
            if options.folder is not None:
                campaigns = {side: campaign(options.folder, side) for side in SIDES}
                confirmed = [study for study in studies if study["side"] == CONFIRMED]
                studies = [*collected(campaigns, planned(studies)), *confirmed]
            text = report(studies, trainings(trainings_of(options.table)).values())
            write_part(options.page, "mixers", text)
    except NasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
