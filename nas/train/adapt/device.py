"""Figures of layouts on the device of an adaptation, all of them under the conditions that it began with.

    OUT/device.json   build, calibration and other conditions of the figures

Layouts are measured with random weights by the protocol of studies, under the result keys of the store: what differs in
any input is measured again. One build of the runtime measures all of an adaptation, as of a study. Where all budgets
are of the file, files are described and no device is opened.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, StudyChanged, Unsupported
from nas.core.layout import Layout
from nas.core.limit import Limit
from nas.core.measurement import Figure, ReferenceTimes
from nas.core.metrics import METRICS, metric
from nas.core.progress import Log
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm, open_farm
from nas.measure.protocol.calibration import (
    DEPLOY_SEED,
    Calibrator,
    MeasurementTarget,
    PreparedDevice,
    SavedCalibration,
)
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import RandomWeights
from nas.train.adapt.request import AdaptRequest
from nas.train.scaling.measure import measure_layout

DEVICE = "device.json"
_FRESH = 2
"""Repetitions of a fresh measurement, as a multiple of those of the first."""


class Measured(NamedTuple):
    """What was measured of a layout.

    Args:
        figures: metric -> figure.
        seconds: of device time.
    """

    figures: Mapping[str, Figure]
    seconds: float


class Bench(ABC):
    """Measures layouts."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Holds what measuring needs in the context."""
        yield

    @abstractmethod
    def measure(self, layout: Layout, *, fresh: bool = False) -> Measured:
        """Returns the figures of a layout; `fresh`: of other and more repetitions, by which nothing was chosen.

        Raises:
            Unsupported: the runtime does not carry it.
            CandidateFailed: it does not run.
            StudyChanged: the device or build is another one than that of earlier figures.
        """


BenchOf = Callable[[Sequence[Layout]], Bench]
"""Returns what measures layouts, given examples that need all that will be measured."""


class DeviceBench(Bench):
    """Measures on the device of a request.

    Args:
        request: names device, runtime, workload and repetitions.
        log: takes one line at a time.
        examples: layouts, by which the build is chosen.
    """

    def __init__(self, request: AdaptRequest, log: Log, examples: Sequence[Layout]) -> None:
        self._request, self._log, self._examples = request, log, examples
        self._protocol, self._context = MeasurementSettings(), ExitStack()
        self._target: tuple[Farm, MeasurementTarget] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        with ExitStack() as self._context:
            yield
        self._target = None

    def measure(self, layout: Layout, *, fresh: bool = False) -> Measured:
        _require_support(self._request.runtime, layout)
        if self._target is None:
            self._target = self._open()
        farm, target = self._target
        target = replace(target, quantisation=layout.quantisation or target.quantisation)
        repetitions = self._request.reps
        first, count = (repetitions, _FRESH * repetitions) if fresh else (0, repetitions)
        measurement = asyncio.run(
            measure_layout(layout.architecture, target, farm, self._request.workload, count, self._protocol, first)
        )
        figures = {name: figure for name, figure in measurement.figures.items() if name in METRICS}
        return Measured(figures, measurement.wall_s)

    @cached_property
    def _spec(self) -> RuntimeSpace:
        runtime = RUNTIMES[self._request.runtime]
        patched = any(runtime.supports(layout).verdict == "patched" for layout in self._examples)
        return RuntimeSpace(
            name=runtime.name,
            quantisation=self._request.deploy_quantisation,
            build="any" if patched else "stock",
        )

    def _open(self) -> tuple[Farm, MeasurementTarget]:
        """Opens the farm, and calibrates the device or checks that it is as it was."""
        store = self._context.enter_context(closing(Store.open(self._request.db)))
        farm = self._context.enter_context(open_farm(store))
        path, device = self._request.output / DEVICE, self._request.device
        workload = self._request.workload
        name = content_hash(workload.key())[:12]
        weights = max(layout.params.active for layout in self._examples)
        calibrator = Calibrator(
            farm, farm.jobs(None), self._protocol, paths.home() / "work", self._log, {name: workload}, weights
        )
        prepared = calibrator.prepare(device, self._spec)
        record: dict[str, Any] = {"conditions": prepared.conditions, "calibrations": {}}
        if path.is_file():
            record |= json.loads(path.read_bytes())
        saved = None
        try:
            if calibration := record["calibrations"].get(name):
                times = {name: ReferenceTimes.model_validate(calibration["times"])}
                conditions = {**record["conditions"], **calibration["conditions"]}
                saved = SavedCalibration(conditions["build"], times, conditions)
            else:  # of another workload of this device and build
                prepared.require_unchanged({**record["conditions"], **_of_workload(prepared)})
            target = asyncio.run(calibrator.calibrated(prepared, saved))
        except StudyChanged as error:
            raise StudyChanged(f"{path.parent}: {error}: name another --output, for which blocks are reused") from error
        (reference,) = target.references.values()
        times_now = reference.calibration.model_dump(mode="json")
        record["calibrations"][name] = {"times": times_now, "conditions": _of_workload(prepared)}
        write_json(path, record)
        return farm, target


class FileBench(Bench):
    """Sizes of the files that a request's runtime would write.

    Args:
        request: names runtime and quantisation.
    """

    def __init__(self, request: AdaptRequest) -> None:
        self._request = request

    def measure(self, layout: Layout, *, fresh: bool = False) -> Measured:
        _require_support(self._request.runtime, layout)
        began, quantisation = time.monotonic(), layout.quantisation or self._request.deploy_quantisation
        with tempfile.TemporaryDirectory() as folder:
            artifact = RUNTIMES[self._request.runtime].export(
                layout.architecture, quantisation, RandomWeights(DEPLOY_SEED), Path(folder, "model"), recipe=True
            )
        size = Figure(value=artifact.size / 1e6, n=1, unit="MB")
        return Measured({"file_size": size}, time.monotonic() - began)


def bench_of(request: AdaptRequest, log: Log) -> BenchOf:
    """Returns what measures layouts for a request: its device, unless all budgets are of the file."""
    names = [Limit.parse(text, relative=True).metric for text in request.budget]
    if all(metric(name).source == "artifact" for name in names):
        return lambda examples: FileBench(request)
    return partial(DeviceBench, request, log)


def _require_support(runtime: str, layout: Layout) -> None:
    if not (support := RUNTIMES[runtime].supports(layout)):
        raise Unsupported(f"{runtime} does not carry {layout}: {'; '.join(support.reasons)}")


def _of_workload(prepared: PreparedDevice) -> dict[str, Any]:
    """Returns the conditions that depend on the workload."""
    return {name: prepared.conditions[name] for name in ("calibration", "cores")}


def write_json(path: Path, value: Any) -> None:
    """Replaces a file of the folder of results atomically."""
    write_durably(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def figure_of(figures: Mapping[str, Figure], name: str) -> Figure:
    """Returns the figure of a budget's metric, which has a value.

    Raises:
        InvalidInput: the device cannot measure it.
    """
    figure = figures.get(name)
    if figure is None or figure.value is None:
        reason = figure.reason if figure is not None else None
        raise InvalidInput(f"{name} cannot be measured here{f': {reason}' if reason else ''}", where="--budget")
    return figure
