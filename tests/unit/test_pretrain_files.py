"""Record and files at the end of a training, also after a kill."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cli_runner import nas
from pretrain_lab import LAYOUT, SETTINGS, run_here, tiny_family, write_tokenizer

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.family import FILES, TRAINING, MemberFiles, MemberTraining, read_record, write_record
from nas.serve.views.family import member_folder, read_family
from nas.train.pretrain import member_training
from nas.train.pretrain.member_training import CHECKPOINT, START, WEIGHTS, Trained, Work, train_member, write_files_of
from nas.train.pretrain.next_token import PretrainingRequest
from nas.train.release.files import MemberFilesWriter
from nas.train.release.options import FileOptions

NO_GGUF = FileOptions(gguf=())


class _KilledError(Exception):
    pass


def never(*_: object) -> Any:
    raise AssertionError("it was trained again")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_family(tmp_path, monkeypatch)


@pytest.fixture
def member() -> Path:
    return member_folder("tiny", "1M")


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., MemberTraining]:
    def run(files: FileOptions = NO_GGUF, write: Any = write_files_of, **changes: object) -> MemberTraining:
        settings = SETTINGS.model_copy(update={"tokens": 4 * 256, **changes})
        request = PretrainingRequest(
            (tmp_path / "corpus",), settings, tokenizer=tmp_path / "tokenizer.json", workers=1, files=files
        )
        return train_member("tiny", "1M", request, lambda line: None, write)

    return run


def written(member: Path) -> MemberFiles:
    """What files.json lists, all of which is there."""
    record = read_record(member / FILES, MemberFiles)
    assert record is not None
    assert all((member / file.path).is_file() for file in record.files)
    return record


def test_a_trained_member_has_its_files(tmp_path: Path, member: Path, train: Callable[..., MemberTraining]) -> None:
    record = train()
    assert written(member).weights == f"checkpoint:{record.checkpoint}"
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    assert (member / "transformers" / "tokenizer.json").read_bytes() == tokenizer


def test_the_record_has_the_peak_memory_of_the_training_alone(train: Callable[..., MemberTraining]) -> None:
    before = bytearray(500_000_000)
    del before
    peak = train().peak_memory_mb
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmRSS:"))
    assert peak is not None and 0.5 * now < peak < now + 400


def test_a_system_that_keeps_the_peak_leaves_it_unknown(
    train: Callable[..., MemberTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_training, "_reset_peak_memory", lambda device: False)
    assert train().peak_memory_mb is None


@pytest.mark.parametrize("size", [300, 321])
def test_a_tokenizer_that_files_cannot_hold_is_refused_before_the_training(
    tmp_path: Path, train: Callable[..., MemberTraining], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(member_training, "run_workers", never)
    write_tokenizer(tmp_path / "tokenizer.json", tmp_path / "corpus", size)
    with pytest.raises(InvalidInput, match=f"{size} tokens, but the layout's vocabulary is v320"):
        train()


def test_a_tokenizer_that_llama_cpp_would_split_otherwise_is_refused_before_the_training(
    tmp_path: Path, train: Callable[..., MemberTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_training, "run_workers", never)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace('"ignore_merges":true', '"ignore_merges":false'), "utf-8")
    with pytest.raises(InvalidInput, match="ignore_merges is off"):
        train()


def test_more_workers_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(member_training, "run_workers", never)
    settings = SETTINGS.model_copy(update={"tokens": 4 * 256})
    request = PretrainingRequest((tmp_path / "corpus",), settings, tokenizer=tmp_path / "tokenizer.json", workers=2)
    with pytest.raises(InvalidInput, match="--workers: 2 workers need as many GPUs; this machine has 1"):
        train_member("tiny", "1M", request, lambda line: None)


def test_a_tokenizer_that_was_changed_meanwhile_is_refused(
    tmp_path: Path, member: Path, train: Callable[..., MemberTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    content = tokenizer.read_bytes()

    def change(*arguments: Any) -> dict[str, Any]:
        report = run_here(*arguments)
        tokenizer.write_bytes(content + b"\n")
        return report

    monkeypatch.setattr(member_training, "run_workers", change)
    with pytest.raises(InvalidInput, match="was changed during the training: put back the file of SHA-256"):
        train()
    assert not (member / TRAINING).exists() and not (member / FILES).exists()
    monkeypatch.setattr(member_training, "run_workers", run_here)
    tokenizer.write_bytes(content)
    record = train()
    assert written(member).weights == f"checkpoint:{record.checkpoint}"


def test_files_that_are_asked_for_later_are_written_without_a_training(
    member: Path, train: Callable[..., MemberTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = train(FileOptions(transformers=False, gguf=()))
    assert [file.path for file in written(member).files] == ["README.md"]
    monkeypatch.setattr(member_training, "run_workers", never)
    assert train() == record
    assert "transformers/model.safetensors" in {file.path for file in written(member).files}


@pytest.mark.parametrize("files_are_there", [False, True])
def test_a_training_that_is_killed_before_its_files_has_ended(
    member: Path, train: Callable[..., MemberTraining], monkeypatch: pytest.MonkeyPatch, files_are_there: bool
) -> None:
    def killed(trained: Trained, log: Callable[[str], None]) -> None:
        if files_are_there:
            write_files_of(trained, log)
        raise _KilledError

    with pytest.raises(_KilledError):
        train(write=killed)
    monkeypatch.setattr(member_training, "run_workers", never)
    record = train()
    assert written(member).weights == f"checkpoint:{record.checkpoint}"


def test_files_are_those_of_the_training_on_record(member: Path, train: Callable[..., MemberTraining]) -> None:
    def killed(trained: Trained, log: Callable[[str], None]) -> None:
        write_files_of(trained, log)
        raise _KilledError

    first = train(lr=5e-3)
    with pytest.raises(_KilledError):
        train(lr=1e-3, write=killed)
    second = read_record(member / TRAINING, MemberTraining)
    assert second is not None and second.checkpoint != first.checkpoint
    assert written(member).weights == f"checkpoint:{second.checkpoint}"
    assert train(lr=5e-3).checkpoint == first.checkpoint
    assert written(member).weights == f"checkpoint:{first.checkpoint}"


def test_weights_that_are_gone_are_reported(member: Path, train: Callable[..., MemberTraining]) -> None:
    record = train()
    (member / "training" / record.config["key"][:12] / WEIGHTS).unlink()
    with pytest.raises(InvalidInput, match=r"is not what the training wrote: put it back, or remove .*json"):
        train()


def test_nothing_is_left_of_killed_writes_and_of_what_a_training_needed(
    member: Path, train: Callable[..., MemberTraining]
) -> None:
    folder = member / "training" / train().config["key"][:12]
    (member / TRAINING).unlink()
    for name in (f".{CHECKPOINT}.k1ll3d", f".{START}.k1ll3d", f".{WEIGHTS}.k1ll3d", START):
        (folder / name).write_bytes(b"half")
    train()
    assert {path.name for path in folder.iterdir()} == {WEIGHTS}


def test_workers_report_to_the_command_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "ray.train", cast(Any, SimpleNamespace(get_context=lambda: context)))
    place = SimpleNamespace(get_device=lambda: torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "ray.train.torch", cast(Any, place))
    work = Work(cast(Any, None), None, tmp_path, torch.get_num_threads(), tmp_path, 60.0)

    def refused(*_: object) -> Any:
        raise InfrastructureFailed("another process kept it locked")

    monkeypatch.setattr(member_training, "run_plan", lambda *_: {"steps": 3})
    member_training._worker_process({"work": work, "outcome": tmp_path / "first"})
    monkeypatch.setattr(member_training, "run_plan", refused)
    with pytest.raises(InfrastructureFailed):
        member_training._worker_process({"work": work, "outcome": tmp_path / "second"})
    assert json.loads((tmp_path / "first").read_text()) == {"steps": 3}
    assert isinstance(member_training._failure(tmp_path / "second"), InfrastructureFailed)


def test_a_build_leaves_the_files_of_a_trained_member(member: Path, train: Callable[..., MemberTraining]) -> None:
    train()
    before = written(member)
    messages: list[str] = []
    family = read_family("tiny")
    MemberFilesWriter(NO_GGUF).write(member, family, family.members[0], messages.append)
    assert messages == ["1M: it was trained; its files stay as they are"]
    assert written(member) == before


def test_train_keeps_what_build_was_told(tmp_path: Path, member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[PretrainingRequest] = []

    def note(family: str, size: str, request: PretrainingRequest, log: object) -> MemberTraining:
        requests.append(request)
        raise InvalidInput("enough")

    monkeypatch.setattr(member_training, "train_member", note)
    record = MemberFiles(layout=str(LAYOUT), weights="random:0", loads={}, files=(), context=4096, pte_context=128)
    command = ("family", "train", "tiny", "--size", "1M", "--corpus", str(tmp_path / "corpus"))
    for more in ((), ("--pte",)):
        assert "enough" in nas(*command, *more).err
    write_record(member / FILES, record)
    for more in ((), ("--no-pte", "--context", "64"), ("--pte-context", "256")):
        assert "enough" in nas(*command, *more).err
    assert [(request.files.context, request.files.pte_context) for request in requests] == [
        (32768, None), (32768, 2048), (4096, 128), (64, None), (4096, 256),
    ]  # fmt: skip
