"""Calibration: does a space's quality order layouts as longer trainings with fresh seeds do?

    python -m benchmarks.quality.calibration name                         prints the layouts
    python -m benchmarks.quality.calibration run [--minutes M]            trains what is missing
    python -m benchmarks.quality.calibration report [--page docs/measured/truth.md]

Layouts are drawn before anything is trained: in turn one from the front of the recorded study and a random one of the
space. Each is scored by the space's own protocol (the trainings of its last rung, on the scale that the space's anchors
give), and trained `--times` as long with `--seeds` fresh seeds; both scores have the same groups and weights. The
published reference is trained alike, since quality is relative to it. One training is one line of `RECORDED`, under its
result key, layout after layout: the script may be stopped at any moment, and the report is of the layouts that are
complete.

Kendall's tau is 1 where both order all pairs alike and -1 where they reverse all. Its ceiling is the tau that would be
seen if layouts differed from each other by the same amounts without noise, and the noise of both scores' seeds alone
reordered them. Intervals are of a bootstrap over layouts and long seeds; the protocol's own seeds are fixed by it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.page import markdown, write_part
from benchmarks.quality.truth import recorded, train_missing
from benchmarks.search.recorded import Recorded, load
from nas.core.layout import Layout
from nas.core.pareto import front_mask
from nas.core.quality_config import QualityConfig
from nas.core.space import SearchSpace
from nas.model.text.corpus import CorpusRef, refer
from nas.search.proposers import Sampler
from nas.search.proxy.job import TrainJob, TrainResult
from nas.search.proxy.ladder import rung_jobs, seed_counts, seed_scores
from nas.search.proxy.quality import Anchors, QualityScale, fix_scale, paired_spread
from nas.search.spaces import load_space
from nas.search.study.proposals import anchor_layouts

RECORDED = Path(__file__).parents[1] / "recorded" / "calibration.jsonl"
STUDY = Path(__file__).parents[1] / "recorded" / "lfm2-study.json.gz"
SPACE = "lfm2-study"

_FIRST_SEED = 1000
"""Of long trainings; protocols count from 0, and re-score with 100 and above."""
_ATTENTION = ("gqa", "swa", "mla")
_MUCH_ATTENTION = 1 / 3
"""Share of layers with attention from which on a layout is in the family of much attention."""
_BETWEEN_SEEDS = 2
_DRAWS, _SIMULATED = 2000, 1000
_LEAST_CEILING = 0.1
"""Ceiling below which the order of the scores is that of noise, and a share of it says nothing."""
_FEWEST = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """What is trained.

    Args:
        space: whose protocol is tested.
        corpus: of the language models.
        layouts: text -> 'front' or 'random', in the order of training.
        times: steps of a long training / of the protocol's.
        seeds: number of long seeds.
    """

    space: SearchSpace
    corpus: CorpusRef
    layouts: Mapping[str, str]
    times: int
    seeds: int

    @property
    def published(self) -> str:
        """The layout that quality is relative to."""
        return self.space.references.layouts()["published"].format()

    def first_jobs(self, layout: str) -> list[TrainJob]:
        """Returns the trainings of the space's first rung, which decide who is trained longer."""
        return self._jobs(layout, self.space.quality)

    def short_jobs(self, layout: str) -> list[TrainJob]:
        """Returns the trainings of the space's last rung."""
        return self._jobs(layout, last_rung(self.space.quality))

    def long_jobs(self, layout: str) -> list[TrainJob]:
        """Returns the same trainings, longer, with fresh seeds."""
        seeds = tuple(range(_FIRST_SEED, _FIRST_SEED + self.seeds))
        return self._jobs(layout, last_rung(self.space.quality, self.times).with_seeds(seeds))

    @cached_property
    def anchors(self) -> list[str]:
        """The references and anchors that give the scale; empty if the space has no anchors."""
        if (anchors := self.space.quality.anchors) is None:
            return []
        chosen = anchor_layouts(self.space, lambda _: True, anchors.layouts)
        return [layout.format() for layout in (*self.space.references.layouts().values(), *chosen)]

    def anchor_jobs(self, layout: str) -> list[TrainJob]:
        """Returns the trainings of an anchor."""
        assert self.space.quality.anchors is not None
        return self._jobs(layout, last_rung(self.space.quality).with_seeds(self.space.quality.anchors.seeds))

    def _jobs(self, layout: str, config: QualityConfig) -> list[TrainJob]:
        return rung_jobs(config, 0, Layout.parse(layout), self.corpus)

    def all_jobs(self) -> dict[str, tuple[str, TrainJob]]:
        """Returns result key -> layout and training, the published reference's first, then the anchors'."""
        jobs = {job.key: (layout, job) for layout in self.anchors for job in self.anchor_jobs(layout)}
        scored = {
            job.key: (layout, job)
            for layout in (self.published, *self.layouts)
            for job in self.first_jobs(layout) + self.short_jobs(layout) + self.long_jobs(layout)
        }
        return jobs | scored


