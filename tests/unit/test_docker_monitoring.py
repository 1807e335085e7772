"""The alert rules and the Grafana board name metrics and labels that the coordinator's endpoint has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_lab import Lab
from prometheus_client.parser import text_string_to_metric_families
from store_support import put

from nas.infra.store import calibrations
from nas.infra.store.calibrations import FASTER_LIMIT, SLOWER_LIMIT, ReferenceRun
from nas.infra.store.rows import Role
from nas.infra.web.metrics import RESULTS

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "monitoring"
RULES = [
    rule for group in yaml.safe_load((FOLDER / "hilnas.rules.yml").read_text())["groups"] for rule in group["rules"]
]
BOARD: dict[str, Any] = json.loads((FOLDER / "hilnas.grafana.json").read_text())
PANELS = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [*((rule["alert"], rule["expr"]) for rule in RULES), *((title, query["expr"]) for title, query in PANELS)]
NAMED = re.compile(r"(hilnas_[a-z_]+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name -> labels of the samples of a coordinator at which everything has happened once."""
    lab = Lab(tmp_path_factory.mktemp("monitoring"))
    put(lab.store, "a")
    calibrations.put(lab.store, "box", "fake", "b1", 12.5, {})
    calibrations.note_runs(lab.store, ("box", "fake", "b1"), "job", [ReferenceRun(1.1, 41.5, True)] * 9, 12.5)
    RESULTS.labels("accepted").inc()
    lab.client().get("/v1/devices")
    text = lab.client(Role.READ).get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def named(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yields every metric of an expression with the labels that select from it."""
    for name, labels in NAMED.findall(expression):
        yield name, set(re.findall(r"([a-z_]+) *[=!]", labels))


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_and_label_exists(endpoint: dict[str, set[str]], where: str, expression: str) -> None:
    metrics = [*named(expression)]
    assert metrics or where == "HilnasDown"  # `up` is Prometheus' own
    for name, labels in metrics:
        assert name in endpoint
        assert labels <= endpoint[name]


def test_texts_name_labels_of_their_metrics(endpoint: dict[str, set[str]]) -> None:
    texts = [(rule["expr"], " ".join(rule["annotations"].values()), r"\$labels\.([a-z_]+)") for rule in RULES]
    texts += [(target["expr"], target["legendFormat"], r"\{\{([a-z_]+)\}\}") for _, target in PANELS]
    all_names = set[str]()
    for expression, text, pattern in texts:
        labels = {"instance", "job"}.union(*(endpoint[name] for name, _ in named(expression)))
        names = set(re.findall(pattern, text))
        assert names <= labels, (expression, text)
        all_names |= names
    assert {"instance", "route"} <= all_names, "the one stands in rules only, the other in panels only"


def test_drift_alerts_at_the_limits_of_a_calibration() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "HilnasDeviceDrift"]
    assert f"> {SLOWER_LIMIT} " in rule["expr"] and rule["expr"].endswith(f"< -{FASTER_LIMIT}")


def test_refused_results_are_compared_with_all_results() -> None:
    """Series are compared with those of the same labels, so the verdict has to be summed away."""
    (rule,) = [rule for rule in RULES if rule["alert"] == "HilnasResultsRefused"]
    refused, results = rule["expr"].split(" > 0.1 * ")
    assert refused == 'sum by (instance) (rate(hilnas_results_total{verdict="refused"}[15m]))'
    assert results == refused.replace('{verdict="refused"}', "")


def test_rules_and_panels_are_whole() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len(set(places)) == len(places) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in BOARD["panels"])
