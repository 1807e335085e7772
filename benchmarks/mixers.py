"""Searches with every family of mixers, and with gated short convolutions and attention alone: what do the others add?

    python -m benchmarks.mixers run FOLDER [--base benchmarks/mixers.yaml] [--seeds 0 1 2 3] [--trials 40]     # hours
    python -m benchmarks.mixers again FOLDER [--members 3]                                                     # then
    python -m benchmarks.mixers report [FOLDER] [--page docs/measured/mixers.md]

The first two say how long they take; stopped or killed, they continue with the same command. Searches that are recorded
as complete are not run again, so another machine can continue too, in a folder of its own. `report FOLDER` is of the
searches as they are now.

The LFM2 report (arXiv:2511.23404, section 2) found that the others add nothing. Two spaces are searched with equal
trials: `all`, the base with each of its families of mixers, and `plain`, the same with convolutions and grouped-query
attention alone. Searches of one device and the same figures of the references are a batch: a folder has one until the
device is found faster or slower and calibrated again. Neither space has anchors: those are layouts of the space, and
qualities of two spaces would be of two scales. No two searches have the same seed: those of one seed would draw alike,
and would not be independent.

V of a search is the hypervolume of its complete layouts with quality on fresh seeds, from one corner for all searches.
With several searches of each space the plain one loses

    1 - exp(mean log V(plain) - mean log V(all)).

The means are those of least squares with an effect of each batch. The interval is Student's, with searches as the
independent units, so it holds both the luck of a search and the noise of figures. Decided before the first search: a
chance of 95 % or more of a loss of 1 % or more shows that the others add something, one of 5 % or less that they add
nothing at this resolution; what is between is undecided. The report says how likely searches that differ as much as
these show a true loss of 5 % or 20 %, and take equal spaces for equal.

The report also has what shows whether this answer depends on a choice; none of it decides. Corners are moved in
quality. Figures of the device are those that the search chose layouts by, or a second measurement, of fronts alone,
which is one batch. V after half of the trials and after all is of the quality that the search itself knew, as only
layouts near the last front have fresh seeds. And two searches together, where one of `all` need not find what a plain
one has, lose

    1 - exp(mean log V(plain i + plain k) - mean log V(plain i + all j)).

Pairs share searches, so this interval is the jackknife's over searches, with one degree of freedom less than either
space has searches. The report says, too, how many layouts a model proposed; the others are crossover and mutation.

The loss is that after equal trials: `plain` is a part of `all`, so a search without end could not lose by the larger
space, but one of 40 trials may. Qualities are those of proxies of 64 channels after 65,000 tokens, recall is read from
the front alone, and linear mixers learn fast at first: nothing is concluded about longer trainings.

`again` measures the front of each search a second time, in a study of their own. It takes parts (`ABLATIONS`) out of
those with linear and state mixers that add most to the front of all searches, measures what is left in the same study,
and trains proxies of both on seeds that nothing was chosen by; what the runtime does not carry has no figures of a
device. Studies are in benchmarks/recorded/mixers.json.gz, these trainings in mixers-trainings.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import nct, t  # type: ignore[import-untyped]

from benchmarks.page import table, write_part
from benchmarks.quality.calibration import last_rung
from benchmarks.quality.truth import recorded as trainings
from benchmarks.quality.truth import train_missing
from benchmarks.search.recorded import Recorded, Row, load, recorded, worst_point, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.figures import complete, points, proposed, volume
from benchmarks.study.terms import EHVI, Terms
from nas.cli.options import INTERRUPTED
from nas.core.block import Block
from nas.core.canonical import content_hash
from nas.core.durable import write_durably
from nas.core.errors import CandidateFailed, InvalidInput, NasError
from nas.core.layout import Layout
from nas.core.metrics import METRICS
from nas.core.pareto import contributions, front_mask
from nas.core.quality_config import QualityConfig
from nas.core.stats import Z95, t_critical
from nas.infra.store.rows import StudyState
from nas.model.text.corpus import refer
from nas.search.analysis.record import read_study
from nas.search.proxy.job import TrainJob
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import QualityScale, Scores, fix_scale, paired_spread
from nas.search.spaces import load_space, space_text
from nas.search.study.check import support_filter
from nas.search.study.events import expectations

RECORDED = Path(__file__).parent / "recorded/mixers.json.gz"
BASE = Path(__file__).with_suffix(".yaml")
PLAIN = ("conv", "gqa")
"""Mixers of the plain space."""
SIDES = ("all", "plain")
AGAIN = "again"
"""Side of the study that measures fronts a second time, and ablations."""
QUALITIES = ("quality", "recall")
LOSS = 0.01
_SURE = 0.95
"""Chance at which a loss of `LOSS` or more is shown; what is left at which it is ruled out."""
CORNERS = {"reference point": 0.0, "quality 0.04 nearer": -0.04, "quality 0.06 farther": 0.06}
"""How far the corner of hypervolumes is moved: its quality is attention's less three deviations of a prior."""
_APART = 1000
"""From the seeds of `all` to those of `plain`."""
_FEWEST_OF_PAIRS = 3
"""Searches of each space, of which the jackknife leaves out one."""
_FURTHER = 100
"""From the seeds of fronts to those of ablations."""
_UNTRAINED = 64
"""Steps of the proxies of the study that measures ablations: their quality is not read."""


