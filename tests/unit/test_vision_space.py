"""Search for models that read images: layouts with towers, spaces of vision, their figures, files and task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from study_support import TINY, reference_times, sample
from task_lab import studied, task_job, task_quality, varied

from nas.core.canonical import sha256_of
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout, narrow
from nas.core.measurement import TTFT_PARTS, Figure, Repetition
from nas.core.scoring import MeasurementKey, check_budgets
from nas.core.space import SearchSpace, TowerKnob
from nas.core.task import Exhibit, MediaTask, make_task
from nas.core.tower import ImageTower, Tower
from nas.core.workload import Workload
from nas.measure.protocol.repetitions import summarise
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Checkpoint, RandomWeights, projector_path
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.projector import tower_tensors
from nas.measure.runtimes.runner import read_sample
from nas.model.nn.model import Model
from nas.search.proposers.features import Features
from nas.search.proposers.figure_costs import costs_of
from nas.search.proposers.membership import reasons_outside
from nas.search.proxy.data import TaskData, logits_and_labels, score_groups
from nas.search.proxy.job import TrainResult, exported_layout, proxy_layout
from nas.search.proxy.tasks.pictures import COLOURS
from nas.search.proxy.train import train
from nas.search.spaces.identity import space_json, space_yaml
from nas.search.spaces.loader import load_space, parse_space
from nas.testing.inline_study import raw
from nas.train.scaling.source import study_origin
from nas.train.towers.gguf import image_tensors
from nas.train.towers.images import FrameSettings, cut_of
from nas.train.towers.vision import VisionShape

TOWER = "16x2:heads=2:connector=32:patch=8:tokens=16:least=4"
LAYOUT = Layout.parse(f"d64 v256 tower={TOWER} ffn=swiglu:64 [C3 A4/2]")
LOOK = {"workload": "look"}
TASKS = {"pictures": {"steps": 4, "settings": {"side": 16, "cells": 2, "objects": 2, "colours": 2, "questions": 2}}}
VISION: dict[str, Any] = {
    **TINY,
    "task": "vision",
    "model": {**TINY["model"], "tower": {"shape": ["16x2", "32x2"], "tokens": [16, 64]}},
    "workloads": {"look": {"prompt": 16, "gen": 4, "image_height": 64, "image_width": 64}},
    "budgets": [{"metric": "image_encoding", "max": "4x", **LOOK}, {"metric": "image_tokens", "max": "1x", **LOOK}],
    "objectives": [{"name": "quality", "metric": "quality"}, {"name": "latency", "metric": "ttft", **LOOK}],
    "quality": task_quality(TASKS),
}
IMAGES = {"tokens": 16, "wall_ns": [[1_000_000, 3_000_000, 1_000_000]], "cpu_ns": [[1_000_000, 3_000_000, 1_000_000]]}


@pytest.mark.parametrize(
    ("line", "same"),
    [("768x12", "768x12"), ("768x12:heads=12:factor=2", "768x12"), ("1152x27:ffn=4304:heads=16", None)],
)
def test_equal_towers_have_equal_lines(line: str, same: str | None) -> None:
    assert Tower.parse(Tower.parse(line).format()) == Tower.parse(line)
    assert same is None or Tower.parse(line).format() == same


@pytest.mark.parametrize(
    ("line", "words"),
    [("768", "cannot read"), ("768x0", "layers"), ("768x12:heads=7", "do not divide"), ("8x2:depth=3", "no depth"),
     ("768x12:tokens=0", "tokens"), ("768x12:factor=9", "factor"), ("768x12:patch=8:patch=8", "twice"),
     ("768x12:layers=3", "no layers")],
)  # fmt: skip
def test_what_is_no_tower_is_named(line: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Layout.parse(f"d64 v256 tower={line} ffn=swiglu:64 [C3 A4/2]")


def test_a_layout_has_a_tower_or_vectors() -> None:
    assert Layout.parse(LAYOUT.format()) == Layout.from_json(LAYOUT.to_json()) == LAYOUT
    assert LAYOUT.params.total == sum(weight.numel() for weight in Model(LAYOUT).parameters())
    assert LAYOUT.params.active < LAYOUT.params.non_embedding
    assert LAYOUT.with_layers(LAYOUT.layers[1:]).tower == LAYOUT.tower
    with pytest.raises(InvalidInput, match="not both"):
        Layout.parse("d64 v256 vectors=16 tower=16x2 ffn=swiglu:64 [C3 A4/2]")
    with pytest.raises(InvalidInput, match="tower"):
        Layout.from_json(LAYOUT.to_json() | {"tower": 3})
    proxy = narrow(Layout.parse("d1024 v256 tower=768x12:tokens=64 ffn=swiglu:64 [C3 A16/2]"), 64, 256).tower
    assert isinstance(proxy, ImageTower) and (proxy.width, proxy.layers, proxy.grid(32, 32)) == (48, 12, (2, 2))


@pytest.mark.parametrize(("height", "width"), [(512, 512), (300, 200), (64, 1000), (1, 4000), (4096, 4096)])
def test_an_image_has_the_tokens_of_one_frame_of_the_processor(height: int, width: int) -> None:
    tower = ImageTower.of(768, 12, tokens=144)
    settings = FrameSettings(max_image_tokens=144, do_image_splitting=False)
    whole = cut_of(height, width, settings).whole
    assert tower.grid(height, width) == (whole[0] // 32, whole[1] // 32)


def test_a_space_of_vision_is_read_sampled_and_written() -> None:
    space = SearchSpace.model_validate(VISION)
    assert space.model.tower.choices == ("16x2:tokens=16", "16x2:tokens=64", "32x2:tokens=16", "32x2:tokens=64")
    assert {layout.tower for layout in space.references.layouts().values()} == {Tower.parse("16x2:tokens=16")}
    assert space.workloads["look"].images == 1
    assert parse_space(space_yaml(space), "again.yaml") == space
    layouts = varied(space)
    assert {layout.tower.format() for layout in layouts if layout.tower} == set(space.model.tower.choices)
    assert not any(reasons_outside(space, layout) for layout in layouts)
    assert any("tower" in reason for reason in reasons_outside(space, Layout.parse(TINY["references"]["published"])))
    few, many = (
        next(layout for layout in layouts if isinstance(layout.tower, ImageTower) and layout.tower.tokens == count)
        for count in (16, 64)
    )
    costs = costs_of(space, space.objectives[1])
    assert (costs.terms([few])[0, -4:] < costs.terms([many])[0, -4:]).any()
    assert Features(space).matrix(layouts).shape[1] == len(Features(space).names)


def test_the_packaged_space_is_of_vision() -> None:
    space = load_space("lfm2-vl")
    support = [RUNTIMES["llama.cpp"].supports(layout) for layout in space.references.layouts().values()]
    assert [verdict.arch for verdict in support] == ["lfm2", "qwen3"]
    assert "tower" in space_json(space)["model"] and space_json(space)["workloads"]["picture"]["images"] == 1
    assert "tower" not in space_json(load_space("lfm2"))["model"]
    assert "images" not in space_json(load_space("lfm2"))["workloads"]["chat"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "generation"}, "task: vision"),
        ({"model": TINY["model"]}, "needs a tower"),
        ({"model": {**VISION["model"], "tower": {"shape": "16x2", "layers": 3}}}, "has no layers"),
        ({"model": {**VISION["model"], "tower": ["16x2", "16x2:factor=2"]}}, "occurs twice"),
        ({"workloads": {"look": {"images": 0}}}, "no workload of vision has images"),
        ({"workloads": {"look": {"gen": 0}}}, "with images decodes"),
        ({"workloads": {"look": {"images": 17}}}, "17|16"),
        ({"workloads": {"look": {"image_width": 5000}}}, "4096"),
        ({"workloads": {**VISION["workloads"], "text": {"images": 0}},
          "budgets": [{"metric": "image_encoding", "max": "1x", "workload": "text"}]}, "has no images"),
        ({"quality": {"rungs": [{"name": "text", "lm_steps": 3}]}}, "trains no vision"),
        ({"quality": {"rungs": [{"name": "a", "tasks": {"mqar": {"steps": 3}}}]}}, "no task of vision"),
        ({"runtimes": [{"name": "fake", "quantisation": ["q4_0", "q8_0"]}]}, "name one"),
    ],
)  # fmt: skip
def test_what_is_of_another_task_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchSpace.model_validate(VISION | changes)


def test_tokens_are_counted_so_that_their_budget_is_sure() -> None:
    def figures(tokens: float) -> dict[MeasurementKey, dict[str, Figure]]:
        return {MeasurementKey("local", "fake", "look"): {"image_tokens": Figure(value=tokens, n=1, unit="")}}

    space = SearchSpace.model_validate(VISION)
    for tokens, verdict in ((16.0, "feasible"), (64.0, "infeasible")):
        (check,) = check_budgets(space, figures(tokens), figures(16.0))
        assert (check.verdict, check.log_sd) == (verdict, 0.0)


def test_other_spaces_take_no_images() -> None:
    with pytest.raises(ValueError, match="give `task: vision`"):
        SearchSpace.model_validate(TINY | {"workloads": {"chat": {"images": 1}}})
    with pytest.raises(ValueError, match="pictures is no task of generation"):
        SearchSpace.model_validate(TINY | {"quality": {"rungs": [{"name": "a", "tasks": TASKS}]}})


def test_only_llama_cpp_reads_images() -> None:
    assert RUNTIMES["llama.cpp"].supports(LAYOUT)
    support = RUNTIMES["executorch"].supports(LAYOUT)
    assert not support and "token ids alone" in support.reasons[0]
    with pytest.raises(Unsupported, match="reads no images"):
        RUNTIMES["executorch"].build(log=print, images=True)


def test_parts_of_the_time_to_the_first_token_add_up() -> None:
    seeing, beside = sample(ttft_ms=10.0, tokens=8, info={"images": IMAGES}), sample(ttft_ms=5.0, tokens=8)
    workload = Workload(prompt=16, gen=8, images=1)
    repetitions = [Repetition(valid=True, sample=seeing, reference=beside)] * 3
    figures = summarise(repetitions, workload, 1000, reference_times(beside))
    assert figures["image_encoding"].value == pytest.approx(5.0) and figures["image_encoding"].log_sd
    assert figures["image_encoder"].value == pytest.approx(3.0)
    assert figures["image_tokens"].value == 16 and figures["prefill_tps"].value == pytest.approx(6400)
    whole = sum(figures[name].value or 0 for name in TTFT_PARTS["images"])
    assert whole == pytest.approx(figures["ttft"].value)
    blind = summarise([Repetition(valid=True, sample=beside, reference=beside)], workload, 1000, None)
    assert blind["image_tokens"].value is None and "tower=" in (blind["image_encoding"].reason or "")
    assert "image_tokens" not in summarise(repetitions, Workload(prompt=16, gen=8), 1000, None)
    all_of_it = sample(ttft_ms=4.0, tokens=8, info={"images": IMAGES})
    coarse = summarise([Repetition(valid=True, sample=all_of_it, reference=beside)], workload, 1000, None)
    assert coarse["prefill_tps"].value is None and coarse["prefill_tps"].reason


@pytest.mark.parametrize(
    "images", [{"tokens": 0}, {"wall_ns": [[-1, 0, 0]]}, {"cpu_ns": [[1, 1, 1]] * 2}, {"wall_ns": [[1, 2]]}, {"x": 1}]
)
def test_a_report_of_images_that_makes_no_sense_is_refused(images: dict[str, Any]) -> None:
    run = raw(sample())
    report = json.loads(run.stdout)
    report["info"]["images"] = IMAGES | images
    with pytest.raises(Exception, match="report"):
        read_sample(run.model_copy(update={"stdout": json.dumps(report)}))


def test_a_layout_with_a_tower_is_two_files(tmp_path: Path) -> None:
    runtime = RUNTIMES["llama.cpp"]
    artifact = runtime.export(LAYOUT, "f16", RandomWeights(), tmp_path / "m")
    assert artifact.projector is not None and artifact.bytes == artifact.size + artifact.projector.size
    file = GgufFile.read(projector_path(tmp_path / "m"))
    shape = VisionShape(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, projector_hidden_size=32,
        patch_size=8,
    )  # fmt: skip
    tensors = image_tensors(shape.tower(64), 8)
    assert {tensor.name: tensor.shape for tensor in tower_tensors(shape.layout(), 64)} == {
        name: values.shape for name, values in tensors.items()
    }
    assert file.tensors.keys() == tensors.keys()
    recipe = runtime.export(LAYOUT, "f16", RandomWeights(), tmp_path / "r", recipe=True)
    assert recipe.projector is not None and recipe.projector.sha256 == artifact.projector.sha256
    other = Layout.parse(LAYOUT.format().replace("tokens=16", "tokens=8"))
    assert runtime.export(other, "f16", RandomWeights(), tmp_path / "o").sha256 != artifact.sha256
    with pytest.raises(Unsupported, match="nas family gguf"):
        weights = tmp_path / "w.safetensors"
        save_file(Model(replace(LAYOUT, tower=None)).state_dict(), weights)
        runtime.export(LAYOUT, "f16", Checkpoint(weights, sha256_of(weights)), tmp_path / "t")


def test_pictures_decide_their_answers() -> None:
    task = make_task("pictures", {"cells": 2})
    assert isinstance(task, MediaTask)
    inputs, labels = task.batch(np.random.default_rng(0), 64)
    pixels, triples = inputs[:, : task.media.amount], inputs[:, task.media.amount :].reshape(64, -1, 3)
    assert pixels.max() < 1 << 24 and triples.max() < task.vocab
    assert (labels[:, task.media.amount :].reshape(64, -1, 3)[:, :, 1] == triples[:, :, 2]).all()
    whole = pixels.reshape(64, task.media.rows, task.media.columns)
    for picture, questions in zip(whole, triples.tolist(), strict=True):
        answers: dict[tuple[int, int], set[int]] = {}
        for kind, about, answer in questions:
            answers.setdefault((kind, about), set()).add(answer)
            if kind == 1:
                top, side = (place * task.media.rows // 2 for place in divmod(about - 3, 2))
                part = picture[top : top + 16, side : side + 16]
                rgb = np.stack([part >> bit & 255 for bit in (16, 8, 0)], -1).reshape(-1, 3)
                near = [(abs(rgb - np.array(colour)).max(-1) <= 25).sum() for colour in COLOURS[:4]]
                assert int(np.argmax(near)) == answer - 15
        assert {len(choices) for choices in answers.values()} == {1}
    for wrong in ({"cells": 9}, {"side": 7}, {"objects": 1}, {"colours": 9}, {"questions": 0}):
        with pytest.raises(InvalidInput, match="pictures"):
            make_task("pictures", wrong)


def test_a_model_sees_its_picture() -> None:
    model = Model(LAYOUT).eval()
    pixels = torch.randint(0, 1 << 24, (2, 16, 16))
    tokens = torch.randint(0, 256, (2, 5))
    logits = model.answers(pixels, tokens)
    assert logits.shape == (2, 5, 256)
    assert not torch.allclose(logits, model.answers(0xFFFFFF - pixels, tokens))
    torch.testing.assert_close(logits[:1], model.answers(pixels[:1], tokens[:1]), rtol=1e-4, atol=1e-4)
    whole = torch.cat([pixels.flatten(1), tokens], 1)
    again, labels = logits_and_labels(model, whole, whole, Exhibit("images", 16, 16))
    torch.testing.assert_close(again, logits)
    assert (labels == tokens).all()


def test_seeds_of_a_tower_train_and_are_scored(tmp_path: Path) -> None:
    job = task_job(LAYOUT, "pictures", TASKS["pictures"]["settings"])
    result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, log=lambda line: None)
    again = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path / "b", log=lambda line: None)
    assert isinstance(result, TrainResult) and result.losses == again.losses
    assert 0 < result.losses["task/pictures"] < 20 and exported_layout(job).tower is None
    groups = TaskData("pictures", make_task("pictures", TASKS["pictures"]["settings"]), 4, 0).groups()  # type: ignore[arg-type]
    model = Model(proxy_layout(job))
    ((score, chance),) = score_groups(model, groups, torch.device("cpu")).values()
    assert 0 < chance < score.loss


def test_a_study_of_vision_has_a_front(tmp_path: Path) -> None:
    with studied(tmp_path, SearchSpace.model_validate(VISION), "pictures") as (store, report, url):
        assert {row["metric"] for row in report["budgets"]} == {"image_encoding", "image_tokens"}
        assert 'class="hint">tower=' in httpx.get(url, timeout=60).text, "layouts are drawn without their towers"
        trial = f"{url}/trials/{report['front'][0]['trial']}"
        page, twin = httpx.get(trial, timeout=60), httpx.get(f"{trial}.json", timeout=60)
        with pytest.raises(InvalidInput, match="nas family vision"):
            study_origin(store, "study", [], (), None)
    assert page.status_code == 200 and "1 image of 64 x 64 pixels" in page.text
    assert "Parts of the time to the first token" in page.text and "language model" in page.text
    assert "image_connector" in twin.text and "--images 1" in page.text


def test_lists_of_towers_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.core.space.itertools.product", None)
    sizes = {name: [*range(1, 101)] for name in ("heads", "ffn", "connector", "tokens", "least")}
    with pytest.raises(ValidationError, match="at most 4096 towers"):
        TowerKnob.model_validate({"shape": "768x12", **sizes})