def last_rung(config: QualityConfig, times: int = 1) -> QualityConfig:
    """Returns a ladder of one rung with all trainings that count at the last one of `config`, `times` as long."""
    tasks = {
        name: stage.model_copy(update={"steps": times * stage.steps, "seeds": rung.task_seeds(name)})
        for rung in config.rungs
        for name, stage in rung.tasks.items()
    }
    trained = [rung for rung in config.rungs if rung.lm_steps] or [config.rungs[-1]]
    rung = trained[-1].model_copy(update={"tasks": tasks, "lm_steps": times * trained[-1].lm_steps})
    return config.model_copy(update={"rungs": (rung,)})


def named(space: SearchSpace, studies: Sequence[Recorded], count: int, seed: int = 0) -> dict[str, str]:
    """Returns `count` layouts -> where they are from; fewer are a prefix of more."""
    rng, sampler = np.random.default_rng(seed), Sampler(space)
    origins: dict[str, str] = {}
    front = iter(rng.permutation(recorded_front(studies)).tolist())
    while len(origins) < count:
        if len(origins) % 2 == 0 and (layout := next(front, None)):
            origins.setdefault(layout, "front")
        else:
            origins.setdefault(sampler.draw(rng).format(), "random")
    return origins


def recorded_front(studies: Sequence[Recorded]) -> list[str]:
    """Returns the layouts that no other of the recorded studies dominates, one for each proxy, best quality first."""
    rows = {
        row["proxy_id"]: row
        for study in studies
        for row in study["told"]
        if row["status"] == "complete" and row["origin"] != "reference"
    }
    points = np.array([[*row["objectives"].values()] for row in rows.values()])
    front = [row for row, on_front in zip(rows.values(), front_mask(points), strict=True) if on_front]
    return [row["layout"] for row in sorted(front, key=lambda row: float(row["objectives"]["quality"]))]


def families(layout: str) -> tuple[str, str]:
    """Returns the two families of a layout: by feed-forwards, and by the share of layers with attention."""
    layers = Layout.parse(layout).layers
    sparse = any(block.kind == "moe" for layer in layers for block in layer.blocks)
    share = sum(any(block.kind in _ATTENTION for block in layer.mixers) for layer in layers) / len(layers)
    return "MoE" if sparse else "dense", "much attention" if share >= _MUCH_ATTENTION else "little attention"


@dataclass(frozen=True)
class Calibration:
    """Scores of N layouts.

    Args:
        short: by the protocol [N].
        short_sd: deviation of one of them over seeds.
        long: after long training, by seed [N, S].
        long_sd: deviation of a mean of these over seeds.
    """

    short: Floats
    short_sd: float
    long: Floats
    long_sd: float

    def of(self, members: NDArray[np.bool_]) -> Calibration:
        """Returns that of some layouts."""
        return Calibration(self.short[members], self.short_sd, self.long[members], self.long_sd)


