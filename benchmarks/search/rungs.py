"""Problems of the family with a ladder: cheap rungs with biased and noisy quality, and costs of stages.

The shape is that of measured proxy trainings: cheap rungs overrate layouts with little global mixing, err by layout in
a way that more seeds do not remove, and differ between seeds; so their ranks agree with the top rung's to about 0.7 and
0.9 over all layouts, and much less among good ones. Seconds are those of the default ladder on one thread.
"""

from __future__ import annotations

import numpy as np

from benchmarks.search.problems import Problem
from nas.core.layout import Layout
from nas.core.quality_config import Rung, TaskStage
from nas.search.proposers import Sampler

_TASKS = {"selcopy": TaskStage(steps=240)}
RUNGS = (
    Rung(name="recall", tasks=_TASKS, keep=0.5),
    Rung(name="short", lm_steps=300, keep=0.5),
    Rung(name="long", lm_steps=600, seeds=(0, 1)),
)
_BIAS, _ERROR, _SEEDS = (0.5, 0.3, 0.0), (0.8, 0.3, 0.0), (0.4, 0.25, 0.0)
"""By rung, as shares of the spread of quality over random layouts; the top rung has the noise of the problem."""
ENTER_S, RUNG_S, CONFIRM_S = 10.0, (10.0, 12.0, 42.0), 15.0
"""Export and device gate; each rung beyond the one before; equivalence gate and the top rung's measurement."""
_CROWD = 200
_LOCAL = ("conv", "mamba2")


class RungProblem:
    """One instance with rungs.

    Args:
        problem: the instance.
        longer: times which the top rung takes longer than in the default ladder.
    """

    def __init__(self, problem: Problem, longer: float = 1.0) -> None:
        self.problem = problem
        self.rung_s = (*RUNG_S[:-1], longer * RUNG_S[-1])
        sampler, rng = Sampler(problem.space), np.random.default_rng([101, problem.seed])
        crowd = [sampler.draw(rng) for _ in range(_CROWD)]
        self._spread = float(np.std([problem.truth(layout)["quality"] for layout in crowd]))
        shares = [_global_share(layout) for layout in crowd]
        self._centre, self._width = float(np.mean(shares)), max(float(np.std(shares)), 1e-9)

    @property
    def whole_s(self) -> float:
        """Seconds of a layout that is trained to the top."""
        return ENTER_S + sum(self.rung_s) + CONFIRM_S

    @property
    def top_sd(self) -> float:
        """Standard deviation over seeds at the top rung."""
        return self.problem.kind.quality_noise * self._spread

    def sd(self, rung: int) -> float:
        """Returns the standard deviation over seeds at a rung."""
        return _SEEDS[rung] * self._spread if rung < len(RUNGS) - 1 else self.top_sd

    def quality(self, layout: Layout, rung: int) -> float:
        """Returns the quality that the rung shows, minimised; always the same."""
        rng = np.random.default_rng([103, self.problem.seed, rung, int(layout.id[:12], 16)])
        more_global = (_global_share(layout) - self._centre) / self._width
        off = _BIAS[rung] * more_global + _ERROR[rung] * float(rng.standard_normal())
        seeds = self.sd(rung) * float(rng.standard_normal())
        return self.problem.truth(layout)["quality"] + off * self._spread + seeds

    def seconds(self, layout: Layout, base: float) -> float:
        """Returns a stage's seconds, which grow with depth and vary randomly."""
        rng = np.random.default_rng([107, self.problem.seed, int(base * 10), int(layout.id[:12], 16)])
        return base * layout.depth / 11 * float(rng.lognormal(0.0, 0.1))


def _global_share(layout: Layout) -> float:
    return sum(layer.mixers[0].kind not in _LOCAL for layer in layout.layers) / layout.depth
