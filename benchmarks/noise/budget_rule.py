"""Error rates of the rule that decides about a budget, by simulation; takes seconds.

    python -m benchmarks.noise.budget_rule [--draws 20000] [--json]

A candidate's true time is some per cent off a limit. It is measured with `screen_repetitions`; where the chance that it
keeps the budget is neither 95 % nor 5 %, `confirm_repetitions` fresh ones decide by the likelier of the two. If it gets
in, the same number of fresh ones confirms it. A repetition is the true time, plus the absolute value of a normal
variable (other processes only make it slower) with the standard deviation in the first column, plus an error that all
repetitions of one measurement share, with the protocol's `base` deviation. The true time includes the floor's own bias
at `confirm_repetitions`.

Printed for each noise and distance: how often the candidate gets in, in per cent. `in` is after the screen, `end` after
the confirmation; `bought` how often fresh repetitions are bought. For comparison: `pooled`, where screen and fresh
repetitions decide together, and `kept`, where the repetitions that let a candidate in also confirm it: both as `end`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.scoring import SURE
from nas.core.space import MeasurementSettings
from nas.core.stats import FASTEST
from nas.measure.protocol.estimator import NOISE, NoiseModel

Array = NDArray[np.float64]
NOISES = (0.01, 0.02, 0.04, 0.08)
OFF = (-0.10, -0.05, -0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.05, 0.10)
SETTINGS = MeasurementSettings()


@dataclass(frozen=True)
class Rates:
    """Shares of candidates; see the module."""

    noise: float
    off: float
    gets_in: float
    bought: float
    end: float
    pooled: float
    confirmed: float


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = list(simulate(options.draws))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'noise':>6} {'off':>6} | {'in':>6} {'bought':>7} {'end':>6} | {'pooled':>7} {'kept':>6}")
    for row in rows:
        shares = (row.gets_in, row.bought, row.end, row.pooled, row.confirmed)
        got, bought, end, pooled, confirmed = (f"{100 * share:.1f}" for share in shares)
        print(f"{row.noise:>6.0%} {row.off:>+6.0%} | {got:>6} {bought:>7} {end:>6} | {pooled:>7} {confirmed:>6}")


def simulate(draws: int, seed: int = 0) -> Iterator[Rates]:
    """Yields the rates of each noise and distance."""
    model = NOISE["cpu"]["ttft"]
    rng = np.random.default_rng(seed)
    for noise in NOISES:
        bias = float(np.mean(estimate(_runs(rng, 0.0, noise, SETTINGS.confirm_repetitions, draws, 0.0), model)[0]))
        for off in OFF:
            true = math.log1p(off) - bias
            screen, fresh, last = (
                _runs(rng, true, noise, count, draws, model.base)
                for count in (SETTINGS.screen_repetitions, SETTINGS.confirm_repetitions, SETTINGS.confirm_repetitions)
            )
            chance = keeps(*estimate(screen, model))
            near = (chance > 1 - SURE) & (chance < SURE)
            likely, pooled, confirmed = (
                keeps(*estimate(runs, model)) >= 0.5 for runs in (fresh, np.hstack([screen, fresh]), last)
            )
            gets_in = np.where(near, likely, chance >= SURE)
            pooled_in = np.where(near, pooled, chance >= SURE)
            shares = (gets_in, near, gets_in & confirmed, pooled_in & confirmed, gets_in & (near | confirmed))
            yield Rates(noise, off, *(float(np.mean(share)) for share in shares))


def estimate(logs: Array, model: NoiseModel) -> tuple[Array, Array]:
    """Returns the logarithm of the figure of each row of repetitions, and its standard deviation."""
    count = logs.shape[1]
    ordered = np.sort(logs, axis=1)
    values = np.log(np.mean(np.exp(ordered[:, : math.ceil(count / FASTEST)]), axis=1))
    spread = np.log(np.median(np.exp(ordered), axis=1)) - values
    return values, np.sqrt(model.base**2 + (model.spread_weight * spread) ** 2 / count)


def keeps(excess: Array, sd: Array) -> Array:
    """Returns the chance that a limit of 1 is kept."""
    return np.array([0.5 * math.erfc(argument) for argument in (excess / (sd * math.sqrt(2))).tolist()])


def _runs(rng: np.random.Generator, true: float, noise: float, count: int, draws: int, base: float) -> Array:
    return true + np.abs(rng.normal(0, noise, (draws, count))) + rng.normal(0, base, (draws, 1))


if __name__ == "__main__":
    main()
