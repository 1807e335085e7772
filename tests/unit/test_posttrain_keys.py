"""Keys of trainings: each input counts, and none twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pretrain_lab import LAYOUT, SETTINGS, write_corpus

from nas.core.family import MemberTraining
from nas.measure.runtimes.base import Checkpoint
from nas.train.posttrain import prefer
from nas.train.posttrain.conversations import Preference
from nas.train.posttrain.prefer import PreferRequest, PreferSettings
from nas.train.posttrain.sft import DataSource, SftRequest, SftSettings
from nas.train.pretrain.member_training import MemberToTrain, TrainingRequest
from nas.train.pretrain.next_token import LongRequest, PretrainingRequest
from nas.train.pretrain.recipe import Settings
from nas.train.release.tokenizer import byte_tokenizer

QUESTION = '{"messages": [{"role": "user", "content": "one"}'


class Trained(MemberToTrain):
    """A member that was trained, whose weights nothing reads."""

    def weights(self, training: MemberTraining | None = None) -> Checkpoint:
        return Checkpoint(Path("weights"), self.origin.checkpoint)


def planned(member: MemberToTrain, request: TrainingRequest) -> tuple[str, str]:
    """Returns the keys of the tokenised data and of the training."""
    plan: Any = request.plan(member, lambda line: None)
    return plan.tokens, plan.key


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemberToTrain:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(320).tokenizer.save("tokenizer.json")
    Path("chat.jsonl").write_text(QUESTION + ', {"role": "assistant", "content": "two"}]}\n')
    Path("pairs.jsonl").write_text(QUESTION + '], "chosen": "a", "rejected": "b"}\n')
    before = MemberTraining.model_construct(kind="sft", checkpoint="0" * 64)
    return Trained(tmp_path, LAYOUT, tmp_path / "tokenizer.json", (before,))


def test_keys_of_post_trainings_count_every_input(member: MemberToTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_policy(*_: object) -> Iterator[Preference]:
        yield Preference.model_validate_json(Path("pairs.jsonl").read_text())

    monkeypatch.setattr(prefer, "load_model", lambda *_: None)
    monkeypatch.setattr(prefer, "_on_policy", on_policy)
    Path("other.jsonl").write_text(QUESTION.replace("one", "three") + ', {"role": "assistant", "content": "four"}]}\n')
    data = (DataSource(path="chat.jsonl"),)
    requests = [
        SftRequest(settings=SftSettings(data=data)),
        SftRequest(settings=SftSettings(data=data, evaluate=("other.jsonl",))),
        SftRequest(settings=SftSettings(data=data, held_out=0.25)),
        PreferRequest(settings=PreferSettings(pairs=("pairs.jsonl",))),
        PreferRequest(settings=PreferSettings(pairs=("pairs.jsonl",), evaluate=("other.jsonl",))),
        PreferRequest(settings=PreferSettings(questions=("chat.jsonl",), judge="exact")),
        PreferRequest(settings=PreferSettings(questions=("chat.jsonl",), judge="contains")),
        PreferRequest(settings=PreferSettings(questions=("chat.jsonl",), judge_command=("python", "-c", "#" * 300))),
    ]
    keys = [planned(member, request) for request in requests]
    assert keys == [planned(member, request) for request in requests]
    assert len({tokens for tokens, _ in keys}) == len({key for _, key in keys}) == len(requests)


def test_keys_of_pretrainings_have_the_start_checkpoint_where_there_is_one(member: MemberToTrain) -> None:
    corpus = (write_corpus(member.folder / "corpus"),)
    requests = [PretrainingRequest(corpus, SETTINGS), PretrainingRequest(corpus, Settings(tokens=3000))]
    first = replace(member, before=())
    keys = [request.plan(first, print).key for request in requests]
    keys += [request.plan(member, print).key for request in (*requests, LongRequest(corpus, SETTINGS))]
    other = replace(member, before=(MemberTraining.model_construct(kind="sft", checkpoint="1" * 64),))
    keys += [request.plan(other, print).key for request in requests]
    assert len(set(keys)) == 6, "kinds of one recipe and start share a key"