@dataclass(frozen=True)
class Agreement:
    """Kendall's tau with its 95 % interval, and its share of what seeds allow."""

    tau: float
    tau_interval: tuple[float, float]
    ceiling: float
    share: float


def agreement(scores: Calibration, families: Sequence[str] | None = None, seed: int = 0) -> Agreement:
    """Returns the agreement of both scores."""
    rng, count, seeds = np.random.default_rng(seed), len(scores.long), scores.long.shape[1]
    family_of = np.zeros(count) if families is None else np.unique(families, return_inverse=True)[1]

    def pairs_of(rows: NDArray[np.int_]) -> NDArray[np.bool_]:
        return np.asarray((family_of[rows][:, None] == family_of[rows]) & (rows[:, None] != rows))

    whole = pairs_of(np.arange(count))
    tau = float(kendall(scores.short, scores.long.mean(1), whole))
    highest = ceiling(scores, whole, rng, _SIMULATED)
    taus = []
    for _ in range(_DRAWS):
        rows, columns = rng.integers(count, size=count), rng.integers(seeds, size=seeds)
        taus.append(float(kendall(scores.short[rows], scores.long[rows][:, columns].mean(1), pairs_of(rows))))
    return Agreement(tau, _interval(taus), highest, tau / highest if highest > 0 else np.nan)


def kendall(first: Floats, second: Floats, pairs: NDArray[np.bool_]) -> Floats:
    """Returns Kendall's tau-b over `pairs` [N, N] of the last dimension; NaN where one of the two has only ties."""
    one, other = (np.sign(x[..., :, None] - x[..., None, :]) * pairs for x in (first, second))
    untied = np.abs(one).sum((-2, -1)) * np.abs(other).sum((-2, -1))
    with np.errstate(invalid="ignore"):
        tau: Floats = (one * other).sum((-2, -1)) / np.sqrt(untied)
    return tau


def ceiling(scores: Calibration, pairs: NDArray[np.bool_], rng: np.random.Generator, times: int) -> float:
    """Returns the mean tau of simulated scores that agree but for the noise of seeds.

    Layouts differ as in the long trainings; by the deviation of either score less that of its noise.
    """
    long = scores.long.mean(1)
    order = (long - long.mean()) / (long.std() or 1.0)
    simulated = []
    for values, noise in ((scores.short, scores.short_sd), (long, scores.long_sd)):
        signal = np.sqrt(max(0.0, values.var(ddof=1) - noise**2))
        simulated.append(signal * order + noise * rng.standard_normal((times, len(order))))
    taus = kendall(simulated[0], simulated[1], pairs)
    return float(np.nanmean(taus)) if np.isfinite(taus).any() else np.nan


