"""Training at toy size: determinism, continuation, resumption, failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nas.core.errors import CandidateFailed, InvalidInput
from nas.core.layout import Layout
from nas.model.nn.conv import GatedShortConv
from nas.model.nn.fit import TrainingState, Worker, move_average, thinned
from nas.model.nn.model import Model
from nas.model.nn.weights import padded_weights
from nas.model.text.corpus import MIN_BYTES, CorpusRef, build_corpus, refer
from nas.search.proxy import train as train_module
from nas.search.proxy.data import LmData, logits_and_labels, open_data
from nas.search.proxy.job import LmRun, TaskRun, TrainJob, TrainResult, exported_layout, train_key_inputs, weights_file
from nas.search.proxy.train import train, train_seeds

LAYOUT = Layout.parse("d32 v256 ffn=moe:4x2:20 [C3+swiglu:40 A2/1]")
PADDED = Layout.parse("d32 v256 ffn=moe:4x2:32 [C3+swiglu:64 A2/1]")
TIMES = {"seconds", "cpu_seconds", "key", "steps", "tokens"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusRef:
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAS_CACHE", str(folder / "cache"))
        words = "".join(f"{n} squared is {n * n}.\n" for n in range(4000))
        (folder / "a.txt").write_text(words[:MIN_BYTES])
        (folder / "b.txt").write_text(words[-MIN_BYTES:].upper())
        return refer(["a.txt", "b.txt"], folder)


def lm_job(corpus: CorpusRef, **changes: Any) -> TrainJob:
    fields: dict[str, Any] = {
        "layout": LAYOUT.to_json(),
        "run": LmRun(corpus=corpus, length=16, eval_bytes=256),
        "steps": 6,
        "batch": 2,
        "lr": 3e-3,
        "warmup": 4,
        "weight_decay": 0.1,
        "clip": 1.0,
        "ema": 0.9,
        "seed": 0,
    }
    return TrainJob(**(fields | changes))


def task_job(**changes: Any) -> TrainJob:
    return lm_job(CorpusRef(source="default", hash="0" * 64), run=TaskRun(task="selcopy"), **changes)


def run(
    job: TrainJob, folder: Path, hook: Callable[[], None] | None = None, log: Callable[[str], None] = lambda line: None
) -> TrainResult:
    """Trains; with a hook, which may stop it, a checkpoint is written at every step."""
    every = 60.0 if hook is None else 0.0
    return train(
        job, yield_hook=hook or (lambda: None), checkpoint_dir=folder, device="cpu", log=log, checkpoint_s=every
    )


def numbers(result: TrainResult) -> dict[str, Any]:
    """What must be equal to the last bit."""
    return result.model_dump(exclude=TIMES)


def weights(result: TrainResult, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(weights_file(folder, result.key))


class Stopped(Exception):
    """Stands for a kill between two steps."""


def stop_after(steps: int) -> Callable[[], None]:
    calls = iter(range(steps))

    def hook() -> None:
        if next(calls, None) is None:
            raise Stopped

    return hook


@pytest.mark.parametrize("job", ["lm", "task"])
def test_the_same_job_gives_the_same_numbers(job: str, corpus: CorpusRef, tmp_path: Path) -> None:
    jobs = {"lm": lm_job(corpus), "task": task_job()}
    first, second = run(jobs[job], tmp_path / "one"), run(jobs[job], tmp_path / "two")
    assert numbers(first) == numbers(second)
    other = run(jobs[job].model_copy(update={"seed": 1}), tmp_path / "three")
    assert other.weights_sha256 != first.weights_sha256


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_stopped_training_goes_on_to_the_same_numbers(stop: int, corpus: CorpusRef, tmp_path: Path) -> None:
    job = lm_job(corpus)
    whole = run(job, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(job, tmp_path / "cut", stop_after(stop))
    steps: list[int] = []
    resumed = run(job, tmp_path / "cut", lambda: steps.append(1))
    assert len(steps) == job.steps - stop
    assert numbers(resumed) == numbers(whole)


def test_a_longer_rung_continues_to_what_training_at_once_gives(corpus: CorpusRef, tmp_path: Path) -> None:
    short, long = lm_job(corpus, steps=3), lm_job(corpus, steps=8)
    at_once = run(long, tmp_path / "once")
    shorter = run(short, tmp_path / "ladder")
    steps: list[int] = []
    continued = run(long.model_copy(update={"resume_from": shorter.key}), tmp_path / "ladder", lambda: steps.append(1))
    assert len(steps) == 5
    assert numbers(continued) == numbers(at_once)
    assert continued.key == at_once.key


def test_a_longer_rung_continues_from_before_the_rate_fell(corpus: CorpusRef, tmp_path: Path) -> None:
    short, long = (lm_job(corpus, steps=steps, decay=0.5, optimiser="muon") for steps in (4, 8))
    at_once = run(long, tmp_path / "once")
    shorter = run(short, tmp_path / "ladder")
    steps: list[int] = []
    continued = run(long.model_copy(update={"resume_from": shorter.key}), tmp_path / "ladder", lambda: steps.append(1))
    assert len(steps) == 6
    assert numbers(continued) == numbers(at_once)
    assert numbers(continued) != numbers(run(lm_job(corpus, steps=8, optimiser="muon"), tmp_path / "constant"))


def test_the_rate_warms_up_stays_and_falls(corpus: CorpusRef) -> None:
    job = lm_job(corpus, steps=10, warmup=2, decay=0.3, lr=1.0)
    phases = train_module._phases(job, [open_data(job)], None)
    rates = [phase.rate(step) for phase in phases for step in range(phase.steps)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    (first,), (later,) = phases[1].batches(0), phases[0].batches(7)
    assert torch.equal(first[0], later[0]), "the data of a step does not depend on the schedule"


def test_a_shorter_rung_that_was_cleaned_up_is_said_and_trained_again(corpus: CorpusRef, tmp_path: Path) -> None:
    lines: list[str] = []
    job = lm_job(corpus, resume_from="f" * 64)
    result = run(job, tmp_path / "gone", log=lines.append)
    assert any("is gone" in line for line in lines)
    assert numbers(result) == numbers(run(lm_job(corpus), tmp_path / "plain"))


def test_a_finished_training_is_not_trained_again(corpus: CorpusRef, tmp_path: Path) -> None:
    first = run(lm_job(corpus), tmp_path)
    again = run(lm_job(corpus), tmp_path, stop_after(0))
    assert numbers(again) == numbers(first)


def test_a_checkpoint_of_another_run_is_not_continued(corpus: CorpusRef, tmp_path: Path) -> None:
    other = run(lm_job(corpus, steps=3, lr=1e-3), tmp_path)
    with pytest.raises(AssertionError, match="another run"):
        run(lm_job(corpus, resume_from=other.key), tmp_path)


def test_the_result_is_scored_above_chance_and_loads_as_a_padded_model(corpus: CorpusRef, tmp_path: Path) -> None:
    job = lm_job(corpus, steps=60, batch=4, lr=1e-2)
    result = run(job, tmp_path)
    data = open_data(job)
    chance = {name: group.chance for name, group in data.groups().items()}
    assert set(result.scores) == set(chance) == {"lm/a.txt", "lm/b.txt"}
    for name, score in result.scores.items():
        assert score == pytest.approx(chance[name] - result.losses[name])
        assert score > 0.3
    assert exported_layout(job) == PADDED
    model = Model(PADDED, seed=None)
    model.load_state_dict(weights(result, tmp_path))
    group = data.groups()["lm/a.txt"]
    with torch.no_grad():
        logits = model.eval()(group.inputs)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), group.labels.flatten()).item()
    assert nats / math.log(2) == pytest.approx(result.losses["lm/a.txt"], rel=1e-4)
    assert result.curve[0][1] > result.curve[-1][1]
    assert result.curve[-1][0] == result.steps == 60
    assert result.tokens == 60 * 4 * 16


def test_experts_are_balanced_while_training(corpus: CorpusRef, tmp_path: Path) -> None:
    bias = weights(run(lm_job(corpus), tmp_path), tmp_path)["layers.1.ffn.bias.weight"]
    assert bias.abs().max() > 0
    assert bias.abs().max() <= 6 * train_module.BALANCE_RATE + 1e-6


def test_a_diverging_candidate_fails_as_its_own_fault(corpus: CorpusRef, tmp_path: Path) -> None:
    with pytest.raises(CandidateFailed, match="not finite") as raised:
        run(lm_job(corpus, steps=30, lr=1e30, warmup=0), tmp_path)
    assert raised.value.reason == "diverged"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
    ],
)
def test_running_out_of_memory_is_the_candidates_fault(error: Exception, corpus: CorpusRef, tmp_path: Path) -> None:
    def hook() -> None:
        raise error

    with pytest.raises(CandidateFailed) as raised:
        run(lm_job(corpus), tmp_path, hook)
    assert raised.value.reason == "out_of_memory"


def test_other_errors_are_not_the_candidates(corpus: CorpusRef, tmp_path: Path) -> None:
    def hook() -> None:
        raise RuntimeError("the host lock is broken")

    with pytest.raises(RuntimeError, match="host lock"):
        run(lm_job(corpus), tmp_path, hook)


def test_a_real_allocation_that_fails_is_recognised(corpus: CorpusRef, tmp_path: Path) -> None:
    def hook() -> None:
        torch.empty(1 << 60)

    with pytest.raises(CandidateFailed) as raised:
        run(lm_job(corpus), tmp_path, hook)
    assert raised.value.reason == "out_of_memory"


def test_batches_are_common_to_all_layouts_and_differ_by_step_and_seed(corpus: CorpusRef) -> None:
    wide = Layout.parse("d64 v256 ffn=swiglu:64 [C3]").to_json()
    data, wide_data = open_data(lm_job(corpus)), open_data(lm_job(corpus, layout=wide))
    for step in (0, 5):
        assert torch.equal(data.batch(step)[0], wide_data.batch(step)[0])
    assert not torch.equal(data.batch(0)[0], data.batch(1)[0])
    assert not torch.equal(data.batch(0)[0], open_data(lm_job(corpus, seed=1)).batch(0)[0])


def test_a_domain_that_is_shorter_than_a_sequence_is_named(corpus: CorpusRef) -> None:
    with pytest.raises(InvalidInput, match=r"sequences of 131,072: a\.txt, b\.txt"):
        open_data(lm_job(corpus, run=LmRun(corpus=corpus, length=1 << 17, eval_bytes=256)))


def test_scores_that_are_not_finite_are_the_candidates_fault(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No JSON holds them: a result with one would end the study."""
    original = train_module.score_groups

    def broken(*options: Any) -> dict[str, Any]:
        return {name: (score._replace(loss=math.nan), chance) for name, (score, chance) in original(*options).items()}

    monkeypatch.setattr(train_module, "score_groups", broken)
    with pytest.raises(CandidateFailed, match="not finite") as caught:
        run(lm_job(corpus), tmp_path)
    assert caught.value.reason == "not_finite"


