from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretrain_lab import (
    LAYOUT,
    SETTINGS,
    KilledError,
    alone,
    killed_after,
    pretraining,
    write_corpus,
    write_family,
    write_tokenizer,
)
from safetensors.torch import load_file
from torch import nn

from nas.core.errors import CandidateFailed, InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.model.nn.fit import TrainingState, Worker, next_interval
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.train.pretrain.member_training import CHECKPOINT, START, WEIGHTS, Work, run_plan, train_member
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.pretrain.recipe import REPORT_LENGTHS, Recipe, Settings, complete, read_settings

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def tokenizer(tmp_path: Path, corpus: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json", corpus)


def test_the_loss_falls_and_the_text_is_learned(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    training = pretraining(tmp_path / "run", corpus, tokenizer)
    before = training.score()
    state = training.run()
    assert state.step == state.steps == 30
    assert sum(phase.steps * phase.tokens for phase in training.plan.phases(alone())) == 30 * 256
    assert state.losses[-5:].mean() < state.losses[:5].mean() - 1
    assert training.score() < before - 1
    (bias,) = (tensor for name, tensor in training.model.state_dict().items() if name.endswith("bias.weight"))
    assert bias.abs().sum() > 0  # experts were balanced


@pytest.mark.parametrize("passes", [1, 17, 26])
def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, corpus: Path, tokenizer: Path, passes: int
) -> None:
    calm = pretraining(tmp_path / "calm", corpus, tokenizer)
    expected = calm.run()
    with pytest.raises(KilledError):
        pretraining(tmp_path / "killed", corpus, tokenizer).run(killed_after(passes), checkpoint_s=0)
    resumed = pretraining(tmp_path / "killed", corpus, tokenizer)
    lines: list[str] = []
    state = resumed.run(alone(log=lines.append))
    assert lines[0].endswith(f"from step {passes} to 30")
    assert torch.equal(state.losses, expected.losses)
    for name, tensor in calm.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


class _Parallel(nn.Module):
    """Takes the place of DistributedDataParallel, without other workers."""

    def __init__(self, module: nn.Module, broadcast_buffers: bool) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.module(*tensors)
        return loss

    def no_sync(self) -> nullcontext[None]:
        return nullcontext()


def test_all_workers_resume_from_the_checkpoint_that_worker_0_finds(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of a killed command may write one while worker 0 waits for their end."""
    for name, steps in (("before", 5), ("last", 9)):
        with pytest.raises(KilledError):
            pretraining(tmp_path / name, corpus, tokenizer).run(killed_after(steps), checkpoint_s=0)
    newer = tmp_path / "last" / CHECKPOINT

    def barrier() -> None:
        if newer.exists():
            newer.replace(tmp_path / "before" / CHECKPOINT)

    monkeypatch.setattr("nas.model.nn.fit.dist", SimpleNamespace(barrier=barrier, all_reduce=lambda tensor: None))
    monkeypatch.setattr("nas.model.nn.fit.DistributedDataParallel", _Parallel)
    lines: list[str] = []
    worker = Worker(torch.device("cpu"), lines.append, rank=1, world=2)
    pretraining(tmp_path / "before", corpus, tokenizer).run(worker)
    assert lines[0].endswith("from step 9 to 30")


def test_a_damaged_checkpoint_is_removed_and_the_training_starts_again(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    lines: list[str] = []
    training = pretraining(tmp_path / "run", corpus, tokenizer, SETTINGS.model_copy(update={"tokens": 4 * 256}))
    (tmp_path / "run" / CHECKPOINT).write_bytes(b"half a fi")
    training.run(alone(log=lines.append))
    assert "is damaged and removed" in lines[0] and "from step 0 to 4" in lines[1]


def test_what_killed_runs_wrote_in_part_is_removed(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    training = pretraining(tmp_path / "run", corpus, tokenizer, SETTINGS.model_copy(update={"tokens": 4 * 256}))
    parts = [training.folder / name for name in (f".{CHECKPOINT}.x1", f".{WEIGHTS}.x1", f"{START}.0f1e.partial")]
    for path in parts:
        path.touch()
    run_plan(Work(training.plan, None, training.folder, 1, tmp_path / "lock", 60.0), alone())
    assert not any(path.exists() for path in parts)


def test_checkpoints_that_take_long_are_rare(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    saves: list[float] = []

    def save(state: TrainingState, paths: list[Path], identities: object) -> None:
        saves.append(now[0])
        now[0] += 0.5

    def step() -> None:
        now[0] += 1.0

    clock = SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr("nas.model.nn.fit.time", clock)
    monkeypatch.setattr(TrainingState, "save", save)
    pretraining(tmp_path / "run", corpus, tokenizer).run(alone(step), checkpoint_s=2.0)
    assert saves == [2.0, 12.5, 23.0, 31.5]  # at least twenty times what the last one took, and at the end
    assert [next_interval(60.0, seconds) for seconds in (1.0, 10.0)] == [60.0, 200.0]
    assert next_interval(0.0, 10.0) == 0.0


def test_time_in_the_hook_is_not_counted(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def wait() -> None:
        now[0] += 100.0

    monkeypatch.setattr("nas.model.nn.fit.time", SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: now[0]))
    assert pretraining(tmp_path / "run", corpus, tokenizer).run(alone(wait)).seconds == 0.0


def test_a_teacher_changes_what_is_learned(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    short = SETTINGS.model_copy(update={"tokens": 4 * 256})
    save_weights(Model(LAYOUT, 7), tmp_path / "teacher.safetensors")
    taught = pretraining(tmp_path / "taught", corpus, tokenizer, short, tmp_path / "teacher.safetensors")
    untaught = pretraining(tmp_path / "alone", corpus, tokenizer, short)
    for training in (taught, untaught):
        training.run()
    assert not torch.equal(taught.model.state_dict()["embed.weight"], untaught.model.state_dict()["embed.weight"])
    saved = load_file(tmp_path / "taught" / CHECKPOINT)
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer", "losses"}


def test_a_training_that_diverges_fails(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    training = pretraining(tmp_path / "run", corpus, tokenizer)
    with torch.no_grad():
        training.model.get_parameter("norm.weight").fill_(float("nan"))
    with pytest.raises(CandidateFailed, match="not finite at step 1"):
        training.run()


def test_the_reports_recipe_at_the_reports_size() -> None:
    layout = Layout.parse(
        "d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]"
    )
    recipe, reasons = complete(Settings(tokens=11 * 10**12), layout)
    assert tuple(stage.length for stage in recipe.stages) == REPORT_LENGTHS
    tokens = [recipe.steps(s) * recipe.sequences(s) * s.length for s in recipe.stages]
    assert tokens == pytest.approx([10e12, 1e12], rel=1e-2)
    assert (recipe.betas, recipe.weight_decay, recipe.clip, recipe.eps) == ((0.9, 0.95), 0.1, 1.0, 1e-8)
    assert {reason.what for reason in reasons} == {"lr", "batch_tokens", "stages"}


def test_a_small_recipe_keeps_the_ratio_of_lengths() -> None:
    recipe, reasons = complete(Settings(tokens=100_000), LAYOUT)
    short, long = (stage.length for stage in recipe.stages)
    assert (short, long) == (128, 1024)
    assert "8 sequences" in reasons[-1].reason


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("tokens: 1000\nfim: {}\nstages:\n  - {name: a, length: 64, share: 1, corpus: [more]}\n")
    settings = read_settings(path)
    assert settings.fim is not None and settings.fim.share == 0.5
    assert settings.stages is not None and settings.stages[0].corpus == (str(tmp_path / "more"),)
    recipe, _ = complete(settings, LAYOUT)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages:\n  - name: a\n    lenght: 64\n    share: 1\n", r"recipe\.yaml:3: .*did you mean 'length'"),
        ("lr: 1e-3\ntockens: 5\n", r"recipe\.yaml:2: .*did you mean 'tokens'"),
        ("stages:\n  - {name: a, length: 64, share: 0.5}\n", r"recipe\.yaml:1: .*add up to 0\.5"),
        (
            "stages:\n  - name: a\n    length: 64\n    share: 1\n    schedule: {warmup: .6, decay: .6}\n",
            r"recipe\.yaml:5: .*exceed the stage",
        ),
        ("distillation: {temperature: 0.5}\n", r"recipe\.yaml:1: distillation\.temperature: .*greater than or equal"),
    ],
)
def test_problems_of_a_settings_file_have_line_numbers(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=problem):
        read_settings(tmp_path / "recipe.yaml")


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    request = PretrainingRequest(corpus=(corpus,), settings=SETTINGS, tokenizer=tokenizer)

    def problem(family: str = "tiny", size: str = "1M", **changes: object) -> str:
        variant = replace(request, **changes)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput) as caught:
            train_member(family, size, variant, lambda line: None)
        return str(caught.value)

    with pytest.raises(UnknownName, match="unknown family 'tiny'"):
        train_member("tiny", "1M", request, lambda line: None)
    write_family()
    assert "unknown size of tiny '2M'; valid: 1M" in problem(size="2M")
    assert "1M has no tokenizer yet" in problem(tokenizer=None)
    assert "name at least one file or folder" in problem(corpus=())
    teacher = Model(Layout.parse("d32 v256 ffn=swiglu:32 [C3 A2/1]"))
    save_weights(teacher, tmp_path / "teacher.safetensors")
    assert "has a vocabulary of 256, the member one of 320" in problem(teacher=tmp_path / "teacher.safetensors")
    assert "5 workers, but a step of one of the stages has 2 sequences; give it a larger batch" in problem(workers=5)
    long = SETTINGS.stages[0].model_copy(update={"length": 10**6, "share": 1.0}) if SETTINGS.stages else None
    assert "a sequence of stage 'short' takes 1,000,001" in problem(
        settings=SETTINGS.model_copy(update={"stages": (long,)})
    )
