"""Search for late-interaction models: layouts with token vectors, spaces of retrieval, their figures and their task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from study_support import TINY, reference_times, sample
from task_lab import studied, task_job, task_quality, varied

from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.core.measurement import Repetition
from nas.core.plan import Pair
from nas.core.space import SearchSpace
from nas.core.task import RetrievalTask, make_task
from nas.core.workload import Workload
from nas.measure.protocol.repetitions import judge, summarise
from nas.measure.runtimes import RUNTIMES
from nas.model.nn.maxsim import maxsim
from nas.model.nn.model import Model
from nas.search.proposers.figure_costs import costs_of
from nas.search.proposers.membership import reasons_outside
from nas.search.proxy.data import TaskData, gains, score_groups
from nas.search.proxy.job import TrainJob, TrainResult, exported_layout, weights_file
from nas.search.proxy.train import train_seeds
from nas.search.spaces.identity import space_json, space_yaml
from nas.search.spaces.loader import load_space, parse_space
from nas.testing.inline_study import raw

LAYOUT = Layout.parse("d64 v256 vectors=16 ffn=swiglu:64 [C3 A4/2]")
DOCUMENT = {"workload": "document"}
TASKS = {"boundfacts": {"steps": 4, "settings": {"facts": 2, "alike": 2, "sought": 1, "query": 4, "length": 20}}}
RETRIEVAL: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "workloads"},
    "task": "retrieval",
    "model": {**TINY["model"], "vectors": [16, 32]},
    "workloads": {"query": {"prompt": 32}, "document": {"prompt": 128}},
    "budgets": [
        {"metric": "index_bytes", "max": "1x", **DOCUMENT},
        {"metric": "documents_per_s", "min": "0.5x", **DOCUMENT},
    ],
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "encoding", "workload": "query"},
        {"name": "index", "metric": "index_bytes", **DOCUMENT},
    ],
    "quality": task_quality(TASKS),
}


def test_a_layout_has_a_width_of_token_vectors() -> None:
    assert Layout.parse(LAYOUT.format()) == Layout.from_json(LAYOUT.to_json()) == LAYOUT
    assert LAYOUT.params.total == sum(weight.numel() for weight in Model(LAYOUT).parameters())
    assert narrow(LAYOUT, 32, 256).vectors == 8
    assert narrow(LAYOUT, 32, 256).with_layers(LAYOUT.layers, vectors=0).vectors == 0
    for text in ("d64 v256 untied vectors=16 ffn=swiglu:64 [C3]", "d64 v256 vectors=70000 ffn=swiglu:64 [C3]"):
        with pytest.raises(InvalidInput, match="vectors"):
            Layout.parse(text)


def test_vectors_have_the_norm_1() -> None:
    vectors = Model(LAYOUT).vectors(torch.tensor([[1, 2, 3]]))
    assert vectors.shape == (1, 3, 16)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(1, 3))


def test_a_space_of_retrieval_is_read_sampled_and_written() -> None:
    space = SearchSpace.model_validate(RETRIEVAL)
    assert {layout.vectors for layout in space.references.layouts().values()} == {32}
    assert all(workload.encodes for workload in space.workloads.values())
    assert parse_space(space_yaml(space), "again.yaml") == space
    layouts = varied(space)
    assert {layout.vectors for layout in layouts} == {16, 32}
    assert not any(reasons_outside(space, layout) for layout in layouts)
    assert any("vectors" in reason for reason in reasons_outside(space, Layout.parse(TINY["references"]["published"])))
    first, second = (costs_of(space, space.objectives[2]).terms([LAYOUT.with_layers(LAYOUT.layers, vectors=size)])
                     for size in (16, 32))  # fmt: skip
    assert (first != second).any()


def test_the_packaged_space_is_of_retrieval() -> None:
    space = load_space("lfm2-colbert")
    support = [RUNTIMES["llama.cpp"].supports(layout) for layout in space.references.layouts().values()]
    assert [answer.arch for answer in support] == ["lfm2", "lfm2"]
    assert "task" in space_json(space) and "task" not in space_json(load_space("lfm2"))


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"task": "generation"}, "model.vectors", "task: retrieval"),
        ({"workloads": {"query": {"prompt": 32, "gen": 8}, "document": {}}}, "workloads.query.gen", "leave `gen` out"),
        ({"objectives": [{"name": "a", "metric": "quality"}, {"name": "b", "metric": "ttft", "workload": "query"}]},
         "objectives", "ttft is not measured"),
        ({"budgets": [{"metric": "index_bytes", "max": "1x"}]}, "budgets", "needs a workload"),
        ({"quality": {"rungs": [{"name": "text", "lm_steps": 3}]}}, "quality.rungs", "trains no retrieval"),
        ({"quality": {"rungs": [{"name": "a", "tasks": {"mqar": {"steps": 3}}}]}}, "quality", "no task of retrieval"),
        ({"runtimes": [{"name": "fake", "quantisation": ["q4_0", "q8_0"]}]}, "runtimes", "name one"),
    ],
)  # fmt: skip
def test_what_is_of_another_task_is_named(changes: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        SearchSpace.model_validate(RETRIEVAL | changes)
    assert place.split(".")[0] in str(refused.value)


def test_a_space_of_generation_takes_no_figure_of_retrieval() -> None:
    with pytest.raises(ValueError, match="encoding is not measured"):
        SearchSpace.model_validate(TINY | {"budgets": [{"metric": "encoding", "max": "1x", "workload": "chat"}]})
    with pytest.raises(ValueError, match="boundfacts is no task of generation"):
        SearchSpace.model_validate(TINY | {"quality": {"rungs": [{"name": "a", "tasks": TASKS}]}})


def test_figures_of_a_text_that_is_encoded() -> None:
    encoded = sample(ttft_ms=20.0, tokens=0)
    times = reference_times(encoded)
    assert times.decode_ms is None
    repetitions = [Repetition(valid=True, sample=sample(ttft_ms=10.0, tokens=0), reference=encoded)] * 3
    figures = summarise(repetitions, Workload(prompt=512, gen=0), 1000, times, vectors=128)
    assert figures["encoding"].value == pytest.approx(10.0) and figures["encoding"].log_sd
    assert figures["documents_per_s"].value == pytest.approx(100.0)
    assert figures["prefill_tps"].value == pytest.approx(51_200)
    assert figures["index_bytes"].value == 512 * 128 * 2
    for name in ("ttft", "decode_p50", "decode_p95", "latency", "energy_mj_per_token"):
        assert figures[name].value is None and figures[name].reason == "the workload decodes nothing"
    other = summarise(repetitions, Workload(prompt=512, gen=0), 1000, times)
    assert other["index_bytes"].value is None and "vectors=" in (other["index_bytes"].reason or "")


def test_a_run_that_decodes_is_no_encoding_and_the_other_way_round() -> None:
    for tokens, encodes in ((4, True), (0, False)):
        run = raw(sample(tokens=tokens))
        repetition, failure = judge(
            Pair(reference=None, candidate=run), RUNTIMES["llama.cpp"].parse, None, 0, encodes=encodes
        )
        assert not repetition.valid and failure is not None and "decoded token" in str(failure)


def test_only_lfm2_gives_projected_vectors() -> None:
    for text, words in (("[A4/2 A4/2]", "behind qwen3"), ("[C3 M16 A4/2]", "vectors of tokens: Mamba-2")):
        support = RUNTIMES["llama.cpp"].supports(Layout.parse(f"d64 v256 vectors=16 ffn=swiglu:64 {text}"))
        assert not support and words in support.reasons[0]
    assert not RUNTIMES["executorch"].supports(LAYOUT)


def test_alike_documents_differ_in_what_stands_together() -> None:
    task = make_task("boundfacts", {})
    assert isinstance(task, RetrievalTask)
    inputs, _ = task.batch(np.random.default_rng(0), 12)
    assert inputs.shape == (12, task.length) and inputs.max() < task.vocab
    queries, documents = inputs[:, : task.query], inputs[:, task.query :]
    symbols = [sorted(token for token in document if token < 32) for document in documents]
    assert symbols[0] == symbols[3] != symbols[4] == symbols[7]

    def pairs(document: Any) -> set[tuple[int, int]]:
        facts = [int(token) for token in document if token < 32]
        return set(zip(facts[::2], facts[1::2], strict=True))

    for query in range(4):
        question = {(int(queries[query, 0]), int(queries[query, 1])), (int(queries[query, 2]), int(queries[query, 3]))}
        assert [question <= pairs(document) for document in documents[:4]] == [place == query for place in range(4)]
    for wrong in ({"facts": 30}, {"alike": 7}, {"length": 16}, {"query": 2}):
        with pytest.raises(InvalidInput, match="boundfacts"):
            make_task("boundfacts", wrong)


def test_a_search_is_scored_by_its_ranks() -> None:
    assert gains(torch.tensor([1, 2, 10, 11])).tolist() == pytest.approx([1, 0.6309, 0.2891, 0], abs=1e-4)

    class OneHotModel(Model):
        """Gives each symbol a vector of its own."""

        def vectors(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(tokens, 256).float()

    groups = TaskData("boundfacts", make_task("boundfacts", {}), 4, 0).groups()
    (score, chance), = score_groups(OneHotModel(LAYOUT), groups, torch.device("cpu")).values()  # fmt: skip
    # It knows which four documents have the symbols, and nothing of their order.
    assert 0.0 < 1 - score.loss < 0.7 and score.accuracy < 0.4 and 1 - chance < 0.02
    assert maxsim(torch.eye(2)[None], torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool)).item() == 2


def test_seeds_train_together_as_alone(tmp_path: Path) -> None:
    def job(seed: int) -> TrainJob:
        return task_job(LAYOUT, "boundfacts", TASKS["boundfacts"]["settings"], seed)

    def losses(jobs: list[TrainJob], folder: str) -> list[float]:
        done = train_seeds(jobs, yield_hook=lambda: None, checkpoint_dir=tmp_path / folder, log=lambda line: None)
        return [result.losses["task/boundfacts"] for result in done if isinstance(result, TrainResult)]

    together, alone = losses([job(0), job(1)], "a"), losses([job(1)], "b")
    assert together[1] == alone[0] != together[0]
    assert exported_layout(job(0)).vectors == 0 and weights_file(tmp_path / "a", job(0).key).is_file()


def test_a_study_of_retrieval_has_a_front(tmp_path: Path) -> None:
    with studied(tmp_path, SearchSpace.model_validate(RETRIEVAL), "boundfacts") as (_, report, url):
        for member in report["front"]:
            assert member["objectives"]["index"] == 128 * Layout.parse(member["layout"]).vectors * 2
        assert {row["metric"] for row in report["budgets"]} == {"index_bytes", "documents_per_s"}
        page = httpx.get(f"{url}/trials/{report['front'][0]['trial']}", timeout=60)
    assert page.status_code == 200 and "32 tokens of prompt, a vector for each" in page.text
    assert "documents_per_s" in page.text and "Time of every token" not in page.text
