"""Simulated results of two devices and a training ladder for layouts of the synthetic problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nas.core.layout import Layout
from nas.core.measurement import Figure, Measurement, Repetition, Sample
from nas.core.scoring import MeasurementKey
from nas.core.space import SearchSpace
from nas.core.stats import Z95
from nas.core.workload import Workload
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.search.proposers.sampling import Rng
from nas.search.proxy.quality import Quality
from nas.testing.synthetic import SyntheticProblem, synthetic_space

WORKLOAD = "chat"
RUNTIME = "llama.cpp"
DEVICES = {"phone": "phone-3f1c", "laptop": "laptop-90b2"}
"""What the space calls a device -> its id."""
RUNGS = ("recall", "short", "long")
CORNER = {"quality": -0.7, "latency": math.log(1.2), "memory": math.log(1.2)}

_SLOWER = {"phone": 6.0, "laptop": 1.0}
_HOPS = {"phone": 0, "laptop": 1}
"""Seeds of the problems whose costs between layers the devices have: they do not agree on every layout."""
_NOISE = {"phone": 0.012, "laptop": 0.006}
_RUNG_SD = (0.05, 0.025, 0.012)
_TOKENS = 100
_MEASURE_S = 9.0


def made_space() -> SearchSpace:
    """Returns the synthetic space on two devices."""
    limit = {"max": "1.2x", "workload": WORKLOAD}
    data = synthetic_space().model_dump(mode="json", exclude_none=True) | {
        "name": "synthetic-two-devices",
        "devices": list(DEVICES),
        "runtimes": [{"name": RUNTIME, "quantisation": "q4_0"}],
        "budgets": [{"metric": name, **limit} for name in ("ttft", "decode_p50", "peak_rss")],
    }
    return SearchSpace.model_validate(data)


@dataclass(frozen=True)
class Candidate:
    """A layout with its results.

    Args:
        layout: of the candidate.
        figures: by device.
        loss: without noise.
    """

    layout: Layout
    figures: dict[str, dict[str, Figure]]
    quality: float


class Judge:
    """Simulates measurements and qualities of layouts.

    Args:
        repetitions: kept in a measurement, of 100 tokens each. A real one keeps about ten, with a reference
            run for each: 40 kB in all.
    """

    def __init__(self, repetitions: int = 1) -> None:
        self.space = made_space()
        self._repetitions = repetitions
        self._problems = {device: SyntheticProblem(seed) for device, seed in _HOPS.items()}
        self._published = self.space.references.layouts()["published"]
        self._loss = self._problems["phone"].truth(self._published)["quality"]
        none = np.random.default_rng(0)
        self._figures = {device: self._device_figures(device, self._published, none, noise=0.0) for device in DEVICES}

    def candidate(self, layout: Layout, rng: Rng) -> Candidate:
        """Returns a candidate, with noise."""
        figures = {device: self._device_figures(device, layout, rng, _NOISE[device]) for device in DEVICES}
        loss = self._problems["phone"].truth(layout)["quality"]
        return Candidate(layout, figures, math.exp(self._loss - loss))

    def published(self) -> dict[MeasurementKey, dict[str, Figure]]:
        """Returns the published reference's figures, without noise."""
        measured = {MeasurementKey(device, RUNTIME, WORKLOAD): figures for device, figures in self._figures.items()}
        return measured | {
            place._replace(workload=""): {"file_size": figures["file_size"]} for place, figures in measured.items()
        }

    def broken(self, candidate: Candidate, device: str) -> str | None:
        """Returns the first budget that it breaks on the device, in the words of the gate."""
        for budget in self.space.budgets:
            figure, base = candidate.figures[device][budget.metric], self._figures[device][budget.metric]
            assert figure.value is not None and base.value is not None
            limit = 1.2 * base.value
            if figure.value > limit:
                where = f"{budget.metric}@{WORKLOAD} on {device}/{RUNTIME}"
                return f"{where}: {figure.value:.4g} {figure.unit}, limit {limit:.4g} {figure.unit}"
        return None

    def measurement(self, candidate: Candidate, device: str, rng: Rng) -> dict[str, Any]:
        """Returns the payload of its result of stage `measure`."""
        median = candidate.figures[device]["decode_p50"].value
        assert median is not None
        measurement = Measurement(
            artifact=candidate.layout.id,
            runtime=RUNTIME,
            build="0" * 64,
            patched=False,
            protocol=PROTOCOL_VERSION,
            device=DEVICES[device],
            workload=self.space.workloads[WORKLOAD],
            figures=candidate.figures[device],
            repetitions=[_repetition(median, rng) for _ in range(self._repetitions)],
            refused_share=0.0,
            wall_s=_MEASURE_S,
            calibration_ms=361.0,
            drift=float(rng.normal(0, 0.01)),
        )
        return {"value": measurement.model_dump(mode="json"), "seconds": _MEASURE_S}

    def scored(self, candidate: Candidate, rung: int, rng: Rng) -> Quality:
        """Returns its quality at a rung."""
        value = candidate.quality * math.exp(rng.normal(0, _RUNG_SD[rung]))
        return Quality(rung=RUNGS[rung], value=value, per_group={"lm/code": value}, sd=_RUNG_SD[rung], n_seeds=1)

    def _device_figures(self, device: str, layout: Layout, rng: Rng, noise: float) -> dict[str, Figure]:
        truth = self._problems[device].truth(layout)
        slow = _SLOWER[device]

        def figure(value: float, unit: str, noise: float, n: int = 10) -> Figure:
            estimate = float(value * math.exp(rng.normal(0, noise) if noise else 0.0))
            half = Z95 * 0.36 * noise
            low, high = estimate * math.exp(-half), estimate * math.exp(half)
            return Figure(
                value=estimate, low=low, high=high, log_sd=0.36 * noise, minimum=low, maximum=high, n=n, unit=unit
            )

        ttft, decode = figure(60 * slow * truth["ttft"], "ms", noise), figure(slow * truth["decode"], "ms", noise)
        memory = figure(truth["memory"], "MB", 0.002)
        workload: Workload = self.space.workloads[WORKLOAD]
        assert ttft.value is not None and decode.value is not None
        prompt_s = ttft.value / 1000
        return {
            "ttft": ttft,
            "prefill_tps": figure(workload.prompt / prompt_s, "tok/s", 0.0),
            "decode_p50": decode,
            "decode_p95": figure(1.07 * decode.value, "ms", 0.0),
            "decode_mean": figure(1.01 * decode.value, "ms", 0.0),
            "latency": figure(ttft.value + workload.gen * decode.value, "ms", noise / 2),
            "peak_rss": memory,
            "prefill_rss": memory,
            "decode_rss": memory,
            "load": figure(25.0 * slow, "ms", noise),
            "file_size": figure(0.5625e-6 * layout.params.total, "MB", 0.0, n=1),
        }


def _repetition(median_ms: float, rng: Rng) -> Repetition:
    tokens = (1e6 * median_ms * (1 + 0.03 * rng.standard_exponential(_TOKENS))).astype(int)
    return Repetition(valid=True, sample=Sample(load_ms=25.0, ttft_ms=60.0, decode_ns=tokens.tolist()))