def test_training_windows_never_reach_the_held_out_part(tmp_path: Path, home: Path) -> None:
    size = MIN_BYTES
    cut = size - round(0.05 * size)
    (tmp_path / "a.txt").write_text("t" * cut + "h" * (size - cut))
    data = LmData(build_corpus(["a.txt"], tmp_path).domains, batch=64, length=16, eval_bytes=256, seed=0)
    for step in range(20):
        inputs, labels = data.batch(step)
        assert torch.all(inputs == ord("t"))
        assert torch.all(labels == ord("t"))
    assert torch.all(data.groups()["lm/a.txt"].inputs == ord("h"))


def test_the_weight_average_starts_quick_and_ends_slow() -> None:
    average, value = [torch.zeros(1)], [torch.ones(1)]
    move_average(average, value, 0.5, 1)
    assert average[0].item() == pytest.approx(1 - 2 / 11)
    slow = [torch.zeros(1)]
    move_average(slow, value, 0.5, 1000)
    assert slow[0].item() == pytest.approx(0.5)


def test_the_average_is_that_of_the_steps(corpus: CorpusRef, tmp_path: Path) -> None:
    """A decay of 0 keeps the last step's weights."""
    last = weights(run(lm_job(corpus, ema=0.0), tmp_path / "last"), tmp_path / "last")
    folder = tmp_path / "last" / lm_job(corpus, ema=0.0).key
    checkpoint = load_file(folder / "checkpoint.safetensors")
    expected = padded_weights({name: checkpoint[f"model.{name}"] for name in last}, PADDED)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in last.items())
    smooth = weights(run(lm_job(corpus, ema=0.9), tmp_path / "smooth"), tmp_path / "smooth")
    assert any(not torch.equal(smooth[name], last[name]) for name in last)


