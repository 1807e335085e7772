"""Keys of post-trainings without settings that were added later: what was trained before is found again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pretrain_lab import LAYOUT, SETTINGS, write_corpus

from nas.core.family import MemberTraining
from nas.train.posttrain import prefer
from nas.train.posttrain.conversations import Preference
from nas.train.posttrain.prefer import PreferRequest, PreferSettings
from nas.train.posttrain.sft import DataSource, SftRequest, SftSettings
from nas.train.pretrain.member_training import MemberToTrain, TrainingRequest
from nas.train.pretrain.next_token import LongRequest, PretrainingRequest
from nas.train.pretrain.recipe import Settings
from nas.train.release.tokenizer import byte_tokenizer

QUESTION = '{"messages": [{"role": "user", "content": "one"}'
PRETRAINED = {
    "pretrain": "be8f6e625aeedbc586d9d6ff5484b626b0435690606b06211d16e5131ca4e869",
    "without settings": "9c36551d6e4b6128815a1169a86339e1a0bb4974923d58ceafdf30d345b82134",
}
KEYS = {
    "sft": (
        "d58828ba72c4b168f5e49eaa38976d8d32c5ed1d0ecc7438cdacd246bcb91893",
        "db9742c53a9046eefd9b7fd9303e15f0e3745eda38650c3bf8d488ee97e9702d",
    ),
    "pairs": (
        "09f054016a7d7012d18b9d2dc6b23a1298c7a5d12e02c71b796cb56f7c52ab04",
        "046e8dc4bb1b65702a2f53ba91dbd50eee9ee13d834fe6d86bb03b0a7fc1e08a",
    ),
    "on policy": (
        "bb68c66c4ea625a1cc6685b2c303b46da9c366b22fdd5750dd5e9f7b32e9b2e4",
        "5c20dd279ff66185c7c55a0a0fdb272617a6f405818a60670aea0782340b5b52",
    ),
}


class Trained(MemberToTrain):
    """A member that was trained, whose weights nothing reads."""

    def weights(self, training: MemberTraining | None = None) -> Path:
        return Path("weights")


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


def test_keys_are_those_of_earlier_versions(member: MemberToTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_policy(*_: object) -> Iterator[Preference]:
        yield Preference.model_validate_json(Path("pairs.jsonl").read_text())

    monkeypatch.setattr(prefer, "loaded", lambda *_: None)
    monkeypatch.setattr(prefer, "_on_policy", on_policy)
    found = {
        "sft": SftRequest(settings=SftSettings(data=(DataSource(path="chat.jsonl"),))),
        "pairs": PreferRequest(settings=PreferSettings(pairs=("pairs.jsonl",))),
        "on policy": PreferRequest(settings=PreferSettings(questions=("chat.jsonl",), judge="exact")),
    }
    assert {name: planned(member, request) for name, request in found.items()} == KEYS


def test_keys_of_pretrainings_have_the_start_checkpoint_where_there_is_one(member: MemberToTrain) -> None:
    corpus = (write_corpus(member.folder / "corpus"),)
    asked = {
        "pretrain": PretrainingRequest(corpus, SETTINGS),
        "without settings": PretrainingRequest(corpus, Settings(tokens=3000)),
    }
    first = replace(member, before=())
    assert {name: request.plan(first, print).key for name, request in asked.items()} == PRETRAINED
    later = [request.plan(member, print).key for request in (*asked.values(), LongRequest(corpus, SETTINGS))]
    other = replace(member, before=(MemberTraining.model_construct(kind="sft", checkpoint="1" * 64),))
    later += [request.plan(other, print).key for request in asked.values()]
    assert len({*later, *PRETRAINED.values()}) == 6, "kinds of one recipe and start share a key"
