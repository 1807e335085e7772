"""Search for detokenizers: spaces of detokenization, their task, and trainings on spectra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study_support import TINY

from nas.cli.space import support_by_layout
from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.core.space import SearchSpace
from nas.core.task import SpectraTask, make_task
from nas.measure.runtimes import RUNTIMES
from nas.model.nn.model import Model
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.data import TaskData, score_groups
from nas.search.proxy.job import TaskRun, TrainJob, TrainResult, exported_layout, proxy_layout
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.train import train_seeds
from nas.search.spaces.identity import space_json, space_yaml
from nas.search.spaces.loader import load_space, parse_space

LAYOUT = Layout.parse("d64 v256 vectors=98 ffn=swiglu:64 [C3 W4/2@12]")
SMALL = {"frames": 3, "upsampling": 4, "bands": 8}
TASKS = {"spectra": {"steps": 4, "settings": SMALL}}
SOUND: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key not in ("workloads", "budgets")},
    "task": "detokenization",
    "workloads": {"stream": {"prompt": 72, "n_batch": 6, "n_ubatch": 6}, "whole": {"prompt": 300}},
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "encoding", "workload": "stream"},
    ],
    "quality": {"proxy_d_model": 32, "rungs": [{"name": "only", "tasks": TASKS}]},
}


def test_a_space_of_detokenization_is_read_and_written() -> None:
    space = SearchSpace.model_validate(SOUND)
    assert {layout.vectors for layout in space.references.layouts().values()} == {1282}
    assert all(workload.encodes for workload in space.workloads.values())
    assert parse_space(space_yaml(space), "again.yaml") == space
    changed = SearchSpace.model_validate(SOUND | {"model": SOUND["model"] | {"vectors": 642}})
    assert space_json(changed)["model"]["vectors"] != space_json(space)["model"]["vectors"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "generation"}, "no task of generation"),
        ({"task": "retrieval"}, "spectra is no task of retrieval"),
        ({"model": SOUND["model"] | {"vectors": 0}}, "needs vectors"),
        ({"workloads": {"stream": {"prompt": 72, "gen": 8}, "whole": {}}}, "leave `gen` out"),
        ({"workloads": {"stream": {"prompt": 72, "n_ubatch": 0}}}, "n_ubatch"),
        ({"budgets": [{"metric": "ttft", "max": "1x", "workload": "whole"}]}, "ttft is not measured"),
        ({"quality": {"rungs": [{"name": "text", "lm_steps": 3}]}}, "trains no detokenization"),
        ({"quality": {"rungs": [{"name": "a", "tasks": {"boundfacts": {"steps": 3}}}]}}, "no task of detokenization"),
        ({"runtimes": [{"name": "fake", "quantisation": ["q4_0", "q8_0"]}]}, "name one"),
    ],
)  # fmt: skip
def test_what_is_of_another_task_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchSpace.model_validate(SOUND | changes)


def test_the_packaged_space_computes_spectra_frame_by_frame_and_its_proxies_are_carried() -> None:
    space = load_space("lfm2-detokenizer")
    llama_cpp, references = RUNTIMES["llama.cpp"], space.references.layouts()
    assert [llama_cpp.supports(layout).arch for layout in references.values()] == ["lfm2"] * 3
    assert {layout.vectors for layout in references.values()} == {1280 + 2}
    stage = space.quality.rungs[-1].tasks["spectra"]
    task = make_task("spectra", stage.settings)
    assert isinstance(task, SpectraTask) and space.quality.context == task.length
    corpus = CorpusRef(source="default", hash="0" * 64)
    jobs = [rung_jobs(space.quality, 1, layout, corpus)[-1] for layout in references.values()]
    mixers = [layer.mixers[0] for job in jobs for layer in proxy_layout(job).layers]
    assert {mixer.int("window") for mixer in mixers if mixer.kind == "swa"} == {30}
    assert {proxy_layout(job).vectors for job in jobs} == {task.bands}
    assert all(row["admitted"] for row in support_by_layout(space, [exported_layout(job) for job in jobs]))


def test_codes_say_what_spectra_are() -> None:
    task = make_task("spectra", {})
    codes, spectra = task.batch(np.random.default_rng(0), 400)
    frames = codes.reshape(400, 16, 6, 8) - 32 * np.arange(8)
    assert (frames == frames[:, :, :1]).all() and (codes // 32 == np.arange(8)).all()
    loudness, sound, burst, timbre = frames[..., 0, 0], frames[..., 0, 3], frames[..., 0, 4], frames[..., 0, 5:]
    assert 0.25 < (burst > 0).mean() < 0.35 and burst.max() == 6 and timbre.max() == 2
    means = spectra.reshape(400, 16, 6, 32).mean(2)
    quiet = burst == 0
    assert np.corrcoef(loudness[quiet], means[quiet].mean(-1))[0, 1] > 0.3
    # A burst is in the upper bands, from the position on that its code names, counted from 1.
    late = burst[:, 1:] == 6
    last, before = (spectra[:, 6:].reshape(400, 15, 6, 32)[late][:, place, 24:].mean() for place in (5, 4))
    assert last - before > 1
    # Two frames have alike codes of timbre if they have one sound; what they have in common is the timbre.
    pairs = timbre[:, :1] - timbre[:, 1:]
    same = sound[:, :1] == sound[:, 1:]
    assert (pairs[same] ** 2).mean() < 0.6 * (pairs[~same] ** 2).mean()
    for wrong in ({"frames": 0}, {"upsampling": 32}, {"bands": 2}, {"sounds": 0}):
        with pytest.raises(InvalidInput, match="spectra"):
            make_task("spectra", wrong)


def test_the_score_is_how_much_nearer_spectra_are_than_medians() -> None:
    groups = TaskData("spectra", make_task("spectra", SMALL), 4, 0).groups()
    (group,) = groups.values()
    model = Model(LAYOUT.with_layers(LAYOUT.layers, vectors=8))
    torch.nn.init.zeros_(model.projection.weight)
    ((score, chance),) = score_groups(model, groups, torch.device("cpu")).values()
    assert score.loss == pytest.approx(float(group.labels.abs().double().mean())) == pytest.approx(chance, abs=0.05)
    assert score.accuracy == pytest.approx(float((group.labels.abs() < 0.5).double().mean()))


def test_seeds_train_together_as_alone(tmp_path: Path) -> None:
    def job(seed: int) -> TrainJob:
        return TrainJob(
            layout=narrow(LAYOUT, 32, 256).to_json(), run=TaskRun(task="spectra", settings=SMALL),
            steps=20, batch=8, lr=0.01, warmup=0, weight_decay=0, clip=1, ema=0, seed=seed,
        )  # fmt: skip

    def results(jobs: list[TrainJob], folder: str) -> list[TrainResult]:
        done = train_seeds(jobs, yield_hook=lambda: None, checkpoint_dir=tmp_path / folder, log=lambda line: None)
        assert all(isinstance(result, TrainResult) for result in done)
        return done  # type: ignore[return-value]

    together, alone = results([job(0), job(1)], "a"), results([job(1)], "b")
    assert together[1].losses == alone[0].losses != together[0].losses
    assert together[0].scores["task/spectra"] > 0.1 and together[0].tokens == 20 * 8 * 12
    assert exported_layout(job(0)).vectors == 0