def _interval(values: Sequence[float]) -> tuple[float, float]:
    if not np.isfinite(values).any():
        return np.nan, np.nan
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def complete_layouts(plan: Plan, trained: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the layouts of which every training is known."""

    def whole(layout: str) -> bool:
        return all(
            job.key in trained for job in plan.first_jobs(layout) + plan.short_jobs(layout) + plan.long_jobs(layout)
        )

    return [layout for layout in plan.layouts if whole(layout)]


def scales(plan: Plan, trained: Mapping[str, Mapping[str, Any]]) -> dict[str, QualityScale]:
    """Returns the scales of the space's last rung by what groups weigh by; first the one that its studies fix.

    Raises:
        KeyError: the published reference or an anchor is not complete.
    """
    results = _results(trained)
    quality, published = plan.space.quality, seed_scores(plan.short_jobs(plan.published), results)
    fixed = partial(fix_scale, quality.rungs[-1].name, published, minimum=quality.min_reference)
    scales_by_name = {}
    if plan.anchors:
        counts = seed_counts(plan.short_jobs(plan.published))
        anchor_scores = [seed_scores(plan.anchor_jobs(layout), results) for layout in plan.anchors]
        scales_by_name["signal and noise of the anchors"] = fixed(anchors=Anchors(anchor_scores, counts))
    scales_by_name["priors, as without anchors"] = fixed()
    scales_by_name["nothing: all are equal"] = fixed().model_copy(update={"weights": {}})
    return scales_by_name


def measured(
    plan: Plan, trained: Mapping[str, Mapping[str, Any]], scale: QualityScale, layouts: Sequence[str]
) -> Calibration:
    """Returns the scores of complete layouts on a scale."""
    results = _results(trained)
    fresh = scale.rescored(seed_scores(plan.long_jobs(plan.published), results))
    short = [scale.quality(seed_scores(plan.short_jobs(layout), results)) for layout in layouts]
    long = [fresh.per_seed(seed_scores(plan.long_jobs(layout), results)) for layout in layouts]
    table = np.array([[by_seed[seed] for seed in sorted(by_seed)] for by_seed in long]).reshape(
        len(layouts), plan.seeds
    )
    long_sd = paired_spread(long).sd / np.sqrt(plan.seeds)
    return Calibration(np.array([score.value for score in short]), short[0].sd, table, float(long_sd))


def _results(trained: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainResult]:
    return {
        key: TrainResult.model_construct(scores=row["scores"])  # type: ignore[call-arg]  # pydantic's plugin wants all
        for key, row in trained.items()
    }


def report(plan: Plan, trained: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the agreement overall, by family and of single trainings, as Markdown."""
    needed = plan.short_jobs(plan.published) + plan.long_jobs(plan.published)
    needed += [job for layout in plan.anchors for job in plan.anchor_jobs(layout)]
    if any(job.key not in trained for job in needed):
        return "The published reference and the anchors are not trained yet, so there is no quality.\n"
    complete = complete_layouts(plan, trained)
    used = [trained[key] for key, (layout, _) in plan.all_jobs().items() if key in trained and layout in complete]
    cost = sum(row["cpu_seconds"] for row in used)
    text = (
        f"{len(complete)} of {len(plan.layouts)} layouts of `{plan.space.name}` named, {plan.times} times the steps,"
        f" {plan.seeds} seeds; {len(used)} trainings in {cost:.0f} CPU seconds."
    )
    if len(complete) < _FEWEST:
        return f"{text} No tau of fewer than {_FEWEST}.\n"
    scales_by_name = scales(plan, trained)
    by_weights = {name: measured(plan, trained, scale, complete) for name, scale in scales_by_name.items()}
    scores = next(iter(by_weights.values()))
    text += f"\n\n{markdown(_weightings(by_weights))}\n"
    by_family = [families(layout) for layout in complete]
    groups: dict[str, tuple[Calibration, list[str] | None]] = {"all": (scores, None)}
    for place, name in enumerate(("within dense and MoE", "within much and little attention")):
        groups[name] = (scores, [names[place] for names in by_family])
    for name in sorted({name for names in by_family for name in names}):
        members = np.array([name in names for names in by_family])
        if members.sum() >= _FEWEST:
            groups[name] = (scores.of(members), None)
    rows = []
    for name, (part, within) in groups.items():
        rows.append({"pairs": name, "layouts": str(len(part.short))} | _tau(agreement(part, within)))
    alone = _alone(plan, trained, next(iter(scales_by_name.values())), complete, scores.long.mean(1))
    alone += _between(plan, trained, next(iter(scales_by_name.values())), complete, scores.long.mean(1))
    return f"{text}{markdown(rows)}\n{markdown(alone)}"


def _weightings(scores: Mapping[str, Calibration]) -> list[dict[str, str]]:
    """Returns the agreement by what groups weigh by."""
    return [
        {"groups weigh by": name, "deviation over seeds": f"{calibration.short_sd:.3f}, long {calibration.long_sd:.3f}"}
        | _tau(agreement(calibration))
        for name, calibration in scores.items()
    ]


def _tau(agreed: Agreement) -> dict[str, str]:
    has_signal = agreed.ceiling >= _LEAST_CEILING
    low, high = agreed.tau_interval
    return {
        "tau": f"{agreed.tau:.2f} ({low:.2f} to {high:.2f})",
        "ceiling": f"{agreed.ceiling:.2f}",
        "tau / ceiling": f"{agreed.share:.2f}" if has_signal else "noise alone",
    }


def _alone(
    plan: Plan, trained: Mapping[str, Mapping[str, Any]], scale: QualityScale, layouts: Sequence[str], long: Floats
) -> list[dict[str, str]]:
    """Returns how single trainings of the first and last rung order the layouts, and what one costs."""
    jobs = [{_name(job): job for job in plan.first_jobs(layout) + plan.short_jobs(layout)} for layout in layouts]
    rows = []
    for name in jobs[0]:
        single = [trained[layout_jobs[name].key] for layout_jobs in jobs]
        scores = np.array([_score(scale, row["scores"]) for row in single])
        pairs = ~np.eye(len(layouts), dtype=bool)
        rows.append(
            {
                "one training": name,
                "CPU s": f"{np.mean([row['cpu_seconds'] for row in single]):.1f}",
                "tau with the long quality": f"{kendall(scores, long, pairs):.2f}",
            }
        )
    return rows


def _between(
    plan: Plan, trained: Mapping[str, Mapping[str, Any]], scale: QualityScale, layouts: Sequence[str], long: Floats
) -> list[dict[str, str]]:
    """Returns how recorded trainings of lengths between the protocol's and the long ones order the layouts.

    Their seeds are the first ones of the long trainings.
    """
    rows, pairs = [], ~np.eye(len(layouts), dtype=bool)
    for times in range(2, plan.times):
        other = replace(plan, times=times, seeds=_BETWEEN_SEEDS)
        if other.long_jobs(plan.published)[0].key in trained and set(layouts) <= set(complete_layouts(other, trained)):
            scores = measured(other, trained, scale, layouts).long
            costs = [sum(trained[job.key]["cpu_seconds"] for job in other.long_jobs(layout)) for layout in layouts]
            rows.append(
                {
                    "one training": f"{times} times the steps of the last rung, {_BETWEEN_SEEDS} fresh seeds",
                    "CPU s": f"{np.mean(costs):.1f}",
                    "tau with the long quality": f"{kendall(scores.mean(1), long, pairs):.2f}",
                }
            )
    return rows


def _name(job: TrainJob) -> str:
    return f"{'text' if job.run.name == 'lm' else job.run.name}, {job.steps} steps, seed {job.seed}"


def _score(scale: QualityScale, scores: Mapping[str, float]) -> float:
    """Returns what a training adds to the quality; the score of a task itself, as that may not count."""
    if len(scores) == 1:
        return next(iter(scores.values()))
    weights = scale.group_weights
    counted = [group for group in scale.reference if group in scores]
    return float(sum(weights[group] * scores[group] / scale.reference[group] for group in counted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    naming, running, reporting = (commands.add_parser(name) for name in ("name", "run", "report"))
    running.add_argument("--minutes", type=float, default=600.0, help="begin no training after this time")
    reporting.add_argument("--page", type=Path)
    for command in (naming, running, reporting):
        command.add_argument("--layouts", type=int, default=24)
        command.add_argument("--times", type=int, default=4, help="steps of long trainings / of the protocol's")
        command.add_argument("--seeds", type=int, default=2, help="fresh seeds of long trainings")
        command.add_argument("--space", default=SPACE, help="packaged space or YAML file")
        command.add_argument("--study", type=Path, default=STUDY, help="table of recorded studies of it")
    options = parser.parse_args()
    space = load_space(options.space)
    layouts = named(space, load(options.study), options.layouts)
    plan = Plan(space, refer(space.quality.corpus, Path.cwd()), layouts, options.times, options.seeds)
    if options.command == "name":
        for layout, origin in layouts.items():
            print(f"{origin:6} {layout}")
    elif options.command == "run":
        train_missing(plan.all_jobs(), RECORDED, options.minutes)
    else:
        write_part(options.page, f"calibration-{options.times}", report(plan, recorded(RECORDED)))


if __name__ == "__main__":
    main()
