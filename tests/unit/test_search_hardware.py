"""Hardware models, on made-up devices whose truth is known."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from hardware_devices import CHAT, costs, draw, measured

from nas.core.layout import Layout
from nas.search.proposers.hardware import _KIND_TERMS, TERMS, Costs, Estimate, HardwareModel, Measured, better

LAYOUTS = draw(60)
TRAINING, UNSEEN = LAYOUTS[:30], LAYOUTS[30:]
EXACT = measured(UNSEEN, noise=0.0)


def off(estimate: Estimate, truth: Measured) -> float:
    return float(np.abs(np.expm1(estimate.mean - truth.logs)).mean())


def test_thirty_measurements_tell_thirty_others() -> None:
    estimate = HardwareModel(costs(), measured(TRAINING)).predict(UNSEEN)
    constant = Estimate(np.full(30, measured(TRAINING).logs.mean()), np.zeros(30))
    assert off(estimate, EXACT) < 0.02 < 0.1 < off(constant, EXACT)
    assert np.corrcoef(estimate.mean, EXACT.logs)[0, 1] > 0.98


def test_a_handful_moves_a_model_to_another_device() -> None:
    device = {"fast": 1.8, "attention": 1.3}
    truth, few = measured(UNSEEN, noise=0.0, **device), measured(TRAINING[:5], seed=1, **device)
    base = HardwareModel(costs(), measured(TRAINING))
    moved = base.moved(few)
    assert off(moved.predict(UNSEEN), truth) < 0.04
    assert off(moved.predict(UNSEEN), truth) < off(HardwareModel(costs(), few).predict(UNSEEN), truth)
    assert off(base.predict(UNSEEN), truth) > 0.3  # as it was, it is of no use for that device


def test_more_measurements_make_a_moved_model_as_good_as_one_of_its_own() -> None:
    device = {"fast": 0.5, "attention": 2.0}
    truth = measured(UNSEEN, noise=0.0, **device)
    moved = HardwareModel(costs(), measured(TRAINING)).moved(measured(TRAINING, seed=1, **device))
    assert off(moved.predict(UNSEEN), truth) < 0.03


def test_what_is_left_out_is_not_seen() -> None:
    sample = measured(TRAINING[:12])
    before = HardwareModel(costs(), sample)
    logs = sample.logs.copy()
    logs[4] += 3.0
    after = HardwareModel(costs(), Measured(sample.layouts, logs, sample.noise), weights=before.weights)
    assert after.left_out().mean[4] == pytest.approx(before.left_out().mean[4])
    assert after.left_out().mean[5] != pytest.approx(before.left_out().mean[5])


def test_doubt_covers_what_the_model_cannot_tell() -> None:
    """A figure that follows from nothing that the model knows: its intervals must say so."""
    rng = np.random.default_rng(0)
    chance = Measured(TRAINING, 0.2 * rng.standard_normal(30), np.full(30, 0.001))
    model = HardwareModel(costs(), chance)
    unseen = 0.2 * rng.standard_normal(30)
    inside = np.abs(model.predict(UNSEEN).mean - unseen) < 2 * model.predict(UNSEEN).sd
    assert inside.mean() > 0.8


def test_the_same_measurements_in_another_order_give_the_same_model() -> None:
    sample = measured(TRAINING)
    turned = HardwareModel(costs(), sample.of(range(29, -1, -1))).predict(UNSEEN)
    assert turned.mean == pytest.approx(HardwareModel(costs(), sample).predict(UNSEEN).mean, abs=2e-3)


def test_better_is_what_errs_less() -> None:
    model = HardwareModel(costs(), measured(TRAINING))
    misled = HardwareModel(costs(), Measured(TRAINING, measured(TRAINING).logs[::-1].copy(), np.zeros(30)))
    assert better(misled.moved(measured(TRAINING)), model) is model


def test_a_device_that_is_an_exact_multiple_is_forecast_exactly() -> None:
    base = HardwareModel(costs(), measured(TRAINING))
    for spread in (0.0, 1e-8, 1e-5):
        away = 2.0 + spread * np.random.default_rng(0).standard_normal(len(LAYOUTS))
        logs = base.predict(LAYOUTS).mean + away
        few = Measured(TRAINING[:6], logs[:6], np.zeros(6))
        estimate = base.moved(few).predict(UNSEEN)
        assert np.abs(estimate.mean - logs[30:]).max() <= 5 * spread + 1e-12
        assert estimate.sd.max() < 0.5


def test_measured_layouts_that_hardly_differ_leave_forecasts_of_others_bounded() -> None:
    stack = "d128 v512 ffn=swiglu:{} [C{} A8/{} C3]"
    alike = [Layout.parse(stack.format(320 + 32 * (n % 4), 3 + n % 2, 4 // (1 + n // 4))) for n in range(8)]
    estimate = HardwareModel(costs(), measured(alike)).predict(UNSEEN)
    assert np.abs(estimate.mean - EXACT.logs).max() < 2
    assert estimate.sd.max() < 100


def test_weights_that_layers_share_are_held_once_and_read_twice() -> None:
    amounts = Costs(CHAT, ["conv", "swiglu"])
    twice, shared = amounts._amounts([Layout.parse(f"d512 v8192 ffn=swiglu:1024 [C3 {c}]") for c in ("C3", "^0")])
    expected = twice.copy()
    held = [TERMS.index("held"), *(len(TERMS) + len(_KIND_TERMS) * kind + _KIND_TERMS.index("held") for kind in (0, 1))]
    expected[held] /= 2
    assert shared.tolist() == expected.tolist() and shared[TERMS.index("read")] > shared[TERMS.index("held")]


def test_terms_are_those_of_the_layout() -> None:
    layout = Layout.parse("d512 v8192 ffn=swiglu:1024 [C3 A8/4+swiglu:2048]")
    (row,) = Costs(CHAT, ["conv", "gqa", "swiglu"]).terms([layout])
    named = dict(zip(TERMS, row, strict=True))
    assert layout.params.non_embedding - named["held"] == 5 * 512  # norms
    assert named["table"] == 512 * 8192 == layout.params.total - layout.params.non_embedding
    assert named["cache"] == layout.kv_bytes(4096)
    assert named["state"] == layout.state_bytes()
    assert named["widest"] == 3 * 2048
    assert named["decode"] > named["prompt"] > 0


def test_memory_depends_on_no_work_and_time_on_no_buffers() -> None:
    counts = {unit: costs(unit=unit).terms(TRAINING[:2]).shape[1] for unit in ("MB", "ms", "")}
    assert counts == {"MB": len(TERMS) - 3, "ms": len(TERMS) - 1, "": len(TERMS)}


def test_figures_of_one_workload_share_what_is_counted_and_keep_their_terms() -> None:
    memory = costs(unit="MB")
    memory.sums(TRAINING)
    time, alone = memory.of("ms"), costs(unit="ms")
    for shared, expected in (
        (time.terms(TRAINING), alone.terms(TRAINING)),
        (time.sums(TRAINING), alone.sums(TRAINING)),
    ):
        assert shared.shape == expected.shape and (shared == expected).all()
    assert memory.terms(TRAINING[:2]).shape[1] == len(TERMS) - 3


def test_kinds_that_are_not_told_apart_count_with_the_whole() -> None:
    one_kind, all_kinds = Costs(CHAT, ["conv"]), costs(unit="")
    assert one_kind.terms(TRAINING) == pytest.approx(all_kinds.terms(TRAINING))
    assert one_kind.tracks(TRAINING).shape[1] < all_kinds.tracks(TRAINING).shape[1]


def test_the_benchmark_states_the_noise_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("hardware_model")
    rounds = np.exp(0.08 * np.random.default_rng(0).standard_normal((4000, 3)))
    assert benchmark.noise_of(rounds) == pytest.approx(np.log(np.median(rounds, axis=1)).std(), rel=0.04)