SEEDS = (0, 1, 2)


def together(jobs: list[TrainJob], folder: Path, hook: Callable[[], None] | None = None) -> list[TrainResult]:
    """Trains all seeds in one pass, as `run` trains one; none may fail."""
    lines: list[str] = []
    every, hook = (60.0, lambda: None) if hook is None else (0.0, hook)
    outcomes = train_seeds(
        jobs, yield_hook=hook, checkpoint_dir=folder, device="cpu", log=lines.append, checkpoint_s=every
    )
    results = [outcome for outcome in outcomes if isinstance(outcome, TrainResult)]
    assert len(results) == len(jobs), outcomes
    return results


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": Layout.parse("d32 v256 ffn=moe:8x1:32 [C3 A2/1]").to_json()},
        {"optimiser": "muon", "decay": 0.5, "ema": 0.0},
        {"layout": Layout.parse("d32 v256 ffn=swiglu:32 [M16 C12&W2/1@8(sink=1) A2/1]").to_json()},
        {"layout": Layout.parse("d32 v256 untied ffn=none [A2/1(qk_norm=0) A2/1(kv=0) C3]").to_json()},
    ],
    ids=["experts", "many-experts", "muon", "mixers", "untied"],
)
def test_seeds_in_one_pass_are_those_alone(changes: dict[str, Any], corpus: CorpusRef, tmp_path: Path) -> None:
    jobs = [lm_job(corpus, seed=seed, **changes) for seed in SEEDS]
    steps: list[int] = []
    pairs = zip(together(jobs, tmp_path / "all", lambda: steps.append(1)), jobs, strict=True)
    assert all(numbers(one) == numbers(run(job, tmp_path / "alone")) for one, job in pairs)
    assert len(steps) == jobs[0].steps


