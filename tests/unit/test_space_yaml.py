"""Every mistake in a search space is reported with file and line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from exhaustive import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from nas.core import model_choices as frame
from nas.core.errors import InvalidInput, UnknownName
from nas.core.plan import MAX_OUTPUT
from nas.core.workload import MAX_GEN
from nas.search.spaces import load_space, parse_space, space_difference, space_key, space_text
from nas.search.spaces.yaml_text import read_yaml

GOOD = """\
v: 1
name: mine
model:
  d_model: 256
  depth: {min: 4, max: 6}
  vocab: 1024
  params:
    total: {min: 1M, max: 20M}
mixers:
  conv:
    kernel: [3, 4]
  gqa: {heads: 8, kv_heads: {choices: [2, 4], scope: layer}}
ffn:
  swiglu:
    width: [256, 512]
limits:
  gqa: {min: 1}
runtimes:
  - {name: llama.cpp, quantisation: q4_0}
workloads:
  chat: {prompt: 64, gen: 16}
budgets:
  - {metric: ttft, max: 1.25x, workload: chat}
  - {metric: peak_rss, max: 512MB, workload: chat}
objectives:
  - {name: quality, metric: quality}
  - {name: latency, metric: latency, workload: chat}
references:
  published: d256 v1024 ffn=swiglu:512 [C3*2 A8/4]
  attention: d256 v1024 ffn=swiglu:512 [A8/4*3]
