"""`nas quantise`: which types are taken under budgets, and what decides. Costs are given, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nas.core import paths
from nas.core.errors import CandidateFailed, InvalidInput
from nas.core.limit import Limit
from nas.core.measurement import Figure
from nas.core.workload import Workload
from nas.measure.runtimes.llama_cpp.binding import Divergence
from nas.train.adapt import quantise
from nas.train.adapt.quantise import Quantised, Quantiser, QuantiseRequest, Score, Slot

pytestmark = pytest.mark.usefixtures("home")

SLOTS = {Slot("attn_q", 0): ["blk.0.attn_q.weight"], Slot("ffn_up", 0): ["blk.0.ffn_up.weight"]}
ROW = 256
TIMES = {"q8_0": 10.0, "q4_0": 6.0, "iq4_nl": 14.0}
"""Type -> ms of a token of a file of it: the smaller iq4_nl has a slow kernel."""
LOSSES = {"q8_0": 0.0, "q4_0": 0.2, "iq4_nl": 0.1}


class GivenCosts(Quantiser):
    """Takes losses and figures of types from the tables above, and those of whole files from lists."""

    slots = cast(Any, SLOTS)
    whole: Mapping[str, list[float]]
    """Name of a text, or metric -> figures of whole files in order."""

    @property
    def _base(self) -> Any:
        tensors = {names[0]: SimpleNamespace(shape=(256, ROW)) for names in SLOTS.values()}
        return SimpleNamespace(tensors=tensors, files=[self._request.source])

    def _losses(self, base_kl: float) -> dict[tuple[Slot, str], float]:
        return {(slot, kind): loss for slot in SLOTS for kind, loss in LOSSES.items()}

    def _type_figures(self, losses: Mapping[tuple[Slot, str], float]) -> dict[str, Mapping[str, float]]:
        return {kind: {"decode_p50": time} for kind, time in TIMES.items()}

    def _write(self, types: Mapping[Slot, str], path: Path) -> None:
        path.write_bytes(bytes(round(sum(self._bytes(slot, kind) for slot, kind in types.items()))))

    def _measured(self, files: Sequence[Path]) -> Any:
        value = self.whole["decode_p50"].pop(0) if "decode_p50" in self.whole else 1.0
        return [{"decode_p50": Figure(value=value, low=value, high=value, n=5, log_sd=0.01, unit="ms")}]

    def mixture(self, name: str, *, importance: bool = True) -> Score:
        return Score(name, 1, (0.0, 0.0), 1.0, 1.0)

    def _divergence(self, types: Mapping[Slot, str], text: str) -> Divergence:
        kl = self.whole[text].pop(0) if text in self.whole else 0.0
        return Divergence([kl] * 4, [1.0], [1], [1.0])

    def _predictions(self, name: str) -> Path:
        return self._folder


class FailsInOnePlace(GivenCosts):
    """Figures of types are measured; llama.cpp makes no Q4_0 of ffn_up, and so no file of the mixture."""

    def _losses(self, base_kl: float) -> dict[tuple[Slot, str], float]:
        losses = super()._losses(base_kl)
        del losses[Slot("ffn_up", 0), "q4_0"]
        return losses

    def _type_figures(self, losses: Mapping[tuple[Slot, str], float]) -> dict[str, Mapping[str, float]]:
        return Quantiser._type_figures(self, losses)

    def _write(self, types: Mapping[Slot, str], path: Path) -> None:
        if types.get(Slot("ffn_up", 0)) == "q4_0":
            raise CandidateFailed("crash", "quantized data validation failed")
        super()._write(types, path)

    def _measured(self, files: Sequence[Path]) -> Any:
        times = [TIMES.get(file.stem, 8.0) for file in files]
        return [{"decode_p50": Figure(value=ms, low=ms, high=ms, n=5, log_sd=0.01, unit="ms")} for ms in times]

    def mixture(self, name: str, *, importance: bool = True) -> Score:
        if name == "q4_0":
            raise CandidateFailed("crash", "quantized data validation failed")
        return super().mixture(name)


def chosen(
    folder: Path,
    *budgets: str,
    of: type[GivenCosts] = GivenCosts,
    kinds: Sequence[str] = tuple(TIMES),
    log: Callable[[Any], None] = print,
    kl: float | None = None,
    whole: Mapping[str, list[float]] | None = None,
) -> Quantised:
    source = folder / "source.gguf"
    source.write_bytes(bytes(2 * 256 * 256 // 32 * 34))
    request = QuantiseRequest(
        source=source,
        chosen_on="",
        reported_on="",
        importance_from="",
        limits=[Limit.parse(budget) for budget in budgets],
        kl=kl,
        minimise="kl" if kl is None else "file_size",
        types=kinds,
        parts=1,
        windows=2,
        device="local",
        workload=Workload(),
        repetitions=1,
        threads=1,
    )
    quantiser = of(request, cast(Any, None), folder, log)
    quantiser.whole = whole or {}
    return quantiser.choose(folder / "out.gguf")


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
    budgets: tuple[str, ...], types: set[str], tmp_path: Path
) -> None:
    assert set(chosen(tmp_path, *budgets).types.values()) == types


def test_types_that_fit_no_tensor_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_quantise_types.ROW", 96)
    lines: list[Any] = []
    chosen(tmp_path, "file_size<=1MB", kinds=("q4_k", "q4_0", "iq4_xs"), log=lines.append)
    assert "q4_k, iq4_xs left out: no tensor has rows of a multiple of the type's block" in lines


def test_types_are_chosen_again_by_text_and_runs_that_are_not_reported(tmp_path: Path) -> None:
    whole = {"chosen_on": [0.0], "decided_on": [0.6, 0.3], "reported_on": [0.5, 0.5]}
    result = chosen(tmp_path, kl=0.35, whole=whole)
    assert set(result.types.values()) == {"q8_0", "iq4_nl"} and not any(whole.values())
    (check,) = result.checks
    assert (str(check.limit), check.figure.value, check.verdict) == ("kl <= 0.35 nats/token", 0.5, "broken")
    assert result.score.kl[0] == 0.5 and not result.keeps_all
    times = {"decode_p50": [10.0, 6.0, 6.5]}
    assert chosen(tmp_path, "decode_p50<=9ms", whole=times).figures["decode_p50"].value == 6.5


def test_a_type_that_fails_in_one_place_is_taken_in_others(tmp_path: Path) -> None:
    lines: list[Any] = []
    result = chosen(tmp_path, "decode_p50<=9ms", of=FailsInOnePlace, log=lines.append)
    assert {slot.role: kind for slot, kind in result.types.items()} == {"attn_q": "q4_0", "ffn_up": "q8_0"}
    assert [score.name for score in result.beside] == ["q8_0", "q4_k_m"]
    assert "q4_0 is left out: quantized data validation failed" in lines


def test_types_are_chosen_four_times_at_most(tmp_path: Path) -> None:
    lines: list[Any] = []
    whole = {"decided_on": [0.36] * 3}
    assert chosen(tmp_path, kl=0.35, whole=whole, log=lines.append).keeps_all and not any(whole.values())
    again = [line for line in lines if "choosing again" in str(line)]
    assert again == [f"the file breaks kl: choosing again ({number})" for number in (2, 3, 4)]


def test_a_budget_that_no_choice_keeps_is_named_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"decode_p50 6 \(limit 9, lowered to 3\.6\)"):
        chosen(tmp_path, "decode_p50<=9ms", whole={"decode_p50": [20.0]})


def test_a_run_has_its_own_copy_of_the_importance_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def write_importance(build: object, model: Path, text: str, destination: Path, threads: int) -> None:
        computed.append(text)
        destination.write_bytes(b"matrix")

    def importance(folder: Path) -> Path | None:
        folder.mkdir()
        return Quantiser(request, build, folder, lambda line: None).importance

    monkeypatch.setattr(quantise, "write_importance", write_importance)
    (tmp_path / "source.gguf").touch()
    request = cast(Any, SimpleNamespace(source=tmp_path / "source.gguf", importance_from="a text", threads=1))
    build = cast(Any, SimpleNamespace(runner=SimpleNamespace(build="b1")))
    first, second = importance(tmp_path / "first"), importance(tmp_path / "second")
    assert computed == ["a text"] and first == tmp_path / "first" / "importance.gguf"
    assert second is not None and second.read_bytes() == b"matrix"
    for file in (paths.cache() / "divergences").glob("*.imatrix.gguf"):
        file.unlink()  # as `nas gc` does
    assert importance(tmp_path / "third") and len(computed) == 2 and second.is_file()
