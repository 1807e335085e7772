"""Search for models that read sound: towers, spaces, figures, files and the task, as in `test_vision_space.py`."""

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
from nas.core.measurement import TTFT_PARTS, Repetition
from nas.core.space import SearchSpace
from nas.core.task import IGNORE, MediaTask, make_task, task_kind
from nas.core.tower import SoundTower, Tower
from nas.core.workload import Workload
from nas.measure.protocol.repetitions import summarise
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import RandomWeights, projector_path
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.projector import tower_tensors
from nas.model.nn.model import Model
from nas.search.proposers.features import Features
from nas.search.proposers.figure_costs import costs_of
from nas.search.proposers.membership import reasons_outside
from nas.search.proxy.job import TrainResult
from nas.search.proxy.train import train
from nas.search.spaces.identity import space_difference
from nas.search.spaces.loader import load_space
from nas.train.towers.audio import AudioShape
from nas.train.towers.gguf import sound_tensors
from nas.train.towers.modality import MediaFile
from nas.train.towers.sounds import SoundSettings

TOWER = "sound:16x2:heads=2:ffn=24:connector=32:channels=8:bands=16"
LAYOUT = Layout.parse(f"d64 v256 tower={TOWER} ffn=swiglu:64 [C3 A4/2]")
SHAPE = AudioShape(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, projector_hidden_size=32,
    subsampling_conv_channels=8, num_mel_bins=16,
)  # fmt: skip
ASK = {"workload": "ask"}
TASKS = {"sounds": {"steps": 4, "settings": {"levels": 3, "moves": 2}}}
AUDIO: dict[str, Any] = {
    **TINY,
    "task": "audio",
    "model": {**TINY["model"], "tower": {"shape": ["sound:16x2", "sound:32x2"], "channels": [8, 16]}},
    "workloads": {"ask": {"prompt": 16, "gen": 4, "seconds": 2}},
    "budgets": [{"metric": "sound_encoding", "max": "4x", **ASK}, {"metric": "sound_factor", "max": "4x", **ASK}],
    "objectives": [{"name": "quality", "metric": "quality"}, {"name": "latency", "metric": "ttft", **ASK}],
    "quality": task_quality(TASKS),
}
SOUNDS = {"tokens": 26, "wall_ns": [[1_000_000, 3_000_000, 1_000_000]], "cpu_ns": [[1_000_000, 3_000_000, 1_000_000]]}


def test_a_tower_of_sound_has_a_line_weights_and_tokens() -> None:
    assert LAYOUT.tower == SHAPE.layout() == Tower.parse(TOWER)
    assert Layout.parse(LAYOUT.format()) == Layout.from_json(LAYOUT.to_json()) == LAYOUT
    assert LAYOUT.params.total == sum(weight.numel() for weight in Model(LAYOUT).parameters())
    assert Tower.parse("sound:512x17").format() == "sound:512x17"
    for count in (1600, 12_799, 12_800, 16_000, 40_123):
        text = SoundSettings().text(MediaFile(Path("a.wav"), "a.wav", "", (count,)))
        assert SoundTower.of(512, 17).tokens_of(count / 16_000) == text.count("<audio>"), count
    proxy = narrow(Layout.parse("d1024 v256 tower=sound:512x17 ffn=swiglu:64 [C3 A16/2]"), 64, 256).tower
    assert isinstance(proxy, SoundTower) and (proxy.width, proxy.layers, proxy.bands) == (32, 17, 16)