"""
CUT = st.integers(0, len(GOOD))


def errors(text: str) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        parse_space(text, "mine.yaml")
    return str(caught.value).splitlines()


def with_change(old: str, new: str) -> list[str]:
    assert GOOD.count(old) == 1, old
    return errors(GOOD.replace(old, new))


def test_good_file_is_read() -> None:
    space = parse_space(GOOD, "mine.yaml")
    assert space.model.depth.choices == (4, 5, 6)
    assert space.model.params.total.max == 20_000_000
    assert space.block_space("gqa").knobs["kv_heads"].scope == "layer"
    assert [budget.limit for budget in space.budgets] == [(1.25, True), (512.0, False)]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("  conv:\n", "  convv:\n", "mine.yaml:10: mixers.convv: unknown mixer block 'convv'; did you mean 'conv'?"),
        (
            "  swiglu:\n",
            "  conv:\n",
            "mine.yaml:14: ffn.conv: unknown ffn block 'conv'; valid: geglu, moe, relu2, swiglu",
        ),
        ("  vocab: 1024\n", "  vocap: 1024\n", "mine.yaml:6: model.vocap: unknown key 'vocap'; did you mean 'vocab'?"),
        (
            "min: 1M",
            "min: 30M",
            "mine.yaml:8: model.params.total: impossible parameter budget: max 20,000,000 is below",
        ),
        (
            "min: 1M, max: 20M",
            "min: 10M, max: 20M",
            "mine.yaml:8: model.params.total: impossible parameter budget: the",
        ),
        ("kernel: [3, 4]", "kernel: 0", "mine.yaml:11: mixers.conv.kernel: conv: kernel must be in [2, 64], not 0"),
        ("kernel: [3, 4]", "kernel: [3, x]", "mine.yaml:11: mixers.conv.kernel: a choice must be a number, not 'x'"),
        ("kernel: [3, 4]", "kernel: [3, 3]", "mine.yaml:11: mixers.conv.kernel: a choice occurs twice in [3, 3]"),
        ("kernel: [3, 4]", "kernel: {min: 5, max: 3}", "mine.yaml:11: mixers.conv.kernel: empty range: min 5, max 3"),
        (
            "kernel: [3, 4]",
            "kernel: [3, true]",
            "mine.yaml:11: mixers.conv.kernel: a choice must be a number, not true",
        ),
        ("kernel: [3, 4]", "kernel: [3.5, 4]", "mine.yaml:11: mixers.conv.kernel: conv: kernel must be a whole number"),
        ("{min: 4, max: 6}", "{min: 4.5, max: 6.5}", "mine.yaml:5: model.depth: a range with fractions needs a step"),
        ("{min: 4, max: 6}", "{min: 4.5, max: 6.5, step: 1}", "mine.yaml:5: model.depth: must be from 1 to"),
        (
            "{min: 4, max: 6}",
            "{min: 4, max: 7, step: 2}",
            "mine.yaml:5: model.depth: max is not a whole number of steps",
        ),
        ("{min: 4, max: 6}", "{min: true, max: 6}", "mine.yaml:5: model.depth: a range needs numbers, such as"),
        ("{min: 4, max: 6}", "{max: 6}", "mine.yaml:5: model.depth: a range needs numbers, such as"),
        (
            "{min: 4, max: 6}",
            "{min: 4, max: 6, step: 0}",
            "mine.yaml:5: model.depth: empty range: min 4, max 6, step 0",
        ),
        ("{min: 4, max: 6}", "{min: 4, max: 6, choices: [4]}", "mine.yaml:5: model.depth: give choices, or min and"),
        ("{min: 4, max: 6}", "{min: 4, max: 1e999}", "mine.yaml:5: 1e999 is too large for a number"),
        ("{min: 4, max: 6}", "[4, true]", "mine.yaml:5: model.depth: a choice must be a number, not true"),
        ("gen: 16", "gen: true", "mine.yaml:21: workloads.chat.gen: must be a number, not true"),
        ("min: 1M, max: 20M", "min: 1M, max: true", "mine.yaml:8: model.params.total.max: must be a number, not true"),
        ("min: 1M, max: 20M", "min: 1.5, max: 20M", "mine.yaml:8: model.params.total.min: 1.5 is not a whole number"),
        ("heads: 8, ", "", "mine.yaml:12: mixers.gqa: gqa needs 'heads': query heads"),
        ("1.25x, workload: chat", "1.25x", "mine.yaml:23: budgets.0: ttft needs a workload; valid: chat"),
        ("1.25x, workload: chat", "1.25x, workload: chta", "mine.yaml:23: budgets.0.workload: unknown workload 'chta'"),
        ("metric: ttft", "metric: tfft", "mine.yaml:23: budgets.0: unknown metric 'tfft'; did you mean 'ttft'?"),
        ("max: 512MB", "max: 512ms", "mine.yaml:24: budgets.1: '512ms' is in ms, but this metric is in MB"),
        ("max: 512MB", "max: 512", "mine.yaml:24: budgets.1: '512' has no unit; write '512MB', or"),
        ("max: 512MB", "min: 512MB", "mine.yaml:24: budgets.1: a budget on peak_rss needs 'max' and nothing else"),
        (
            "metric: ttft, max: 1.25x, workload: chat",
            "metric: quality, max: 1.1x",
            "mine.yaml:23: budgets.0: a budget on quality needs 'min' and nothing else",
        ),
        (
            "metric: ttft, max: 1.25x",
            "metric: quality, min: 0.9x",
            "mine.yaml:23: budgets.0: quality is of the proxy, not of a device: leave workload out",
        ),
        (
            "metric: ttft, max: 1.25x, workload: chat",
            "metric: quality, min: 9ms",
            "mine.yaml:23: budgets.0: '9ms' is in ms, but this metric has no unit",
        ),
        (
            "metric: ttft, max: 1.25x, workload: chat",
            "metric: quality.recall, min: 0.95x",
            "mine.yaml:23: budgets.0.metric: quality.recall: the top rung 'long' measures no recall: add `tasks:",
        ),
        (
            "metric: latency, workload: chat",
            "metric: quality.recall",
            "mine.yaml:27: objectives.1.metric: quality.recall: the top rung 'long' measures no recall",
        ),
        ("metric: latency", "metric: latancy", "mine.yaml:27: objectives.1.metric: unknown metric 'latancy'; did you"),
        ("name: latency", "name: quality", "mine.yaml:27: objectives.1.name: objective 'quality' occurs twice"),
        ("  gqa: {min: 1}", "  gqqa: {min: 1}", "mine.yaml:17: limits.gqqa: unknown block kind in limits 'gqqa'; did"),
        ("  gqa: {min: 1}", "  gqa: {min: 9}", "mine.yaml:16: limits: no layout meets the limits at any depth"),
        ("max: 512MB", f"max: {'9' * 400}MB", "mine.yaml:24: budgets.1: "),
        ("min: 1M", f"min: {'9' * 400}B", "mine.yaml:8: model.params.total.min: "),
        ("gen: 16", "gen: 32769", "mine.yaml:21: workloads.chat.gen: "),
        ("prompt: 64", f"prompt: {'9' * 400}", "mine.yaml:21: 99999999999999999999 is too large for a number"),
        ("[A8/4*3]", "[A8/5*3]", "mine.yaml:30: references.attention: layer 0: gqa: 5 key-value heads do not divide"),
        (
            "[A8/4*3]\n",
            "[A8/4*3]\n  further:\n    both: d256 v1024 ffn=swiglu:512 [C3&A8/5*3]\n",
            "mine.yaml:31: references.further: layer 0: gqa: 5 key-value heads do not divide",
        ),
        (
            "[A8/4*3]\n",
            "[A8/4*3]\n  further:\n    again: d256 v1024 ffn=swiglu:512 [A8/4*3]\n",
            "mine.yaml:31: references.further: again is the layout of another reference",
        ),
        (
            "[A8/4*3]\n",
            "[A8/4*3]\n  further:\n    published: d256 v1024 ffn=swiglu:512 [C3*3]\n",
            "mine.yaml:31: references.further: published is one of the two that every space has",
        ),
        (
            "ffn:\n",
            "parallel: [[conv, gqua]]\nffn:\n",
            "mine.yaml:13: parallel.0.1: unknown mixer of this space 'gqua'",
        ),
        ("ffn:\n", "parallel: [[gqa]]\nffn:\n", "mine.yaml:13: parallel.0: must be two kinds of mixers or more"),
        (
            "limits:\n  gqa: {min: 1}",
            "parallel: [[conv, gqa]]\nlimits:\n  conv&gqa: {min: 9}",
            "mine.yaml:17: limits: no layout meets the limits at any depth",
        ),
        (
            "  - {name: latency, metric: latency, workload: chat}\n",
            "",
            "mine.yaml:25: objectives: needs at least 2, but has 1",
        ),
        ("v: 1\n", "v: 2\n", "mine.yaml:1: v: input should be 1"),
        ("name: mine\n", "", "mine.yaml:1: name: is missing"),
        ("name: mine\n", "name: mine\nv: 1\n", "mine.yaml:3: key 'v' occurs twice, first in line 1"),
        (
            "prompt: 64,",
            "prompt: 64, promt: 1,",
            "mine.yaml:21: workloads.chat.promt: unknown key 'promt'; did you mean",
        ),
        (
            "width: [256, 512]",
            "expansion: 1e308",
            "mine.yaml:15: ffn.swiglu.expansion: swiglu: expansion must be a num",
        ),
        (
            "metric: ttft, max: 1.25x, workload: chat",
            "metric: decode_p95, max: 5ms, workload: [chat]",
            "mine.yaml:23: budgets.0.workload: ",
        ),
        (
            "name: mine",
            "name: mine\nquality: {proxy_d_model: 512}",
            "mine.yaml:3: quality.proxy_d_model: proxies of width 512 are wider than a layout of width 256",
        ),
        ("name: mine", "name: !!python/name:os.system x", "mine.yaml:2: tags such as"),
        ("[256, 512]", "[256, 512", "mine.yaml:16: not YAML"),
    ],
)
def test_mistake_is_told_with_its_line(old: str, new: str, line: str) -> None:
    assert any(error.startswith(line) for error in with_change(old, new))


def test_quality_may_have_budgets() -> None:
    rung = "{name: top, lm_steps: 9, tasks: {%s: {task: mqar, steps: 300}}}"
    text = GOOD.replace("{metric: ttft, max: 1.25x, workload: chat}", "{metric: quality.recall, min: 0.95x}")
    text = text.replace("{metric: peak_rss, max: 512MB, workload: chat}", "{metric: quality, min: 0.9}")
    space = parse_space(text + f"quality: {{rungs: [{rung % 'mqar_long'}]}}\n", "mine.yaml")
    assert [(budget.name, *budget.limit) for budget in space.budgets] == [
        ("quality.recall", 0.95, True), ("quality", 0.9, False),
    ]  # fmt: skip
    fresh = "quality: {rescore: {tasks: {mqar: {steps: 300}}}}\n"
    assert parse_space(text + fresh, "mine.yaml").quality.rescore is not None
    (line,) = errors(text + fresh.replace("mqar", "boundfacts, mqar").replace("boundfacts,", "boundfacts: {steps: 3},"))
    assert line.startswith("mine.yaml:31: quality.rescore.tasks.boundfacts: boundfacts is no task of generation")
    objective = text.replace("  - {name: quality, metric: quality}\n", "  - {name: recall, metric: quality.recall}\n")
    (line,) = errors(objective + fresh)
    assert line.startswith("mine.yaml:26: objectives.0.metric: quality.recall: the top rung 'long' measures no recall")
    (line,) = errors(text + f"quality: {{rungs: [{rung % 'keys'}]}}\n")
    assert line.startswith("mine.yaml:23: budgets.0.metric: quality.recall: the top rung 'top' measures no recall")


def test_seeds_of_a_task_differ() -> None:
    (line,) = errors(GOOD + "quality: {rungs: [{name: top, tasks: {mqar: {steps: 3, seeds: [0, 0]}}}]}\n")
    assert line.startswith("mine.yaml:31: quality.rungs.0.tasks.mqar.seeds: seeds must differ, not [0, 0]")


def test_impossible_budget_says_what_can_be_reached() -> None:
    (line,) = with_change("min: 1M, max: 20M", "min: 10M, max: 20M")
    assert "the choices reach 1,706,496 to 4,137,280 weights (total)" in line


def test_impossible_budget_of_a_space_of_usual_size_is_found() -> None:
    text = space_text("lfm2")
    variant = text.replace("total: {min: 300M, max: 380M}", "total: {min: 900B}")
    assert variant != text
    with pytest.raises(InvalidInput, match="impossible parameter budget: the choices reach"):
        parse_space(variant, "lfm2.yaml")


ONE_CACHE, MANY_CACHES = "{heads: 8, kv_heads: 8}", "{heads: [1, 2, 4, 8], kv_heads: {min: 1, max: 999}}"
ONE_WIDTH, MANY_WIDTHS = "{min: 32, max: 129984, step: 32}", "{min: 32, max: 129984, step: 32, scope: layer}"
ONE_DEPTH, MANY_DEPTHS = "[2]", "{min: 2, max: 1000}"
EXTREMES = [(ONE_CACHE, ONE_WIDTH, ONE_DEPTH), (MANY_CACHES, MANY_WIDTHS, MANY_DEPTHS)]


@pytest.mark.parametrize(
    ("mixers", "width", "depth"),
    [
        pytest.param(*case, marks=[] if case in EXTREMES else pytest.mark.exhaustive)
        for case in product((ONE_CACHE, MANY_CACHES), (ONE_WIDTH, MANY_WIDTHS), (ONE_DEPTH, MANY_DEPTHS))
    ],
)
def test_the_scan_for_reachable_counts_is_bounded(
    monkeypatch: pytest.MonkeyPatch, mixers: str, width: str, depth: str
) -> None:
    """A few lines describe spaces of any size; what is counted here took some minutes."""
    text = GOOD.replace("{min: 1M, max: 20M}", "{min: 900B}").replace("[256, 512]", width)
    text = text.replace("{heads: 8, kv_heads: {choices: [2, 4], scope: layer}}", mixers)
    text = text.replace("d_model: 256", "d_model: {min: 1024, max: 9024, step: 32}").replace("{min: 4, max: 6}", depth)
    work = Counter[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **named: Any) -> Any:
            work[name] += 1
            return call(*args, **named)

        return count

    monkeypatch.setattr(frame, "_fill", counted("sums", frame._fill))
    monkeypatch.setattr(frame, "block_cost", counted("blocks", frame.block_cost))
    parse_space(text, "mine.yaml")  # sampling finds that nothing is inside
    assert 0 < work["sums"] < 100_000 and 0 < work["blocks"] < 30_000


def test_frames_that_the_limits_forbid_are_counted_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    many = "{min: 64, max: 8192, step: 32}"
    text = GOOD.replace("d_model: 256", f"d_model: {many}").replace("vocab: 1024", f"vocab: {many}")
    work, counts = Counter[str](), frame._counts

    def count(*of: Any) -> Any:
        work["counts"] += 1
        return counts(*of)

    monkeypatch.setattr(frame, "_counts", count)
    parse_space(text.replace("gqa: {min: 1}", "swiglu: {max: 0}"), "mine.yaml")
    assert 0 < work["counts"] < 100_000


def test_the_report_of_the_longest_run_fits_in_its_output() -> None:
    slowest = [10**14 - 1] * MAX_GEN  # a day for each token
    report = {"decode_ns": slowest, "decode_cpu_ns": slowest}
    assert len(json.dumps(report, separators=(",", ":"))) < MAX_OUTPUT


def test_missing_workloads_and_all_other_mistakes_are_listed_at_once() -> None:
    text = GOOD.replace("workloads:\n  chat: {prompt: 64, gen: 16}\n", "").replace("kernel: [3, 4]", "kernel: 1")
    lines = errors(text.replace("quantisation: q4_0", "quantization: q4_0"))
    assert [line.split(": ")[1] for line in lines] == [
        "workloads",
        "mixers.conv.kernel",
        "runtimes.0.quantisation",
        "runtimes.0.quantization",
    ]


def test_numbers_are_read_as_people_mean_them() -> None:
    value = read_yaml("a: 010\nb: 1e-3\nc: yes\nd: 12:30\ne: true\nf: '1'\ng: ~\nh: 1_000\ni: 2024-01-01\n", "x").value
    assert value == {
        "a": 10, "b": 1e-3, "c": "yes", "d": "12:30", "e": True, "f": "1", "g": None, "h": "1_000", "i": "2024-01-01",
    }  # fmt: skip


def test_anchors_and_merges_work() -> None:
    document = read_yaml("base: &b {x: 1, y: 2}\nmine:\n  <<: *b\n  y: 3\nalso: *b\n", "x")
    assert document.value == {"base": {"x": 1, "y": 2}, "mine": {"y": 3, "x": 1}, "also": {"x": 1, "y": 2}}
    assert document.where(("mine", "y")) == "x:4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
        ), "aliases expand"),
        ("a: &a [*a]\n", "alias inside its own anchor"),
        ("[" * 5000, "nested deeper"),
        ("- x\n" * 60_000, "more than"),
        ("a: " + "x" * 1_000_001, "larger than"),
        ("{a: 1}: 2", "a key must be a plain word"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: \x00", "not YAML"),
        ("a: *nowhere", "not YAML"),
    ],
)  # fmt: skip
def test_hostile_text_is_refused_quickly(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_yaml(text, "x.yaml")


@pytest.mark.parametrize("text", ["", "[]", "just words", "3"])
def test_text_that_is_no_mapping_is_refused(text: str) -> None:
    (line,) = errors(text)
    assert line.startswith("mine.yaml:1: ")


@given(st.text() | st.builds(lambda a, b, c: GOOD[:a] + c + GOOD[b:], CUT, CUT, st.sampled_from(" :-[]{}&*<0x\n")))
@settings(max_examples=examples(200), deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_space(text, "mine.yaml")
    except InvalidInput as error:
        assert {line[: len("mine.yaml")] for line in str(error).splitlines()} == {"mine.yaml"}


def test_unknown_name_offers_the_packaged_spaces() -> None:
    with pytest.raises(UnknownName, match="did you mean 'lfm2'"):
        load_space("lfm2x")


def test_a_folder_of_that_name_does_not_hide_a_packaged_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lfm2-demo").mkdir()
    assert load_space("lfm2-demo").name == "lfm2-demo"
    with pytest.raises(UnknownName, match="no such file"):
        load_space(tmp_path)


def test_file_is_read_and_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_space(path).name == load_space(str(path)).name == "mine"
    path.write_text(GOOD.replace("kernel: [3, 4]", "kernel: 1"))
    with pytest.raises(InvalidInput) as caught:
        load_space(path)
    assert str(caught.value).startswith(f"{path}:11: ")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="UTF-8"):
        load_space(path)


LISTED = (
    GOOD[: GOOD.index("model:")]
    + """\