def test_a_task_of_two_symbols_at_once_trains_in_one_pass_too(corpus: CorpusRef, tmp_path: Path) -> None:
    """The model reads the sum of their embeddings; a position is one token."""
    run_ = TaskRun(task="recall", settings={"pairs": 2, "keys": 3, "values": 2, "length": 12})
    jobs = [lm_job(corpus, seed=seed, run=run_) for seed in SEEDS[:2]]
    for result, job in zip(together(jobs, tmp_path / "all"), jobs, strict=True):
        assert numbers(result) == numbers(run(job, tmp_path / "alone"))
        assert result.tokens == job.steps * job.batch * 12
    model, (pairs, labels) = Model(Layout.parse("d32 v6 ffn=none [A2/1]"), 0), open_data(jobs[0]).batch(0)
    sums = model.embed.weight[pairs[:, :, 0]] + model.embed.weight[pairs[:, :, 1]]
    assert torch.allclose(logits_and_labels(model, pairs, labels, None)[0], model(sums), atol=1e-6)


def test_seeds_that_were_stopped_go_on_together_or_alone(corpus: CorpusRef, tmp_path: Path) -> None:
    jobs = [lm_job(corpus, seed=seed) for seed in SEEDS]
    whole = together(jobs, tmp_path / "whole")
    for folder in ("cut", "split"):
        with pytest.raises(Stopped):
            together(jobs, tmp_path / folder, stop_after(4))
    steps: list[int] = []
    resumed = together(jobs, tmp_path / "cut", lambda: steps.append(1))
    assert [numbers(result) for result in resumed] == [numbers(result) for result in whole]
    assert len(steps) == 2
    run(jobs[0], tmp_path / "split")
    assert [numbers(result) for result in together(jobs, tmp_path / "split")] == [numbers(result) for result in whole]
    longer = [lm_job(corpus, seed=seed, steps=9, resume_from=job.key) for seed, job in zip(SEEDS, jobs, strict=True)]
    for one, job in zip(together(longer, tmp_path / "split"), longer, strict=True):
        assert numbers(one) == numbers(run(job.model_copy(update={"resume_from": None}), tmp_path / "new"))


