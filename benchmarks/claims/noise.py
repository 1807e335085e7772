"""Intervals and chances of single figures, qualities and budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.claims.rows import Row, calibration, mean, share
from benchmarks.claims.world import FRESH_SEEDS, KEY, RUNG_SEEDS, Noise, World, space
from nas.core.family import TaskScore
from nas.core.measurement import Figure, Sample
from nas.core.scoring import BudgetCheck, check_budgets, check_quality
from nas.core.space import Budget, SearchSpace
from nas.core.stats import repetition_figure
from nas.measure.protocol.estimator import reference_times, time_figures
from nas.search.proxy.quality import Anchors, fix_scale
from nas.serve.views.candidate import ratio

TRUE = 20.0


def figure_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often intervals of figures hold the true value."""
    for count in (3, 10):
        hits, ratios = [], []
        for _ in range(studies):
            values = [TRUE * math.exp(0.04 * z) for z in rng.standard_normal(count)]
            hits.append(_holds(repetition_figure(values, "MB"), TRUE))
        yield share("figure: memory, energy, loading", f"{count} repetitions", 0.95, hits)
        pairs = [_times(rng, count) for _ in range(studies)]
        for name in ("ttft", "decode_p50", "decode_p95", "latency"):
            hits = [_holds(figures[name], true[name]) for figures, true in pairs]
            yield share(f"figure: {name}", f"one thread, {count} repetitions", 0.95, hits, "at least")
    world = World(rng)
    for _ in range(studies):
        figures = world.figure(math.log(18.0)), world.figure(math.log(20.0))
        stated = ratio(*figures, alike=True)
        assert stated is not None, "both have noise"
        ratios.append(stated.low <= 0.9 <= stated.high)
    yield share("ratio of two figures", "one calibration", 0.95, ratios)
    widths = []
    for _ in range(studies):
        share_true = rng.uniform(0.05, 0.95)
        score = TaskScore.of(int(rng.binomial(200, share_true)), 200)
        widths.append(score.ci95[0] <= share_true <= score.ci95[1])
    yield share("exact answers of a task", "200 questions", 0.95, widths)


def budget_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often budgets are kept that are said to be so with a chance; limits are anywhere near the value."""
    world = World(rng, Noise(device=0.03))
    for limit, what in (("0.9x", "relative"), ("18ms", "absolute")):
        budget = Budget.model_validate({"metric": "decode_p50", "max": limit, "workload": "chat"})
        shape = cast(
            SearchSpace,
            SimpleNamespace(budgets=[budget], targets=[("local", KEY.runtime)], labels=lambda _: [KEY.runtime]),
        )
        stated, outcomes, held = [], [], []
        for _ in range(4 * studies):
            true = 0.9 * TRUE * math.exp(rng.uniform(-0.25, 0.25))
            figures = {KEY: {"decode_p50": world.figure(math.log(true))}}
            published = {KEY: {"decode_p50": world.figure(math.log(TRUE))}}
            (check,) = check_budgets(shape, figures, published)
            stated.append(_chance(check))
            outcomes.append(true <= 0.9 * TRUE)
            held.append(_interval_holds(check, true if what == "absolute" else true * check.limit / (0.9 * TRUE)))
        yield from calibration("budget: chance that it is kept", f"{what} limit", stated, outcomes)
        yield share("budget: interval of the value", f"{what} limit", 0.95, held)


def quality_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often intervals of qualities hold the true value, and how often budgets on quality are kept."""
    budget = Budget.model_validate({"metric": "quality", "min": 0.95})
    shape = space().model_copy(update={"budgets": (budget,)})
    for fresh in (False, True):
        stated, outcomes, held = [], [], []
        for _ in range(2 * studies):
            world, true = World(rng), 0.95 + rng.uniform(-0.15, 0.15)
            scale, _references = world.scale()
            seeds = FRESH_SEEDS if fresh else RUNG_SEEDS
            if fresh:
                scale = scale.rescored(world.scores(1.0, seeds))
            quality = scale.quality(world.scores(true, seeds))
            (check,) = check_quality(shape, quality, final=False)
            stated.append(_chance(check))
            outcomes.append(true >= 0.95)
            held.append(_interval_holds(check, true))
        where = f"{len(seeds)} {'fresh ' * fresh}seeds, 6 anchors"
        yield share("quality: interval of the value", where, 0.95, held)
        yield from calibration("quality: chance that a budget is kept", where, stated, outcomes)