def _without_taps(block: Block) -> Block:
    taps = {arg.name: 0 for arg in block.spec.args if arg.name in ("conv", "canon")}
    return block.replace(**taps) if taps else block


def _keeps_state(block: Block) -> bool:
    """Returns whether a mixer is neither attention nor a gated short convolution."""
    return block.kind != "conv" and not block.spec.kv_bytes(block.resolve(1024), 1024, 1024, 2.0)


def _attention(block: Block) -> Block:
    """Returns grouped-query attention in place of a sliding window or latent attention."""
    if block.kind not in ("swa", "mla"):
        return block
    heads = block.int("heads")
    if block.kind == "mla":
        return Block.of("gqa", heads=heads, kv_heads=heads // 4)
    return Block.of("gqa", heads=heads, kv_heads=block.int("kv_heads"), canon=block.int("canon"))


_WITHOUT_STATES = "no linear and state mixers"
_CONV = Block.of("conv", kernel=3)
ABLATIONS: dict[str, Callable[[Block], Block | None]] = {
    "no short convolution in other mixers": _without_taps,
    _WITHOUT_STATES: lambda block: None if _keeps_state(block) else block,
    "gated short convolutions for linear and state mixers": lambda block: _CONV if _keeps_state(block) else block,
    "no gated short convolutions": lambda block: None if block.kind == "conv" else block,
    "grouped-query attention for windows and latents": _attention,
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
        "name": f"{base['name']}-{AGAIN}-{content_hash(list(layouts))[:8]}",
        "layouts": list(layouts),
        "objectives": [objective for objective in base["objectives"] if METRICS[objective["metric"]].source != "proxy"],
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
    """Returns the studies as far as they are.

    To what tables keep, each adds its `side`; `devices`; `references`, name -> objective -> value in its own unit;
    `modelled`, the number of layouts that were proposed with a model; layouts of `fresh` quality; and `searched`,
    layout -> quality of the top rung by the seeds of the search, negative as in objectives.
    """
    studies: list[Recorded] = []
    for terms in planned:
        more: dict[str, Any] = {"side": terms.side, "trials": terms.trials}
        if (whole := campaigns[terms.side].report(terms)) is None:
            studies.append(more | {"study": terms.study, "seed": terms.seed, "state": "not begun", "told": []})
            continue
        with campaigns[terms.side].store() as store:
            record = read_study(store, terms.study)
        top, trials = record.space.quality.rungs[-1].name, record.records.values()
        more |= {
            "devices": sorted({device.id for device in record.log.devices}),
            "references": {row["name"]: row["objectives"] for row in whole["references"]},
            "modelled": sum(forecast.gain is not None for forecast in expectations(record.log.notes).values()),
            "fresh": sorted(row["layout"] for row in whole["ranking"] if row["rescored"]),
            "searched": {trial.layout.format(): -trial.rungs[top].value for trial in trials if top in trial.rungs},
        }
        studies.append(recorded(whole, engine=EHVI, **more))
    return studies


def planned(studies: Iterable[Recorded]) -> list[Terms]:
    """Returns the terms of recorded searches."""
    return [Terms(EHVI, study["seed"], study["trials"], study["side"]) for study in studies if study["side"] in SIDES]


def terms_of(seeds: Iterable[int], trials: int) -> list[Terms]:
    """Returns a search of each space for each of `seeds`; they take turns in going first, as machines drift."""
    return [
        Terms(EHVI, seed + _APART * (side == "plain"), trials, side)
        for turn, seed in enumerate(seeds)
        for side in (SIDES, SIDES[::-1])[turn % 2]
    ]


def run(folder: Path, base: str, seeds: Sequence[int], trials: int, path: Path = RECORDED) -> None:
    """Searches both spaces once for each seed, but what is recorded as complete; records each that has ended."""
    content = yaml.safe_load(space_text(base))
    campaigns = {side: campaign(folder, side, space(content, side)) for side in SIDES}
    before = load(path) if path.is_file() else []
    complete = {study["study"]: study for study in complete_searches(before) if study["trials"] == trials}
    all_terms = terms_of(seeds, trials)
    waiting = [terms for terms in all_terms if terms.study not in complete]
    for side, searches in campaigns.items():
        searches.tell([terms for terms in waiting if terms.side == side])

    def record() -> None:
        studies = complete | {study["study"]: study for study in collected(campaigns, waiting)}
        others = [study for study in before if study["side"] not in SIDES]
        write([*(studies[terms.study] for terms in all_terms), *others], path)

    record()
    for terms in waiting:
        campaigns[terms.side].run([terms])
        record()


def again(folder: Path, members: int, minutes: float, path: Path = RECORDED) -> None:
    """Measures the front of each search a second time, measures and trains ablations of the best; records all.

    Raises:
        InvalidInput: the searches have not ended, or no layout has fresh seeds.
    """
    searches = [study for study in load(path) if study["side"] in SIDES]
    if waiting := len(searches) - len(complete_searches(searches)):
        raise InvalidInput(f"{waiting} of {len(searches)} searches have not ended: `run` continues them")
    layouts = [*chain.from_iterable(front([study]) for study in searches)]
    if not layouts:
        raise InvalidInput("nothing to measure again: no layout has quality on fresh seeds")
    whole = [layout for layout in front(searches) if _WITHOUT_STATES in ablations(layout)][:members]
    ablated = [*chain.from_iterable(ablations(layout).values() for layout in whole)]
    base = load_space(folder / "all.yaml")
    carried = support_filter(base)
    listed = [layout for layout in dict.fromkeys([*layouts, *ablated]) if carried(Layout.parse(layout))]
    content = measuring(yaml.safe_load((folder / "all.yaml").read_text()), listed)
    campaigns = {AGAIN: campaign(folder, content["name"], content, content["name"])}
    terms = Terms(EHVI, 0, len(listed), AGAIN)
    campaigns[AGAIN].run([terms])
    (measured,) = collected(campaigns, [terms])
    write([*searches, {**measured, "whole": whole}], path)
    trained = dict.fromkeys([_published(searches), *whole, *ablated] if whole else [])
    ends = time.monotonic() + 60 * minutes
    for done, layout in enumerate(trained):
        print(f"trainings of {done} of {len(trained)} layouts", file=sys.stderr, flush=True)
        try:
            rest = (ends - time.monotonic()) / 60
            jobs = {job.key: (layout, job) for job in _jobs(base.quality, layout, folder)}
            train_missing(jobs, trainings_of(path), rest)
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


def fresh(study: Recorded) -> list[Row]:
    """Returns the complete layouts of a search that have quality on fresh seeds."""
    layouts = study.get("fresh")
    return [row for row in complete(study) if layouts is None or row["layout"] in layouts]


def front(searches: Sequence[Recorded]) -> list[str]:
    """Returns the layouts on the front of all searches, first those that add most hypervolume."""
    corner = worst_point(searches)
    rows = {row["layout"]: row for study in searches for row in fresh(study)}
    if not rows:
        return []
    at, layouts = np.array(points(rows.values(), corner)), list(rows)
    inside = np.flatnonzero(front_mask(at))
    adds = contributions(at[inside], [*corner.values()])
    return [layouts[place] for place in inside[np.argsort(-np.array(adds), kind="stable")]]


def searched(study: Recorded, trials: int) -> list[Row]:
    """Returns the layouts of the first `trials` proposals that are complete in the end, with the search's quality."""
    qualities = study.get("searched", {})
    return [
        {**row, "objectives": {**row["objectives"], "quality": qualities[row["layout"]]}}
        for row in complete({"told": proposed(study)[:trials]})
        if row["layout"] in qualities
    ]


def measured_again(searches: Sequence[Recorded], second: Recorded) -> list[Recorded]:
    """Returns searches with the figures of a second measurement; layouts without them are left out.

    It is one study, so they are one batch.
    """
    figures = {row["layout"]: row["objectives"] for row in complete(second)}
    batch = {key: second.get(key) for key in ("devices", "references")}
    return [
        {
            **study,
            **batch,
            "told": [
                {**row, "objectives": {**row["objectives"], **figures[row["layout"]]}}
                for row in study["told"]
                if row["layout"] in figures
            ],
        }
        for study in searches
    ]


class Volume(NamedTuple):
    """Hypervolume of a search of a batch and a side."""

    batch: str
    side: str
    value: float


def batch_of(study: Recorded) -> str:
    """Returns what searches of a database have and no others, until the device is calibrated again."""
    return json.dumps([study.get("devices"), study.get("references")], sort_keys=True)


def volumes(searches: Sequence[Recorded], shift: float = 0.0, trials: int | None = None) -> list[Volume]:
    """Returns the hypervolumes of searches, from one corner, which is relative to the batch's published reference.

    Args:
        searches: that have ended.
        shift: of the corner's quality, which is negative as all that is better when greater.
        trials: of so many proposals alone, with the quality that the search knew; None: of all, on fresh seeds.

    Raises:
        InvalidInput: a search has no layout inside of the corner.
    """
    inside, corner = list[Volume](), worst_point(searches) if searches else {}
    for study in searches:
        rows = fresh(study) if trials is None else searched(study, trials)
        value = volume(rows, {**corner, "quality": corner["quality"] + shift})
        if not value:
            raise InvalidInput(f"{study['study']}: no layout is better than the corner of hypervolumes in everything")
        inside.append(Volume(batch_of(study), study["side"], value))
    return inside


def pairs(searches: Sequence[Recorded]) -> NDArray[np.float64]:
    """Returns [S, S] the hypervolume of two searches together on fresh seeds, those of `plain` first.

    Raises:
        InvalidInput: the searches are of several batches.
    """
    if len({*map(batch_of, searches)}) > 1:
        raise InvalidInput("searches of several batches")
    corner = worst_point(searches)
    rows = [fresh(study) for side in ("plain", "all") for study in searches if study["side"] == side]
    return np.array([[volume([*one, *other], corner) for other in rows] for one in rows])


class Loss(NamedTuple):
    """What the plain space loses of hypervolume.

    Args:
        value: the loss.
        low: end of the 95 % interval.
        high: the other end.
        chance: that it is `LOSS` or more, by Student's distribution: the posterior where the mean difference and the
            logarithm of the standard deviation have flat priors.
        deals: the share of all ways to deal the searches of both sides to two that lose as much as these, or more.
        error: standard error of the difference of logarithms.
        dof: its degrees of freedom.
    """

    value: float
    low: float
    high: float
    chance: float
    deals: float
    error: float
    dof: int

    @staticmethod
    def of(volumes: Sequence[Volume]) -> Loss:
        """Returns the loss of hypervolumes by least squares with an effect of each batch.

        Raises:
            InvalidInput: no batch has searches of both sides, or one alone has, with one of each.
        """
        batch = np.array([search.batch for search in volumes])
        within = batch[:, None] == batch
        centre = np.eye(len(volumes)) - within / within.sum(1)  # takes the batch's mean from each
        logs = centre @ np.log([search.value for search in volumes])
        plain = np.array([search.side == "plain" for search in volumes])
        dof, weight = len(volumes) - len(set(batch)) - 1, float(plain @ centre @ plain)
        if dof < 1 or not weight:
            raise InvalidInput("it takes two searches of each space in one batch, or one of each in two batches")
        value = float(plain @ logs) / weight
        error = math.sqrt(float(np.sum((logs - centre @ plain * value) ** 2)) / dof / weight)
        places = [np.flatnonzero(batch == name) for name in dict.fromkeys(batch)]
        groups = product(*(combinations(of_batch, int(plain[of_batch].sum())) for of_batch in places))
        deals = [float(sum(logs[[*chain.from_iterable(group)]])) / weight for group in groups]
        return Loss._of(value, deals, error, dof)

    @staticmethod
    def of_pairs(volumes: NDArray[np.float64], plain: int) -> Loss:
        """Returns the loss of a plain search with a second plain one in place of one of `all`.

        Args:
            volumes: [S, S] as of `pairs`; the diagonal is not read.
            plain: number of searches of that side, which come first.

        Raises:
            InvalidInput: a side has fewer than three searches, or two have no layout inside of the corner.
        """
        count = len(volumes)
        if min(plain, count - plain) < _FEWEST_OF_PAIRS:
            raise InvalidInput(f"fewer than {_FEWEST_OF_PAIRS} searches of a space")
        if not (volumes + np.eye(count)).all():
            raise InvalidInput("two searches have no layout that is better than the corner in everything")
        logs = np.log(volumes + np.eye(count))

        def difference(group: Sequence[int], others: Sequence[int]) -> float:
            within = fmean(logs[one, other] for one, other in combinations(group, 2))
            return within - float(logs[np.ix_(group, others)].mean())

        sides, variance = (range(plain), range(plain, count)), 0.0
        for side in sides:
            without = [
                difference(*([place for place in group if place != absent] for group in sides)) for absent in side
            ]
            variance += float(np.var(without)) * (len(side) - 1)
        deals = [
            difference(group, [place for place in range(count) if place not in group])
            for group in combinations(range(count), plain)
        ]
        return Loss._of(deals[0], deals, math.sqrt(variance), min(map(len, sides)) - 1)

    @staticmethod
    def _of(log_difference: float, deals: Sequence[float], error: float, dof: int) -> Loss:
        """Returns the loss of a difference of logarithms, and the same of all ways to deal searches to sides."""
        half = t_critical(0.95, dof) * error
        low, value, high = (-math.expm1(log_difference + off) for off in (half, 0.0, -half))
        chance = float(t.cdf((math.log1p(-LOSS) - log_difference) / error, dof)) if error else float(value >= LOSS)
        return Loss(value, low, high, chance, float(np.mean(np.array(deals) <= log_difference + 1e-12)), error, dof)

    def decided(self, true: float) -> tuple[float, float]:
        """Returns how likely such searches show that others add something, and nothing, if `true` is what plain loses.

        The statistic has a noncentral t distribution.
        """
        distance, bound = (math.log1p(-LOSS) - math.log1p(-true)) / self.error, t.ppf(_SURE, self.dof)
        return float(nct.sf(bound, self.dof, distance)), float(nct.cdf(-bound, self.dof, distance))


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
        self._measured = {row["layout"]: row for study in studies if study["side"] == AGAIN for row in complete(study)}
        self.devices = sorted({name for row in self._measured.values() for name in row["objectives"]})
        self._of_seeds: dict[str, dict[str, Mapping[int, float]]] = {name: {} for name in QUALITIES}
        if (reference := runs.pop(_published(studies), None)) is None:
            return
        whole = set.intersection(*map(set, reference.values()))  # others are trained with some of the seeds, for recall
        everywhere = {seed: {group: scores[group] for group in whole} for seed, scores in reference.items()}
        scale = fix_scale("long", everywhere, minimum=QualityConfig().min_reference).rescored(reference)
        for layout, scores in runs.items():
            if len(qualities := scale.per_seed(scores)) == len(reference):
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
            half = spread.sd * math.sqrt(2 / len(rows[layout])) * t_critical(0.95, max(int(spread.dof), 1))
            return fmean(rows[ablated].values()) - fmean(rows[layout].values()), half
        if layout not in self._measured or ablated not in self._measured:
            return None
        before, after = (self._measured[key] for key in (layout, ablated))
        change = math.expm1(after["objectives"][name] - before["objectives"][name])
        return change, Z95 * (1 + change) * math.hypot(*(row["noise"].get(name, 0.0) for row in (before, after)))

    def tables(self, layouts: Sequence[str]) -> str:
        """Returns each layout with its ablations, and the mean change of each ablation over layouts."""
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
    means = [change for change in changes if change is not None]
    half = math.hypot(*(half for _, half in means)) / max(len(means), 1)
    return _changed(name, (fmean(value for value, _ in means), half) if means else None)


def complete_searches(studies: Iterable[Recorded]) -> list[Recorded]:
    """Returns the searches that came to their end."""
    return [study for study in studies if study["side"] in SIDES and study["state"] == StudyState.COMPLETE.value]


def report(studies: Sequence[Recorded], trained: Iterable[Mapping[str, Any]] = ()) -> str:
    """Returns what is estimated, losses and the answer, how far studies are, mixers on the front, and ablations."""
    trials = {study["trials"] for study in studies if study["side"] in SIDES}
    marks = sorted({count for of_study in trials for count in (of_study // 2, of_study)})
    compared = complete_searches(studies)
    progress = _progress(studies, marks, compared)
    try:
        Loss.of([Volume(batch_of(study), study["side"], 1.0) for study in compared])
    except InvalidInput as error:
        return f"{progress}\nNo losses: {error}.\n"
    layouts = front(compared)
    mixers = [{mixer.kind for layer in Layout.parse(text).layers for mixer in layer.mixers} for text in layouts]
    kinds = sorted(set().union(*mixers))
    shares = [(kind, f"{sum(kind in layout for layout in mixers)} of {len(mixers)}") for kind in kinds]
    parts = [
        f"Estimated: what share of its hypervolume V a search of {max(trials)} trials by {EHVI} loses where mixers are"
        f" {' and '.join(PLAIN)} alone: 1 less the ratio of the geometric means of V over the searches of both spaces"
        f" (batches: {len({*map(batch_of, compared)})}). Quality is that of small proxies.\n",
        _losses(compared, marks, next((study for study in studies if study["side"] == AGAIN), None)),
        progress,
        table(("mixer", "layouts on the front of all"), shares),
    ]
    if (rows := list(trained)) and (measured := [study for study in studies if study["side"] == AGAIN]):
        parts.append(Ablated(studies, rows).tables(measured[0]["whole"]))
    return "\n".join(parts)


def _progress(studies: Sequence[Recorded], marks: Sequence[int], compared: Sequence[Recorded]) -> str:
    """Returns a row for each study: how far it is, and its hypervolumes where it is compared."""
    corner, rows = worst_point(compared) if compared else {}, list[tuple[object, ...]]()
    batches = list(dict.fromkeys(map(batch_of, studies)))
    for study in studies:
        sets = [*(searched(study, mark) for mark in marks), fresh(study)]
        volumes = [f"{volume(layouts, corner):.4g}" if study in compared else "-" for layouts in sets]
        trials = f"{len(proposed(study))} of {study['trials']}"
        counts = (trials, study.get("modelled", "-"), len(complete(study)))
        hours = f"{study.get('elapsed_s', 0.0) / 3600:.1f}"
        batch = batches.index(batch_of(study)) + 1 if study.get("devices") else "-"
        rows.append((study["side"], study["seed"], batch, study["state"], *counts, *volumes, hours))
    heads = (*(f"V after {mark}" for mark in marks), "V, fresh seeds")
    return table(("space", "seed", "batch", "state", "trials", "by a model", "complete", *heads, "hours"), rows)


def _losses(compared: Sequence[Recorded], marks: Sequence[int], second: Recorded | None) -> str:
    """Returns the answer by the rule above, which the first row decides, and a row for each way to compute the loss."""
    plain = sum(study["side"] == "plain" for study in compared)
    ways: dict[str, Callable[[], Loss]] = {
        f"fresh seeds, corner: {name}": partial(_loss, compared, shift) for name, shift in CORNERS.items()
    }
    if second is not None:
        studies = measured_again(compared, second)
        ways["fresh seeds, measured again"] = partial(_loss, studies)
        ways["fresh seeds, measured again, two searches together"] = lambda: Loss.of_pairs(pairs(studies), plain)
    ways |= {f"the search's seeds, first {mark} trials": partial(_loss, compared, 0.0, mark) for mark in marks}
    ways["fresh seeds, two searches together"] = lambda: Loss.of_pairs(pairs(compared), plain)
    answer, power, rows = "undecided", "", list[tuple[str, ...]]()
    for name, compute in ways.items():
        try:
            loss = compute()
        except InvalidInput as error:
            rows.append((name, str(error), "-", "-"))
            continue
        if not rows and max(loss.chance, 1 - loss.chance) >= _SURE:
            answer = f"the other mixers add {'something' if loss.chance >= _SURE else 'nothing at this resolution'}"
        if not rows and loss.error:
            small, large = (loss.decided(true)[0] for true in (0.05, 0.2))
            power = (
                f" Searches that differ as much as these show a true loss of 5 % in {small:.0%} of cases, one of 20 %"
                f" in {large:.0%}; of equal spaces they show in {loss.decided(0.0)[1]:.0%} that others add nothing."
            )
        interval = f"{loss.value:.1%} ({loss.low:.1%} to {loss.high:.1%})"
        rows.append((name, interval, f"{loss.chance:.3f}", f"{loss.deals:.3f}"))
    head = ("V by", "loss of hypervolume (95 %)", f"chance of {LOSS:.0%} or more", "deals that lose as much")
    return f"Answer, by the first row: {answer}.{power}\n\n{table(head, rows)}"


def _loss(compared: Sequence[Recorded], shift: float = 0.0, trials: int | None = None) -> Loss:
    return Loss.of(volumes(compared, shift, trials))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running, measuring_again, reporting = (commands.add_parser(name) for name in ("run", "again", "report"))
    for command in (running, measuring_again):
        command.add_argument("folder", type=Path, help="of the studies; the same continues them")
    running.add_argument("--base", default=str(BASE), help="name or file of a space")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    running.add_argument("--trials", type=int, default=40, help="of each study, references not counted")
    measuring_again.add_argument("--members", type=int, default=3, help="ablated layouts, first those that add most")
    measuring_again.add_argument("--minutes", type=float, default=600.0, help="begin no training after this time")
    reporting.add_argument("folder", type=Path, nargs="?", help="of studies that may not have ended")
    reporting.add_argument("--page", type=Path, help="whose part `mixers` is written")
    for command in (running, measuring_again, reporting):
        command.add_argument("--table", type=Path, default=RECORDED, help="file of the studies that are recorded")
    options = parser.parse_args()
    try:
        if options.command == "run":
            run(options.folder, options.base, options.seeds, options.trials, options.table)
        elif options.command == "again":
            again(options.folder, options.members, options.minutes, options.table)
        else:
            studies = load(options.table)
            if options.folder is not None:
                campaigns = {side: campaign(options.folder, side) for side in SIDES}
                ablated = [study for study in studies if study["side"] == AGAIN]
                studies = [*collected(campaigns, planned(studies)), *ablated]
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