layouts:
  - d256 v1024 ffn=swiglu:512 [C3*2 A8/4]
  - d256 v1024 ffn=swiglu:256 [C3*4 A8/2]
"""
    + GOOD[GOOD.index("runtimes:") :]
)


def test_a_list_of_layouts_is_a_space() -> None:
    space = parse_space(LISTED, "mine.yaml")
    assert [layout.depth for layout in space.listed()] == [3, 5]
    assert space.model.depth.choices == (3, 5)
    assert [block.kind for block in space.mixers] == ["conv", "gqa"]
    assert space.block_space("gqa").knobs["kv_heads"].choices == (2, 4)
    stored = space.model_dump(mode="json")
    assert type(space).model_validate(json.loads(json.dumps(stored))) == space
    assert space_difference(space, parse_space(LISTED.replace("A8/2", "A8/4"), "mine.yaml"))
    assert space_key(parse_space(GOOD, "a")) == space_key(parse_space("doc: other\n" + GOOD, "b"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[C3*4 A8/2]", "[C3*4 A8/3]", "mine.yaml:5: layouts.1: layer 4: gqa: 3 key-value heads do not divide"),
        ("d256 v1024 ffn=swiglu:256", "width 256", "mine.yaml:5: layouts.1: cannot read layout"),
        (
            "ffn=swiglu:256 [C3*4 A8/2]",
            "ffn=swiglu:512 [C3 C3 A8/4]",
            "mine.yaml:5: layouts.1: is the layout of item 0",
        ),
        ("runtimes:", "limits: {gqa: {min: 1}}\nruntimes:", "mine.yaml:6: limits: follows from `layouts`: leave"),
        ("layouts:\n", "layouts: one\nmixers:\n", "mine.yaml:3: layouts: must be a list of layouts"),
    ],
)
def test_a_wrong_list_is_reported_with_its_line(old: str, new: str, message: str) -> None:
    assert old in LISTED
    assert any(line.startswith(message) for line in errors(LISTED.replace(old, new))), errors(LISTED.replace(old, new))


def test_key_value_heads_may_name_the_heads() -> None:
    knobs = parse_space(GOOD.replace("choices: [2, 4]", "choices: [2, heads]"), "mine.yaml").block_space("gqa").knobs
    assert knobs["kv_heads"].choices == (2, "heads")
    alone = parse_space(GOOD.replace("{choices: [2, 4], scope: layer}", "heads"), "mine.yaml")
    assert alone.block_space("gqa").knobs["kv_heads"].choices == ("heads",)
    (line,) = errors(GOOD.replace("choices: [2, 4]", "choices: [2, head]"))
    assert line == "mine.yaml:12: mixers.gqa.kv_heads: a choice must be a number or 'heads', not 'head'"
    (line,) = errors(GOOD.replace("heads: 8", "heads: heads"))
    assert line == "mine.yaml:12: mixers.gqa.heads: a choice must be a number, not 'heads'"
    (line,) = errors(GOOD.replace("d_model: 256", "d_model: heads"))
    assert line == "mine.yaml:4: model.d_model: a choice must be a number, not 'heads'"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "d_model: 256",
            "d_model: [250, 256]",
            "mine.yaml:4: model.d_model: must be a multiple of 32",
        ),
        ("heads: 8", "heads: 5", "mine.yaml:12: mixers.gqa: no block of these choices is valid: gqa: "),
        ("heads: 8", "heads: [5, 8]", "mine.yaml:12: mixers.gqa.heads: no layer can use 5: gqa: "),
        ("choices: [2, 4]", "choices: [2, 3]", "mine.yaml:12: mixers.gqa.kv_heads: no layer can use 3: gqa: 3 key"),
    ],
)
def test_choices_that_no_layer_can_use_are_found(old: str, new: str, line: str) -> None:
    (error,) = with_change(old, new)
    assert error.startswith(line)


def test_a_wrong_list_of_layouts_hides_no_other_mistake() -> None:
    lines = errors(LISTED.replace("[C3*4 A8/2]", "[C3*4 A8/3]").replace("gen: 16", "gen: 0"))
    assert [line.split(": ")[1] for line in lines] == ["layouts.1", "workloads.chat.gen"]
