"""What a training costs, told before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas
from pretrain_lab import LAYOUT, tiny_family

from nas.core.layout import Layout
from nas.core.published import MODELS
from nas.train.pretrain.cost import STATE_BYTES, gpus, timed_flops_per_s, training_cost
from nas.train.pretrain.recipe import Settings, complete

LARGE = Layout.parse(MODELS["LFM2-1.2B"])


def test_compute_is_near_six_flops_a_weight_and_token() -> None:
    recipe, _ = complete(Settings(), LARGE)
    cost = training_cost(LARGE, recipe, 1e11)
    simple = 6 * LARGE.params.active * recipe.tokens
    assert simple < cost.flops < 1.25 * simple, "attention comes on top"
    assert cost.host_seconds == pytest.approx(cost.flops / 1e11)
    assert cost.state_bytes == STATE_BYTES * LARGE.params.total


def test_gpus_differ_by_their_peak_and_have_a_source() -> None:
    recipe, _ = complete(Settings(tokens=10**9), LARGE)
    costs = {cost.gpu: cost for cost in training_cost(LARGE, recipe, 1e11, price_per_hour=2.0).gpus}
    peaks = {gpu.name: gpu.tflops for gpu in gpus()}
    assert costs["A100"].hours / costs["H100"].hours == pytest.approx(peaks["H100"] / peaks["A100"])
    assert costs["H100"].price == pytest.approx(2 * costs["H100"].hours)
    assert costs["H100"].least_gpus == 1
    assert training_cost(Layout.parse(MODELS["LFM2-8B-A1B"]), recipe, 1e11).gpus[0].least_gpus == 2
    assert all(gpu.source for gpu in gpus())


@pytest.mark.parametrize("layout", [LAYOUT, Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")])
def test_the_machine_is_timed(layout: Layout) -> None:
    assert timed_flops_per_s(layout) > 0


def test_a_dry_run_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_family(tmp_path, monkeypatch)
    command = ("family", "train", "tiny", "--size", "1M")
    result = nas(*command, "--dry-run", "--price-per-hour", "2.5")
    assert result.code == 0, result.err
    assert "FLOPs" in result.out and "H100" in result.out and "price at 2.5 an hour" in result.out
    cost = json.loads(nas(*command, "--dry-run", "--json", "--tokens", "1000").out)
    assert (cost["tokens"], cost["gpus"][0]["price"]) == (1000, None)
    assert "--dry-run" in nas(*command, "--price-per-hour", "1").err
    assert "--corpus: required" in nas(*command).err
    assert not list((tmp_path / "NAS_HOME").rglob("*.safetensors"))