def recall_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often intervals of recall hold: one noisy domain of recall among quiet domains of text."""
    quiet, noisy = 0.01, 0.06
    held = []
    budget = Budget.model_validate({"metric": "quality.recall", "min": 0.9})
    shape = space().model_copy(update={"budgets": (budget,)})
    for _ in range(studies):
        shifts = rng.normal(0, 0.03, 8)

        def scores(true: float, seeds: int, shifts: Any = shifts) -> dict[int, dict[str, float]]:
            return {
                seed: {
                    **{f"lm/{name}": true + shifts[seed] + quiet * rng.standard_normal() for name in "abc"},
                    "lm/recall": true + shifts[seed] + noisy * rng.standard_normal(),
                }
                for seed in range(seeds)
            }

        true_anchors = [1.0, 0.95, *rng.normal(0.9, 0.15, 6)]
        published = scores(1.0, 2)
        anchors = Anchors([scores(true, 4) for true in true_anchors], {"lm": 2})
        scale = fix_scale("r", published, [scores(0.95, 2)], minimum=0.01, anchors=anchors)
        quality = scale.quality(scores(0.9, 2))
        if quality.recall is None:
            continue
        (check,) = check_quality(shape, quality, final=False)
        held.append(_interval_holds(check, 0.9))
    yield share("recall: interval of the value", "2 seeds, 8 anchors", 0.95, held)


def spread_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields the stated deviations of qualities over the true ones."""
    stated = []
    for _ in range(studies):
        world = World(rng)
        scale, _references = world.scale()
        stated.append(scale.sd_of(len(FRESH_SEEDS)) / (world.noise.seed / math.sqrt(len(FRESH_SEEDS))))
    yield mean("quality: deviation over seeds / true", "4 fresh seeds, 6 anchors", 1.0, stated, slack=0.1, unit="x")


def _times(rng: np.random.Generator, count: int) -> tuple[dict[str, Figure], dict[str, float]]:
    """Returns the figures of a fake device of one thread, whose speed differs between repetitions, and the true ones.

    A process is off by 2 %, a token by 4 %, and neighbours take up to tens of per cent from both models alike.
    """
    prompt, token, gen = 200.0, TRUE, 340

    def run(scale: float, speed: float) -> Sample:
        factor = speed * math.exp(0.02 * rng.standard_normal())
        ns = (1e6 * token * scale * factor * np.exp(0.04 * rng.standard_normal(gen))).astype(int).tolist()
        prefill = [int(1e6 * prompt * scale * factor)]
        return Sample(
            load_ms=1, ttft_ms=prefill[0] / 1e6, prefill_cpu_ms=prefill[0] / 1e6, prefill_ns=prefill,
            prefill_cpu_ns=prefill, decode_ns=ns, decode_cpu_ns=ns, turns=[4] * (gen // 4),
        )  # fmt: skip

    alone = [run(0.8, math.exp(0.01 * abs(rng.standard_normal()))) for _ in range(10)]
    speeds = [math.exp(0.2 * abs(rng.standard_normal())) for _ in range(count)]
    candidates, beside = ([run(scale, speed) for speed in speeds] for scale in (1.0, 0.8))
    figures = time_figures(candidates, beside, reference_times(alone, 1), 1, gen)
    p95 = token * math.exp(0.04 * 1.644854)
    return figures, {"ttft": prompt, "decode_p50": token, "decode_p95": p95, "latency": prompt + gen * token}


def _holds(figure: Figure, true: float) -> bool:
    return figure.low is not None and figure.high is not None and figure.low <= true <= figure.high


def _interval_holds(check: BudgetCheck, true: float) -> bool:
    return check.low is not None and check.high is not None and check.low <= true <= check.high


def _chance(check: BudgetCheck) -> float:
    assert check.chance is not None, "the noise is known"
    return check.chance
