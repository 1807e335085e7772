from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_training_lab import LAYOUT, SETTINGS, session, write_corpus, write_family, write_tokenizer
from safetensors.torch import load_file

from nas.core.errors import CandidateFailed, InvalidInput, UnknownName
from nas.core.layout import Layout
from nas.family.member_training import Order, train_member
from nas.family.recipe import REPORT_LENGTHS, Recipe, Settings, complete, read_settings
from nas.family.session import CHECKPOINT, Session, Worker, pause_s
from nas.nn.model import Model
from nas.nn.weights import save_weights


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAS_HOME", "NAS_CACHE", "NAS_LOCK"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def tokenizer(tmp_path: Path, corpus: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json", corpus)


class _KilledError(Exception):
    pass


def killed_after(passes: int) -> Worker:
    left = [passes]

    def hook() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise _KilledError

    return Worker(0, 1, torch.device("cpu"), hook, lambda line: None)


def weights(trained: Session) -> dict[str, torch.Tensor]:
    return trained.state.model.state_dict()


def test_the_loss_falls_and_the_text_is_learned(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    trained = session(tmp_path / "run", corpus, tokenizer)
    before = trained.held_out()["all"]
    trained.run()
    assert trained.steps == 30 and trained.tokens == 30 * 256
    assert trained.state.losses[-5:].mean() < trained.state.losses[:5].mean() - 1
    assert trained.held_out()["all"] < before - 1
    bias = [tensor for name, tensor in weights(trained).items() if name.endswith("bias.weight")]
    assert all(tensor.abs().sum() > 0 for tensor in bias)  # experts were balanced


@pytest.mark.parametrize("passes", [1, 17, 26])
def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, corpus: Path, tokenizer: Path, passes: int
) -> None:
    calm = session(tmp_path / "calm", corpus, tokenizer)
    calm.run()
    with pytest.raises(_KilledError):
        session(tmp_path / "killed", corpus, tokenizer, worker=killed_after(passes)).run(checkpoint_s=0)
    resumed = session(tmp_path / "killed", corpus, tokenizer)
    assert resumed.state.step == passes
    resumed.run()
    assert torch.equal(resumed.state.losses, calm.state.losses)
    for name, tensor in weights(calm).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_a_damaged_checkpoint_starts_anew(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHECKPOINT).write_bytes(b"half a fi")
    assert session(tmp_path / "run", corpus, tokenizer).state.step == 0


def test_checkpoints_that_take_long_are_rare(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    saves: list[float] = []

    def save(path: Path, key: str) -> None:
        saves.append(now[0])
        now[0] += 0.5

    def step() -> None:
        now[0] += 1.0

    steps = Worker(0, 1, torch.device("cpu"), step, lambda line: None)
    trained = session(tmp_path / "run", corpus, tokenizer, worker=steps)
    monkeypatch.setattr("nas.family.session.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trained.state, "save", save)
    trained.run(checkpoint_s=2.0)
    assert saves == [2.0, 12.5, 23.0, 31.5]  # at least twenty times what the last one took, and at the end
    assert [pause_s(60.0, seconds) for seconds in (1.0, 10.0)] == [60.0, 200.0]
    assert pause_s(0.0, 10.0) == 0.0


def test_a_teacher_changes_what_is_learned(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    short = SETTINGS.model_copy(update={"tokens": 4 * 256})
    teacher = Model(LAYOUT, 7)
    taught = session(tmp_path / "taught", corpus, tokenizer, settings=short, teacher=teacher)
    alone = session(tmp_path / "alone", corpus, tokenizer, settings=short)
    kept = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    for each in (taught, alone):
        each.run()
    assert not torch.equal(weights(taught)["embed.weight"], weights(alone)["embed.weight"])
    assert all(torch.equal(kept[name], tensor) for name, tensor in teacher.state_dict().items())
    saved = load_file(tmp_path / "taught" / CHECKPOINT)
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer", "losses"}


def test_a_training_that_diverges_says_so(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    trained = session(tmp_path / "run", corpus, tokenizer)
    with torch.no_grad():
        trained.state.model.get_parameter("norm.weight").fill_(float("nan"))
    with pytest.raises(CandidateFailed, match="not finite at step 1"):
        trained.run()


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
def test_a_wrong_settings_file_is_told_by_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=problem):
        read_settings(tmp_path / "recipe.yaml")


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    order = Order(corpus=(corpus,), settings=SETTINGS, tokenizer=tokenizer)

    def problem(family: str = "tiny", size: str = "1M", **changes: object) -> str:
        asked = Order(**{**vars(order), **changes})  # type: ignore[arg-type]
        with pytest.raises(InvalidInput) as caught:
            train_member(family, size, asked, lambda line: None)
        return str(caught.value)

    with pytest.raises(UnknownName, match="unknown family 'tiny'"):
        train_member("tiny", "1M", order, lambda line: None)
    write_family()
    assert "unknown size of tiny '2M'; valid: 1M" in problem(size="2M")
    assert "1M has no tokenizer yet" in problem(tokenizer=None)
    assert "name at least one file or folder" in problem(corpus=())
    teacher = Model(Layout.parse("d32 v256 ffn=swiglu:32 [C3 A2/1]"))
    save_weights(teacher, tmp_path / "teacher.safetensors")
    assert "has a vocabulary of 256, the member one of 320" in problem(teacher=tmp_path / "teacher.safetensors")
    assert "5 workers, but a step of one of the stages has 2 sequences" in problem(workers=5)
    long = SETTINGS.stages[0].model_copy(update={"length": 10**6, "share": 1.0}) if SETTINGS.stages else None
    assert "a sequence of stage 'short' takes 1,000,001" in problem(
        settings=SETTINGS.model_copy(update={"stages": (long,)})
    )
