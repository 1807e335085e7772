"""The report's figures, ratios next to them, and tables and plots of a comparison."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure as Picture

from nas.core.errors import InvalidInput
from nas.core.family import ComparedModel, Comparison, MeasuredModel, RecordedFigure
from nas.train.compare.lfm2_report import COLUMNS, HX370, REPORT, S25, ratios, report_ratios, size_class
from nas.train.compare.tables import _write_names, check_plot, draw_comparison, figures_table, ratios_table, reasons

SPEEDS = {"prefill_tps": 100.0, "decode_tps": 10.0}


def model(name: str, parameters: int, scale: float, *, member: bool = False, missing: str = "") -> ComparedModel:
    figures = [
        RecordedFigure(
            metric=metric, prompt=prompt, value=None if missing else SPEEDS[metric] * scale, ci95=None, reason=missing
        )
        for metric, prompt in COLUMNS
    ]
    peak = RecordedFigure(metric="peak_rss", prompt=32768, value=1234.5, ci95=None, reason="")
    return ComparedModel(
        name=name, member=member, parameters=parameters, architecture="lfm2", source="",
        measured=MeasuredModel(
            device="box", runtime="llama.cpp", quantisation="q4_0", threads=1, figures=(*figures, peak), searched=False
        ),
    )  # fmt: skip


def record(*models: ComparedModel) -> Comparison:
    return Comparison(
        family="demo", device="box", conditions={"threads": "1", "cpu": "a | cpu"}, made="2026-01-01T00:00:00+00:00",
        models=models, ratios=tuple(ratios(models)), notes=("why",),
    )  # fmt: skip


MEMBER = model("demo-350M", 350_000_000, 3.0, member=True)
LFM2 = model("LFM2-350M", 354_483_968, 2.0)
GRANITE = model("Granite-4.0-350M", 352_379_904, 1.0)
QWEN = model("Qwen3-0.6B", 596_049_920, 0.5)
GRANITE_H = model("Granite-4.0-H-350M", 340_332_224, 1.0, missing="out_of_memory: too much")


def test_the_report_has_the_same_models_on_both_devices() -> None:
    assert set(REPORT) == {S25, HX370}
    assert set(REPORT[S25]) == set(REPORT[HX370])
    assert {len(rows) for rows in REPORT.values()} == {20}
    assert all(len(values) == 4 for rows in REPORT.values() for values in rows.values())


def test_the_reports_text_follows_from_its_tables() -> None:
    """Section 2.4, on the phone: what it says of its tables."""

    def between(model: str, other: str, metric: str) -> list[float]:
        return sorted(report_ratios(model, other, m, at)[S25] for m, at in COLUMNS if m == metric)

    assert between("LFM2-350M", "Granite-4.0-350M", "prefill_tps") == pytest.approx([2.02, 3.13], abs=0.01)
    assert between("LFM2-350M", "Granite-4.0-350M", "decode_tps") == pytest.approx([1.46, 2.03], abs=0.01)
    assert between("LFM2-700M", "Qwen3-0.6B", "prefill_tps") == pytest.approx([1.64, 2.51], abs=0.01)
    assert between("LFM2-700M", "Qwen3-0.6B", "decode_tps") == pytest.approx([1.36, 1.92], abs=0.01)
    assert between("LFM2-1.2B", "Gemma-3-1B", "prefill_tps") == pytest.approx([0.75, 0.89], abs=0.01)
    assert between("LFM2-1.2B", "Llama-3.2-1B", "decode_tps") == pytest.approx([1.28, 1.47], abs=0.01)
    assert between("LFM2-8B-A1B", "Qwen3-4B", "decode_tps") == pytest.approx([2.83, 3.68], abs=0.01)


def test_what_the_report_did_not_measure_has_no_ratio() -> None:
    assert report_ratios("LFM2-350M", "PLM-1.8B", "prefill_tps", 1024) == {}
    assert report_ratios("LFM2-350M", "Granite-4.0-350M", "ttft", 1024) == {}


def test_ratios_are_within_a_class_with_the_member_or_lfm2_first() -> None:
    pairs = {(ratio.model, ratio.other): ratio for ratio in ratios([MEMBER, LFM2, GRANITE, QWEN])}
    assert set(pairs) == {
        ("demo-350M", "LFM2-350M"), ("demo-350M", "Granite-4.0-350M"), ("LFM2-350M", "Granite-4.0-350M")
    }  # fmt: skip
    assert pairs["LFM2-350M", "Granite-4.0-350M"].here == 2.0
    assert pairs["LFM2-350M", "Granite-4.0-350M"].report == pytest.approx({S25: 143.8 / 70.7, HX370: 170.5 / 166.2})
    assert pairs["demo-350M", "LFM2-350M"].report == {}


def test_a_missing_figure_gives_no_ratio() -> None:
    assert {ratio.here for ratio in ratios([LFM2, GRANITE_H])} == {None}


@pytest.mark.parametrize(
    ("parameters", "name"),
    [(128_989_632, "350M"), (742_489_344, "700M"), (1_825_458_176, "1B"), (8_339_929_856, "3B")],
)
def test_classes_are_the_reports(parameters: int, name: str) -> None:
    assert size_class(parameters) == name


def test_the_table_is_the_reports() -> None:
    columns, rows = figures_table(record(MEMBER, GRANITE_H))
    assert columns == [
        "model", "parameters", "prefill tok/s 1K", "prefill tok/s 4K", "decode tok/s 1K", "decode tok/s 4K",
        "peak memory MB 32K",
    ]  # fmt: skip
    assert rows[0] == ["demo-350M (member)", "350M", "300", "300", "30", "30", "1,234"]
    assert rows[1][2:] == ["-", "-", "-", "-", "1,234"]


def test_ratios_are_shown_next_to_the_reports() -> None:
    columns, rows = ratios_table(record(LFM2, GRANITE))
    assert columns == ["faster", "than", "prefill 1K", "prefill 4K", "decode 1K", "decode 4K"]
    assert rows == [
        ["LFM2-350M", "Granite-4.0-350M", "2.00 / 2.02 / 1.37", "2.00 / 3.13 / 1.89", "2.00 / 1.46 / 0.92",
         "2.00 / 2.03 / 1.03"]
    ]  # fmt: skip


def test_missing_figures_are_explained() -> None:
    assert list(reasons(record(MEMBER, GRANITE_H))) == [
        "Granite-4.0-H-350M: prefill tok/s 1K, prefill tok/s 4K, decode tok/s 1K, decode tok/s 4K: "
        "out_of_memory: too much"
    ]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_plot_names_every_model_that_has_figures(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"speed.{suffix}"
    draw_comparison(record(MEMBER, LFM2, GRANITE_H), path)
    first = path.read_bytes()
    assert first
    if suffix == "svg":
        text = " ".join(ElementTree.parse(path).getroot().itertext())
        assert re.search(r"demo-350M", text)
        assert "LFM2-350M" in text
        assert "Granite" not in text
        draw_comparison(record(MEMBER, LFM2, GRANITE_H), path)
        assert path.read_bytes() == first


def test_names_of_models_at_the_same_point_do_not_overlap() -> None:
    panel = Picture().subplots()
    panel.scatter([1, 1, 1, 5], [1, 1, 1.001, 9])
    _write_names(panel, [("one", 1, 1), ("two", 1, 1), ("three", 1, 1.001), ("alone", 5, 9)])
    below = {text.get_text(): text.xyann[1] for text in panel.texts}  # type: ignore[attr-defined]
    assert below["alone"] == below["three"] > below["one"] > below["two"]
    assert below["one"] - below["two"] == pytest.approx(9)
    assert [text.arrow_patch is None for text in panel.texts] == [True, True, False, False]  # type: ignore[attr-defined]


def test_an_unknown_plot_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--plot: .*\.png, \.svg, \.pdf"):
        draw_comparison(record(MEMBER), tmp_path / "speed.gif")


def test_a_plot_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--plot: there is no folder"):
        check_plot(tmp_path / "nowhere" / "speed.svg")
