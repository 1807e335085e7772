"""`nas quantise`: which types are taken where figures of the device are budgets. Costs are given, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nas.core.limit import Limit
from nas.core.workload import Workload
from nas.measure.runtimes.llama_cpp.binding import Divergence
from nas.train.adapt.quantise import Quantised, Quantiser, QuantiseRequest, Score, Slot

SLOTS = {Slot("attn_q", 0): ["blk.0.attn_q.weight"], Slot("ffn_up", 0): ["blk.0.ffn_up.weight"]}
ROW = 256
TIMES = {"q8_0": 10.0, "q4_0": 6.0, "iq4_nl": 14.0}
"""Type -> ms of a token of a file of it: the smaller iq4_nl has a slow kernel."""
LOSSES = {"q8_0": 0.0, "q4_0": 0.2, "iq4_nl": 0.1}


class GivenCosts(Quantiser):
    """Takes losses and figures from the tables above."""

    slots = cast(Any, SLOTS)

    @property
    def _base(self) -> Any:
        tensors = {names[0]: SimpleNamespace(shape=(256, ROW)) for names in SLOTS.values()}
        return SimpleNamespace(tensors=tensors, files=[self._request.source])

    def _losses(self, base_kl: float) -> dict[tuple[Slot, str], float]:
        return {(slot, kind): loss for slot in SLOTS for kind, loss in LOSSES.items()}

    def _type_figures(self) -> dict[str, Mapping[str, float]]:
        return {kind: {"decode_p50": time} for kind, time in TIMES.items()}

    def _checked(
        self, types: Mapping[Slot, str], expected: Mapping[str, float], beside: Sequence[Score], destination: Path
    ) -> Quantised:
        return Quantised(types, expected, Score("chosen", 1, (0.0, 0.0), 1.0, 1.0), beside)

    def mixture(self, name: str, *, importance: bool = True) -> Score:
        return Score(name, 1, (0.0, 0.0), 1.0, 1.0)

    def _divergence(self, types: Mapping[Slot, str], text: str) -> Divergence:
        return Divergence([0.0], [1.0], [1], [1.0])

    def _predictions(self, name: str) -> Path:
        return self._folder


def chosen(
    folder: Path, *budgets: str, kinds: Sequence[str] = tuple(TIMES), log: Callable[[Any], None] = print
) -> set[str]:
    source = folder / "source.gguf"
    source.write_bytes(bytes(2 * 256 * 256 // 32 * 34))
    request = QuantiseRequest(
        source=source,
        chosen_on="",
        reported_on="",
        importance_from="",
        limits=[Limit.parse(budget) for budget in budgets],
        kl=None,
        minimise="kl",
        types=kinds,
        parts=1,
        windows=2,
        device="local",
        workload=Workload(),
        repetitions=1,
        threads=1,
    )
    types = GivenCosts(request, cast(Any, None), folder, log).choose(folder / "out.gguf").types
    return set(types.values())


@pytest.mark.parametrize(
    ("budgets", "types"),
    [
        (("file_size<=0.08MB",), {"iq4_nl"}),
        (("decode_p50<=11ms",), {"q8_0"}),
        (("file_size<=0.08MB", "decode_p50<=11ms"), {"iq4_nl", "q4_0"}),
        (("file_size<=0.08MB", "decode_p50<=7ms"), {"q4_0"}),
        (("decode_p50<=9ms",), {"q8_0", "q4_0"}),
    ],
)
def test_a_type_that_is_smaller_and_slower_is_not_taken_under_a_budget_of_time(
    budgets: tuple[str, ...], types: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    assert chosen(tmp_path, *budgets) == types


def test_types_that_fit_no_tensor_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("test_quantise_types.ROW", 96)
    lines: list[Any] = []
    chosen(tmp_path, "file_size<=1MB", kinds=("q4_k", "q4_0", "iq4_xs"), log=lines.append)
    assert "q4_k, iq4_xs left out: no tensor has rows of a multiple of the type's block" in lines