@pytest.mark.parametrize(
    ("line", "words"),
    [("sound:48x2", "even divisor"), ("sound:1024x2", "width"), ("sound:16x2:patch=8", "no patch"),
     ("sound:16x2:bands=12", "multiple of 8"), ("sound:16x2:layers=3", "no layers"), ("noise:16x2", "cannot read")],
)  # fmt: skip
def test_what_is_no_tower_of_sound_is_named(line: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Tower.parse(line)


def test_a_space_of_audio_is_read_and_sampled() -> None:
    space = SearchSpace.model_validate(AUDIO)
    assert len(space.model.tower.choices) == 4 and space.workloads["ask"].sounds == 1
    assert {layout.tower for layout in space.references.layouts().values()} == {Tower.parse("sound:16x2:channels=8")}
    layouts = varied(space)
    assert {layout.tower.format() for layout in layouts if layout.tower} == set(space.model.tower.choices)
    assert not any(reasons_outside(space, layout) for layout in layouts)
    assert Features(space).matrix(layouts).shape[1] == len(Features(space).names)
    assert costs_of(space, space.objectives[1]).terms(layouts[:1])[0, -4:].all()


def test_a_space_with_other_towers_is_another_one() -> None:
    model = {**AUDIO["model"], "tower": ["sound:16x2:channels=8"]}
    (difference,) = space_difference(*(SearchSpace.model_validate(data) for data in (AUDIO, AUDIO | {"model": model})))
    assert difference.startswith("model.tower.choices: ")


def test_the_packaged_space_is_of_audio() -> None:
    space = load_space("lfm2-audio")
    assert [RUNTIMES["llama.cpp"].supports(layout).arch for layout in space.references.layouts().values()] == [
        "lfm2",
        "qwen3",
    ]
    tower = space.references.layouts()["published"].tower
    assert tower is not None and space.workloads["question"].tower_tokens(tower) == 101
    assert "sounds" not in load_space("lfm2-vl").workloads["picture"].key()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "vision"}, "needs a tower of images"),
        ({"task": "generation"}, "task: audio"),
        ({"model": {**AUDIO["model"], "tower": ["sound:16x2", "16x2"]}}, "needs a tower of sounds"),
        ({"workloads": {"ask": {"sounds": 0}}}, "no workload of audio has sounds"),
        ({"workloads": {"ask": {"images": 1}}}, "images or sounds, not both"),
        ({"workloads": {"ask": {"sounds": 0, "images": 1}}}, "task: vision"),
        ({"workloads": {"ask": {"seconds": 121}}}, "120"),
        ({"budgets": [{"metric": "image_tokens", "max": "1x", **ASK}]}, "has no images"),
        ({"quality": {"rungs": [{"name": "a", "tasks": {"pictures": {"steps": 3}}}]}}, "no task of audio"),
    ],
)  # fmt: skip
def test_what_is_of_another_task_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchSpace.model_validate(AUDIO | changes)


def test_parts_of_the_time_to_the_first_token_add_up() -> None:
    hearing, beside = sample(ttft_ms=10.0, tokens=8, info={"sounds": SOUNDS}), sample(ttft_ms=5.0, tokens=8)
    workload = Workload(prompt=16, gen=8, sounds=1, seconds=2)
    repetitions = [Repetition(valid=True, sample=hearing, reference=beside)] * 3
    figures = summarise(repetitions, workload, 1000, reference_times(beside))
    assert figures["sound_encoding"].value == pytest.approx(5.0)
    assert figures["sound_factor"].value == pytest.approx(5.0 / 2000) and figures["sound_factor"].unit == ""
    assert figures["sound_tokens"].value == 26 and figures["prefill_tps"].value == pytest.approx(8400)
    whole = sum(figures[name].value or 0 for name in TTFT_PARTS["sounds"])
    assert whole == pytest.approx(figures["ttft"].value)
    deaf = summarise([Repetition(valid=True, sample=beside, reference=beside)], workload, 1000, None)
    assert deaf["sound_factor"].value is None and "tower=" in (deaf["sound_encoding"].reason or "")


