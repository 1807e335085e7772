"""The searcher that Ray Tune drives; a whole run is the documentation's example, in Tune itself with test-all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from exhaustive import mostly_exhaustive
from ray import cloudpickle, tune

from nas.core.errors import InvalidInput, UnknownName
from nas.search.proposers.ray_tune import HilnasSearcher
from nas.testing.synthetic import synthetic_space

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to/other-tools.md"
PUBLISHED = {"ttft@chat": 100.0, "decode_p50@chat": 10.0, "peak_rss@chat": 50.0}
GOOD = {"quality": 0.9, "latency": 8.0, "memory": 40.0, "peak_rss@chat": 40.0}


def searcher(seed: int = 0) -> HilnasSearcher:
    worst = {"quality": 0.0, "latency": 20.0, "memory": 60.0}
    space = synthetic_space(16, seeds=2)
    return HilnasSearcher(space, proposer="evolution", seed=seed, published=PUBLISHED, worst=worst)


def observation(of: HilnasSearcher, **changes: Any) -> dict[str, Any]:
    """What one trial with GOOD figures, some of them others, became; None leaves a figure out."""
    of.suggest("one")
    of.on_trial_complete("one", {name: v for name, v in (GOOD | changes).items() if v is not None})
    (record,) = of.proposer.state()["observations"]
    return dict(record)


def test_figures_become_coordinates() -> None:
    record = observation(searcher(), quality_sd=0.02, latency_sd=0.8, training_iteration=3)
    assert record["status"] == "complete"
    assert record["objectives"] == {"quality": -0.9, "latency": math.log(8.0), "memory": math.log(40.0)}
    assert record["constraints"] == {"peak_rss@chat": pytest.approx(math.log(40 / 50))}
    assert record["noise"] == {"quality": 0.02, "latency": pytest.approx(0.1)}


def test_what_became_of_a_trial() -> None:
    assert observation(searcher(), **{"peak_rss@chat": 51.0, "quality": None})["status"] == "infeasible"
    assert observation(searcher(), quality=None)["status"] == "stopped"
    for result, error in ((None, False), (None, True), (GOOD, True)):
        of = searcher()
        of.suggest("one")
        of.on_trial_complete("one", result, error=error)
        assert [record["status"] for record in of.proposer.state()["observations"]] == ["failed"]


def test_mistakes_are_said() -> None:
    for changes in ({"latency": 0.0}, {"quality": math.nan}, {"peak_rss@chat": -1.0}):
        with pytest.raises(InvalidInput, match=next(iter(changes))):
            observation(searcher(), **changes)
    with pytest.raises(InvalidInput, match="none of quality"):
        observation(searcher(), **dict.fromkeys(GOOD), accuracy=1.0)
    with pytest.raises(UnknownName, match="latancy"):
        HilnasSearcher(synthetic_space(), published=PUBLISHED, worst={"latancy": 1.0})
    with pytest.raises(InvalidInput, match="ttft@chat"):
        HilnasSearcher(synthetic_space())


def test_a_saved_searcher_goes_on_where_it_was(tmp_path: Path) -> None:
    first = searcher()
    configs = [first.suggest(str(number)) for number in range(6)]
    assert len({json.dumps(config) for config in configs}) == 6
    for number in range(4):
        first.on_trial_complete(str(number), GOOD)
    first.save(str(tmp_path / "state"))
    again = searcher()
    again.restore(str(tmp_path / "state"))
    copy = cloudpickle.loads(cloudpickle.dumps(first))  # as Tune does
    for one in (first, again, copy):
        one.on_trial_complete("4", GOOD)
    assert again.suggest("6") == copy.suggest("6") == first.suggest("6")
    with pytest.raises(InvalidInput, match="seed"):
        searcher(seed=1).restore(str(tmp_path / "state"))
    (tmp_path / "state").write_text("{}")
    with pytest.raises(InvalidInput, match="no search state"):
        again.restore(str(tmp_path / "state"))


class Results(list[dict[str, Any]]):
    num_errors = 0


class InlineTuner:
    """Calls a searcher as Ray Tune does, in this process and one trial after the other."""

    def __init__(self, trainable: Callable[..., Any], tune_config: tune.TuneConfig, run_config: object) -> None:
        self.trainable, self.config = trainable, tune_config

    def fit(self) -> Results:
        of, results = self.config.search_alg, Results()
        assert isinstance(of, HilnasSearcher)
        for trial in map(str, range(self.config.num_samples)):
            config = of.suggest(trial)
            try:
                results.append(self.trainable(config))
            except RuntimeError:
                results.append({})
                results.num_errors += 1
            of.on_trial_complete(trial, results[-1], error=not results[-1])
        return results


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Tuner", InlineTuner)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.mark.parametrize("tuner", mostly_exhaustive(["inline", "cluster"], "inline"))
@pytest.mark.filterwarnings("ignore")
def test_the_example_runs(tuner: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(tuner)
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(example, PAGE.name, "exec"), names)
    of, results = names["search"](tmp_path)
    state = of.proposer.state()
    statuses = [record["status"] for record in state["observations"]]
    assert len(state["proposals"]) == len(statuses) == len(results) == 6
    assert statuses.count("failed") == results.num_errors
    assert set(statuses) == {"complete", "infeasible", "failed"}
