"""`nas space`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ten_mistakes
from cli_runner import nas

from nas.core.layout import Layout
from nas.search.spaces import list_spaces, load_space, space_key


def test_list_names_the_packaged_spaces() -> None:
    spaces = json.loads(nas("space", "list", "--json").out)["spaces"]
    assert {space["name"]: space["doc"] for space in spaces} == list_spaces()
    lines = nas("space", "list").out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["space", *list_spaces()]


def test_show_names_budgets_and_references() -> None:
    text = nas("space", "show", "lfm2").out
    space = load_space("lfm2")
    for budget in space.budgets:
        assert budget.name in text
    for layout in space.references.layouts().values():
        assert layout.format() in text


def test_show_says_what_a_budget_on_quality_asks_for() -> None:
    result = nas("space", "show", "lfm2")
    assert "quality.recall >= 0.8x the published reference" in result.out, result.err


def test_show_as_json_round_trips() -> None:
    space = json.loads(nas("space", "show", "lfm2-demo", "--json").out)
    assert space["key"] == space_key(load_space("lfm2-demo"))
    assert space["name"] == "lfm2-demo"


def test_support_counts_every_sampled_layout() -> None:
    (support,) = json.loads(nas("space", "show", "lfm2-demo", "--support", "--json").out)["support"]
    assert support["runtime"] == "llama.cpp"
    assert 0 < support["admitted"] <= support["stock"] + support["patched"] <= support["sampled"]
    assert set(support["blocks"]) == {"conv", "gqa", "swiglu", "moe"}


def test_support_distinguishes_refused_and_patched_layouts(tmp_path: Path) -> None:
    def support(space: str) -> dict[str, Any]:
        (record,) = json.loads(nas("space", "show", space, "--support", "--json").out)["support"]
        return dict(record)

    text = Path(str(load_space.__code__.co_filename)).with_name("lfm2-mixed-demo.yaml").read_text()
    on_stock = tmp_path / "on-stock.yaml"
    on_stock.write_text(text.replace(", build: any}", "}"))
    mixed, stock = support("lfm2-mixed-demo"), support(str(on_stock))
    assert mixed["admitted"] == mixed["stock"] + mixed["patched"] == mixed["sampled"] and not mixed["refused_for"]
    assert stock["admitted"] == stock["stock"] == mixed["stock"] and not stock["patched_for"]
    assert stock["refused_for"] == mixed["patched_for"] != {}


def test_support_of_each_layout_by_each_runtime(tmp_path: Path) -> None:
    text = Path(str(load_space.__code__.co_filename)).with_name("lfm2-two-runtimes-demo.yaml").read_text()
    odd = tmp_path / "odd.yaml"
    odd.write_text(text.replace("width: [1024, 1280", "width: [1040, 1280"))
    report = json.loads(nas("space", "show", str(odd), "--support", "--json").out)
    llama_cpp, executorch = report["support"]
    assert (llama_cpp["admitted"], llama_cpp["runtime"], executorch["runtime"]) == (200, "llama.cpp", "executorch")
    for row in report["layouts"]:
        wide = "swiglu:1040" in row["layout"]
        assert row["runtimes"]["llama.cpp"]["verdict"] == "stock"
        assert (row["runtimes"]["executorch"]["verdict"] == "no") == wide == (not row["admitted"])
        assert any("groups of 32" in reason for reason in row["runtimes"]["executorch"]["reasons"]) == wide
    admitted = sum(row["admitted"] for row in report["layouts"])
    assert 0 < admitted == executorch["admitted"] < 200
    output = nas("space", "show", str(odd), "--support").out
    assert f"all 2 runtimes: {admitted} of 200 sampled layouts run on each" in output
    assert "latency: latency at chat, geomean of its ratios at 2 places" in output
    # What a search draws runs on both.
    layouts = json.loads(nas("space", "sample", str(odd), "-n", "40", "--json").out)["layouts"]
    assert len(layouts) == 40 and not any("swiglu:1040" in row["layout"] for row in layouts)


def test_validate_reports_file_and_line(tmp_path: Path) -> None:
    text = Path(str(load_space.__code__.co_filename)).with_name("lfm2-demo.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("  gqa:\n", "  gqaa:\n", 1))
    line = next(i for i, row in enumerate(path.read_text().splitlines(), 1) if "gqaa" in row)
    done = nas("space", "validate", str(path))
    assert done.code == 3
    assert f"{path}:{line}:" in done.err
    assert "'gqa'" in done.err
    path.write_text(text)
    assert nas("space", "validate", str(path)).code == 0


@pytest.mark.parametrize(
    "command", [("space", "validate"), ("launch", "--dry-run", "--space"), ("launch", "--yes", "--space")]
)
def test_ten_mistakes_are_ten_lines(command: tuple[str, ...], tmp_path: Path, home: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ten_mistakes.TEXT)
    done = nas(*command, str(path))
    assert done.code == 3
    ten_mistakes.are_found(done.err.removeprefix("error: ").splitlines(), f"{path}:")
    assert not (tmp_path / "home" / "hilnas.db").exists(), "nothing was made"


def test_a_space_whose_layouts_no_runtime_runs_is_not_valid(tmp_path: Path) -> None:
    text = ten_mistakes.TEXT
    for old, new in (
        ("d_model: 250", "d_model: 256"), ("kernal: 3", "kernel: 3"), ("  convv: {kernel: 3}\n", ""),
        (", tag:phone", ""),
        ("  - {name: llamacpp, quantisation: q4_0}\n", ""), ("q4}", "q4_0}"), ("gen: -1", "gen: 8"),
        ("800ms", "800ms, workload: chat"), ("chta", "chat"), ("bohb", "random"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    done = nas("space", "validate", str(path))
    assert done.code == 3 and f"{path}:7: mixers: " in done.err and "no runtime carries one" in done.err
    path.write_text(text.replace("conv: {kernel: 3}", "gqa: {heads: 8, kv_heads: 4}"))
    assert nas("space", "validate", str(path)).code == 0


def test_sample_is_reproducible_and_inside_the_budget() -> None:
    first, again = (json.loads(nas("space", "sample", "lfm2-demo", "-n", "4", "--json").out) for _ in range(2))
    assert first == again
    other = json.loads(nas("space", "sample", "lfm2-demo", "-n", "4", "--seed", "1", "--json").out)
    assert other != first
    total = load_space("lfm2-demo").model.params.total
    for row in first["layouts"]:
        layout = Layout.parse(row["layout"])
        assert layout.id == row["id"]
        assert total.holds(layout.params.total)


def test_unknown_space_offers_the_nearest() -> None:
    done = nas("space", "show", "lfm22")
    assert done.code == 3
    assert "'lfm2'" in done.err