def test_a_layout_with_a_tower_of_sound_is_two_files(tmp_path: Path) -> None:
    runtime = RUNTIMES["llama.cpp"]
    artifact = runtime.export(LAYOUT, "f16", RandomWeights(), tmp_path / "m")
    assert artifact.projector is not None and artifact.bytes == artifact.size + artifact.projector.size
    weights = sound_tensors(SHAPE.tower(64), SHAPE)
    tensors = {tensor.name: tensor.shape for tensor in tower_tensors(SHAPE.layout(), 64)}
    assert tensors == {name: values.shape for name, values in weights.items()}
    assert GgufFile.read(projector_path(tmp_path / "m")).tensors.keys() == weights.keys()
    recipe = runtime.export(LAYOUT, "f16", RandomWeights(), tmp_path / "r", recipe=True)
    assert recipe.projector is not None and recipe.projector.sha256 == artifact.projector.sha256


def test_sounds_decide_their_answers() -> None:
    task = make_task("sounds", {})
    assert isinstance(task, MediaTask) and task_kind(task) == "audio"
    inputs, labels = task.batch(np.random.default_rng(0), 800)
    rows = inputs[:, : task.media.amount].reshape(800, 2, -1) / 1000
    assert np.allclose(rows.mean((1, 2)), 0, atol=1e-3) and np.allclose(rows.std((1, 2)), 1, atol=1e-3)
    assert (inputs[:, task.media.amount :] == np.arange(6)).all()
    assert (labels[:, : task.media.amount] == IGNORE).all()
    answers = labels[:, task.media.amount :].reshape(800, 3, 2)
    for question, (first, kinds) in enumerate(((6, 6), (12, 6), (18, 4))):  # a linear map of a syllable tells most
        symbols = np.arange(first, first + kinds)
        assert set(answers[:, question].ravel()) == set(symbols)
        answer = (answers[:600, question, :, None] == symbols).reshape(1200, -1) - 1 / kinds
        weights = np.linalg.lstsq(rows[:600].reshape(1200, -1), answer)[0]
        right = (rows[600:] @ weights).argmax(-1) == answers[600:, question] - first
        assert right.mean() > 0.7, question
    for wrong in ({"syllables": 65}, {"frames": 3}, {"levels": 1}, {"moves": 5}):
        with pytest.raises(InvalidInput, match="sounds"):
            make_task("sounds", wrong)


def test_a_proxy_starts_with_embeddings_of_what_it_hears() -> None:
    proxy = narrow(Layout.parse("d1024 v256 tower=sound:512x17 ffn=swiglu:64 [C3 A16/2]"), 64, 256)
    numbers = torch.from_numpy(make_task("sounds", {}).batch(np.random.default_rng(0), 8)[0][:, :512]).view(8, 32, 16)
    with torch.no_grad():
        embeddings = Model(proxy).tower(numbers)
    assert embeddings.var(0).mean() > 0.05 * embeddings.square().mean()


def test_a_proxy_hears_and_trains(tmp_path: Path) -> None:
    model = Model(LAYOUT)
    numbers, tokens = torch.randint(-3000, 3000, (2, 32, 16)), torch.randint(0, 256, (2, 5))
    logits = model.answers(numbers, tokens)
    assert logits.shape == (2, 5, 256) and not torch.allclose(logits, model.answers(-numbers, tokens))
    torch.testing.assert_close(logits[:1], model.answers(numbers[:1], tokens[:1]), rtol=1e-4, atol=1e-4)
    job = task_job(LAYOUT, "sounds", TASKS["sounds"]["settings"])
    result = train(job, yield_hook=lambda: None, checkpoint_dir=tmp_path, log=lambda line: None)
    assert isinstance(result, TrainResult) and 0 < result.losses["task/sounds"] < 20


def test_a_study_of_audio_has_a_front(tmp_path: Path) -> None:
    with studied(tmp_path, SearchSpace.model_validate(AUDIO), "sounds") as (_, report, url):
        assert {row["metric"] for row in report["budgets"]} == {"sound_encoding", "sound_factor"}
        page = httpx.get(f"{url}/trials/{report['front'][0]['trial']}", timeout=60)
    assert page.status_code == 200 and "1 sound of 2 s" in page.text and "--sounds 1" in page.text