@pytest.mark.parametrize("steps", [0, 2], ids=["none has a checkpoint", "all have one"])
def test_seeds_that_another_process_trains_at_the_same_time_train_too(
    steps: int, corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process writes a checkpoint of one seed after seeds were divided into passes, before they are read."""
    jobs = [lm_job(corpus, seed=seed) for seed in SEEDS]
    whole = together(jobs, tmp_path / "whole")
    if steps:
        with pytest.raises(Stopped):
            together(jobs, tmp_path / "both", stop_after(steps))
    divide = train_module._passes

    def meanwhile(*args: Any) -> list[list[TrainJob]]:
        passes = divide(*args)
        assert len(passes) == 1
        monkeypatch.setattr(train_module, "_passes", divide)
        with pytest.raises(Stopped):
            run(jobs[1], tmp_path / "both", stop_after(4 - steps))
        return passes

    monkeypatch.setattr(train_module, "_passes", meanwhile)
    both = together(jobs, tmp_path / "both")
    assert [numbers(result) for result in both] == [numbers(result) for result in whole]


def test_a_checkpoint_that_is_replaced_while_others_are_read_is_noticed(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [lm_job(corpus, seed=seed) for seed in SEEDS]
    whole = together(jobs, tmp_path / "whole")
    with pytest.raises(Stopped):
        together(jobs, tmp_path / "both", stop_after(2))
    restore = TrainingState.restore

    def meanwhile(state: TrainingState, paths: Sequence[Path]) -> None:
        monkeypatch.setattr(TrainingState, "restore", restore)
        with pytest.raises(Stopped):
            run(jobs[1], tmp_path / "both", stop_after(2))
        restore(state, paths)

    monkeypatch.setattr(TrainingState, "restore", meanwhile)
    both = together(jobs, tmp_path / "both")
    assert [numbers(result) for result in both] == [numbers(result) for result in whole]


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_seeds_train_in_one_pass_on_every_accelerator(device: str, corpus: CorpusRef, tmp_path: Path) -> None:
    jobs = [lm_job(corpus, seed=seed, batch=64) for seed in range(8)]
    assert len(train_module._passes(jobs, tmp_path, 20.0, Worker(torch.device("cpu"), print))) == 4
    assert train_module._passes(jobs, tmp_path, 20.0, Worker(torch.device(device), print)) == [jobs]


def test_stacked_training_is_close_to_that_of_one_model(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = lm_job(corpus)
    stacked = run(job, tmp_path / "stacked")
    monkeypatch.setattr(GatedShortConv, "stackable", False)
    assert train_module.unstackable(Model(Layout.from_json(job.layout), 0)) == ["GatedShortConv"]
    alone = run(job, tmp_path / "alone")
    assert stacked.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [loss for _, loss in stacked.curve] == pytest.approx([loss for _, loss in alone.curve], rel=1e-5)


def test_one_seed_that_diverges_leaves_the_others(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(layout: Layout, seed: int | None) -> Model:
        model = Model(layout, seed)
        if seed == 1:
            with torch.no_grad():
                model.embed.weight.fill_(torch.nan)
        return model

    monkeypatch.setattr(train_module, "Model", broken)
    jobs = [lm_job(corpus, seed=seed) for seed in SEEDS]
    outcomes = train_seeds(jobs, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=lambda line: None)
    assert [type(outcome) for outcome in outcomes] == [TrainResult, CandidateFailed, TrainResult]


def test_kinds_that_cannot_be_stacked_train_one_by_one(
    corpus: CorpusRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatedShortConv, "stackable", False)
    lines: list[str] = []
    jobs = [lm_job(corpus, seed=seed, steps=2) for seed in SEEDS]
    train_seeds(jobs, yield_hook=lambda: None, checkpoint_dir=tmp_path, device="cpu", log=lines.append)
    assert lines[0] == "GatedShortConv cannot be stacked: 3 seeds train one by one"


def test_products_in_bfloat16_train_too(corpus: CorpusRef, tmp_path: Path) -> None:
    exact, rounded = (run(lm_job(corpus, steps=20, precision=name), tmp_path) for name in ("float32", "bfloat16"))
    assert exact.weights_sha256 != rounded.weights_sha256
    assert rounded.losses == pytest.approx(exact.losses, abs=0.05)
    assert weights(rounded, tmp_path)["embed.weight"].dtype == torch.float32


@pytest.mark.gpu
def test_seeds_train_on_a_gpu(corpus: CorpusRef, tmp_path: Path) -> None:
    jobs = [lm_job(corpus, seed=seed, steps=20, precision="bfloat16") for seed in SEEDS]
    outcomes = train_seeds(jobs, yield_hook=lambda: None, checkpoint_dir=tmp_path / "gpu", device="cuda", log=print)
    for outcome, job in zip(outcomes, jobs, strict=True):
        assert isinstance(outcome, TrainResult)
        assert outcome.losses == pytest.approx(run(job, tmp_path / "cpu").losses, abs=0.05)


def test_curves_are_thinned_by_averaging() -> None:
    assert thinned(torch.arange(5.0), points=2) == [(3, 1.0), (5, 3.5)]
    assert thinned(torch.tensor([2.0, 4.0]), points=60) == [(1, 2.0), (2, 4.0)]


def test_the_key_covers_every_input_but_where_to_go_on_from(corpus: CorpusRef) -> None:
    base = lm_job(corpus)
    changes: list[dict[str, Any]] = [
        {"layout": Layout.parse("d32 v256 ffn=swiglu:32 [C3]").to_json()},
        {"run": LmRun(corpus=corpus, length=32, eval_bytes=256)},
        {"run": LmRun(corpus=corpus.model_copy(update={"hash": "1" * 64}), length=16, eval_bytes=256)},
        {"run": TaskRun(task="selcopy")},
        {"run": TaskRun(task="selcopy", settings={"items": 2})},
        *({name: 7} for name in ("steps", "batch", "lr", "warmup", "weight_decay", "clip", "seed", "replicate")),
        {"ema": 0.5},
        {"decay": 0.5},
        {"optimiser": "muon"},
        {"betas": (0.9, 0.99)},
        {"precision": "bfloat16"},
    ]
    keys = [base.key, *(lm_job(corpus, **change).key for change in changes)]
    assert len(set(keys)) == len(keys)
    assert lm_job(corpus, resume_from="a" * 64).key == base.key
    assert "resume_from" not in train_key_inputs(base)


def test_a_key_does_not_depend_on_whether_defaults_are_written() -> None:
    task = TaskRun(task="selcopy", settings={"items": 3})
    job = task_job()
    assert job.key == job.model_copy(update={"run": task}).key
    assert job.key != job.model_copy(update={"seed": 5}).key
