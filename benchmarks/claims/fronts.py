"""Chances and shares of fronts, hypervolumes, reliabilities, and what models say of knobs and of layouts not tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import correlation

import numpy as np

from benchmarks.claims.rows import Row, calibration, mean, share
from benchmarks.claims.world import Floats
from benchmarks.search.problems import Problem
from nas.core.pareto import front_chances, front_mask, front_noise, hypervolume
from nas.core.scoring import Axis
from nas.core.stats import Z95
from nas.search.analysis.agreement import rank_correlation
from nas.search.analysis.effects import effects
from nas.search.analysis.reliability import part_reliability, reliability
from nas.search.proposers import Sampler, make_proposer, volume
from nas.search.proposers.ehvi import EhviSearch
from nas.search.proposers.hardware import Costs, HardwareModel, Measured

_DRAWS = 300


def front_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how many members of a front are there by noise, and how often trials are on the true front."""
    for count, noise in ((30, 0.02), (60, 0.02), (60, 0.01)):
        off, chances, real = [], [], []
        for _ in range(studies):
            true = _trade(rng, count)
            sds = np.array([noise, noise / 4])
            observations = true + sds * rng.standard_normal(true.shape)
            axes = {
                trial: [Axis(value=0.0, coordinate=float(x), sd=float(sd)) for x, sd in zip(row, sds, strict=True)]
                for trial, row in enumerate(observations)
            }
            members, truly = front_mask(observations), front_mask(true)
            stated = front_noise(axes, _DRAWS)
            assert stated is not None, "there are few"
            off.append(stated - (1 - float(truly[members].mean())))
            drawn = front_chances(axes, _DRAWS)
            chances += [float(drawn[trial] or 0.0) for trial in range(count)]
            real += truly.tolist()
        where = f"{count} candidates, noise {noise:g}"
        yield mean("front: share of members by noise, stated - true", where, 0.0, off)
        yield from calibration("front: share of draws on it (P(front))", where, chances, real, "at least")


def volume_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often the interval of a hypervolume holds the true one."""
    for count in (20, 60):
        held = []
        for _ in range(studies):
            true, corner = _trade(rng, count), np.array([0.2, 1.2])
            sds = np.full(true.shape, 0.02)
            estimate = volume(true + sds * rng.standard_normal(true.shape), sds, corner, _DRAWS)
            held.append(estimate.low <= hypervolume(true, corner) <= estimate.high)
        yield share("hypervolume: interval", f"{count} candidates, noise 0.02", 0.95, held)


def reliability_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields stated reliabilities minus true ones, squared correlations of qualities with their expectations."""
    for noise in (0.05, 0.03):
        whole, top = [], []
        for _ in range(2 * studies):
            true = rng.normal(0, 0.08, 60)
            pairs = sorted(zip((true + rng.normal(0, noise, 60)).tolist(), true.tolist(), strict=True))
            values, best = [value for value, _ in pairs], pairs[-20:]
            overall = reliability(values, [noise] * 60)
            part = part_reliability(values[-20:], values, overall)
            assert overall is not None and part is not None, "there are sixty"
            whole.append(overall - correlation(*zip(*pairs, strict=True)) ** 2)
            top.append(part - correlation(*zip(*best, strict=True)) ** 2)
        where = f"60 candidates, signal 0.08, noise {noise:g}"
        yield mean("reliability, stated - true", where, 0.0, whole)
        yield mean("reliability of the top third, stated - true", where, 0.0, top, slack=0.05)


def effect_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often intervals of knobs' effects hold them."""
    for count, knobs in ((30, 8), (60, 20)):
        held, marked = [], []
        for _ in range(studies):
            table = rng.standard_normal((count, knobs))
            estimates = effects(table, table[:, 0] + rng.standard_normal(count))
            assert estimates is not None, "there are trials enough"
            held.append(bool(estimates.low[0] <= np.ptp(table[:, 0]) <= estimates.high[0]))
            marked += (estimates.low[1:] * estimates.high[1:] > 0).tolist()
        where = f"{count} trials, {knobs} knobs"
        yield share("knobs: interval of the effect", where, 0.95, held)
        yield share("knobs: one without effect is marked", where, 0.05, marked, "at most")


def rank_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often intervals of rank correlations hold those of the population."""
    for count, rho in ((12, 0.8), (40, 0.8), (40, 0.3)):
        spearman, kendall = [], []
        for _ in range(studies):
            first, other = rng.standard_normal((2, count))
            second = rho * first + math.sqrt(1 - rho * rho) * other
            agreement = rank_correlation(first, second)
            assert agreement.spearman is not None and agreement.kendall is not None, "there are layouts enough"
            spearman.append(agreement.spearman.low <= 6 / math.pi * math.asin(rho / 2) <= agreement.spearman.high)
            kendall.append(agreement.kendall.low <= 2 / math.pi * math.asin(rho) <= agreement.kendall.high)
        where = f"{count} layouts, correlation {rho:g}"
        yield share("agreement: interval of Spearman's rho", where, 0.95, spearman)
        yield share("agreement: interval of Kendall's tau", where, 0.95, kendall)


def model_rows(rng: np.random.Generator, studies: int) -> Iterator[Row]:
    """Yields how often forecasts for layouts that a model was not fitted to hold their true figures."""
    forecasts, slices = [], []
    for seed in range(max(1, studies // 60)):
        problem = Problem("hybrid", seed)
        sampler = Sampler(problem.space)
        layouts = [sampler.draw(rng) for _ in range(60)]
        training, unseen = layouts[:30], layouts[30:]
        kinds = [block.kind for block in problem.space.mixers + problem.space.ffn]
        noise = problem.kind.device_noise
        logs = np.array([problem.truth(layout)["decode"] + noise * rng.standard_normal() for layout in training])
        model = HardwareModel(
            Costs(problem.space.workloads["chat"], kinds, "ms"), Measured(training, logs, np.full(len(logs), noise))
        )
        estimate = model.predict(unseen)
        true = np.array([problem.truth(layout)["decode"] for layout in unseen])
        forecasts += (np.abs(true - estimate.mean) <= Z95 * estimate.sd).tolist()
        search = make_proposer(sampler, "ehvi", seed)
        assert isinstance(search, EhviSearch), "it has a model of all objectives"
        search.fix_reference_point(problem.reference_point)
        for layout in training:
            search.tell(problem.observe(layout, gated=False))
        forecast = search.surrogate().predict(unseen)[0]
        values = np.array([[problem.truth(layout)[name] for name in problem.axes] for layout in unseen])
        slices += (np.abs(values - forecast.mean) <= Z95 * forecast.sd).ravel().tolist()
    where = "simulated device, 30 layouts known, 30 not"
    yield share("hardware model: interval of a forecast", where, 0.95, forecasts, "at least")
    yield share("model of the search: interval of a forecast", where, 0.95, slices, "at least")


def _trade(rng: np.random.Generator, count: int) -> Floats:
    """Returns [count, 2] true minimised coordinates of a trade of quality for time, with dominated ones."""
    time = rng.random(count)
    quality = -(0.3 * np.sqrt(time)) + 0.05 * np.abs(rng.standard_normal(count))
    return np.stack([quality, time], 1)
