"""Objectives and merges against those of TRL and mergekit, recorded by benchmarks/posttrain_references.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.core.task import IGNORE
from nas.model.nn.primitives import generator_of
from nas.train.posttrain.merging import MergeSettings, Method, della_rates, dropped, merge_tensors, trim
from nas.train.posttrain.objective import answer_nats
from nas.train.posttrain.prefer import preference_loss

FOLDER = Path(__file__).parents[1] / "data/posttrain_references"
TRL, MERGEKIT = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("trl", "mergekit"))
BASE, MODELS = torch.tensor(MERGEKIT["base"]), [torch.tensor(model) for model in MERGEKIT["models"]]


class FakeModel:
    """A model whose logits are given."""

    def __init__(self, logits: list[Any]) -> None:
        self._logits = torch.tensor(logits)
        self.layout = SimpleNamespace(vocab=self._logits.shape[-1])

    def packed_features(self, inputs: Tensor, needed: Tensor) -> Tensor:
        return self._logits[:, :-1][needed]

    def logits(self, features: Tensor) -> Tensor:
        return features


def nats(logits: list[Any], labels: Tensor) -> tuple[Tensor, Tensor]:
    model: Any = FakeModel(logits)
    return answer_nats(model, labels[:, :-1], labels[:, 1:])


def test_the_loss_of_answers_is_trl_s() -> None:
    losses, _ = nats(TRL["policy"], torch.tensor(TRL["sft"]["labels"]))
    assert float(losses.mean()) == pytest.approx(TRL["sft"]["value"], rel=1e-6)


@pytest.mark.parametrize("case", TRL["losses"], ids=lambda case: f"{case['loss']}-{case['beta']:g}")
def test_losses_of_pairs_are_trl_s(case: dict[str, Any]) -> None:
    mask = torch.tensor(TRL["one_token" if case["one_token"] else "answers"])
    labels = torch.tensor(TRL["ids"]).masked_fill(mask == 0, IGNORE)
    policy, reference = (
        torch.zeros(len(labels)).index_add(0, rows, -losses)
        for losses, rows in (nats(TRL[name], labels) for name in ("policy", "reference"))
    )
    if case["loss"] == "simpo":  # which has no reference; its margin is gamma
        reference = torch.zeros_like(policy)

    def pairs(values: Tensor) -> Tensor:
        return torch.stack(values.chunk(2), -1)

    absolute = case["loss"] == "apo_zero"
    loss = preference_loss(
        pairs(policy), pairs(reference), pairs(mask.sum(1)), beta=case["beta"], margin=case.get("margin", 0.0),
        relative=float(not absolute), absolute=float(absolute),
    ).mean()  # fmt: skip
    # TRL adds the constant 1 to APO-zero.
    assert float(loss) + absolute == pytest.approx(case["value"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", MERGEKIT["cases"], ids=lambda c: f"{c['method']}-{c['density']}-{c['weights'][0]:.1f}")
def test_merges_are_mergekit_s(case: dict[str, Any]) -> None:
    method: Method = case["method"].replace("_", "-")
    settings = MergeSettings(method=method, weights=tuple(case["weights"]), density=case["density"])
    result, expected = merge_tensors("w", MODELS, BASE, settings), torch.tensor(case["value"])
    if method.startswith("dare"):  # mergekit was asked to leave out its rescaling, which is not by 1 / density
        expected = BASE + (expected - BASE) / case["density"]
    if method != "ties" or len(set(case["weights"])) == 1:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)
        return
    # mergekit elects signs of weighted task vectors, the report's equation 20 those of the vectors themselves.
    weights = torch.tensor(case["weights"]).view(-1, 1, 1)
    tasks = torch.stack([trim(model - BASE, case["density"]) for model in MODELS])
    agrees = (tasks.sign() == (weights * tasks).sum(0).sign()) * weights
    mean = (agrees * tasks).sum(0) / agrees.sum(0).where(agrees.sum(0) > 0, 1.0)
    torch.testing.assert_close(BASE + mean, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", MERGEKIT["della"], ids=lambda case: f"{case['density']}")
def test_della_drops_what_mergekit_drops(case: dict[str, Any]) -> None:
    """For one row and after translating its epsilon: mergekit ranks by row, from 0 to n - 1, and mean +- epsilon."""
    count = BASE.numel()
    density, epsilon = case["density"] - case["epsilon"] / (count - 1), 2 * case["epsilon"] * count / (count - 1)
    for number, (model, expected) in enumerate(zip(MODELS, case["value"], strict=True)):
        task = model - BASE
        rates = della_rates(task, 1 - density, epsilon)
        result = dropped(task, rates, generator_of(0, f"{number}:w"))
        torch.testing.assert_close(result * (1 - rates), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_soups_are_mergekit_s() -> None:
    settings = MergeSettings(weights=tuple(MERGEKIT["soup"]["weights"]))
    expected = torch.tensor(MERGEKIT["soup"]["value"])
    torch.testing.assert_close(merge_tensors("w", MODELS, None, settings), expected, rtol=1e-5, atol=1e-6)
