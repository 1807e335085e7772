"""A dialogue with a GGUF file keeps what a question begins with alike, and answers as a fresh process does."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.binding import dialogue
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build

QUESTION = list(range(40, 80))


@pytest.mark.parametrize("body", ["A4/2*2", "C3 A4/2", "C3 W4/2@8 W4/2@8"])
def test_answers_do_not_depend_on_the_questions_before(body: str, llama_build: Build, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    LLAMA_CPP.export(Layout.parse(f"d64 v320 ffn=swiglu:96 [{body}]"), "f32", RandomWeights(), file)

    def fresh(ids: list[int]) -> list[int]:
        with dialogue(file, 256) as talker:
            return list(talker.answer(ids, 6, ()))

    with dialogue(file, 256) as talker:
        first = list(talker.answer(QUESTION, 6, ()))
        turns = [
            [*QUESTION, *first, 7, 8, 9],  # continues
            [*QUESTION, *first[:3], 11, 12],  # another answer
            QUESTION,
            QUESTION[:20],
            [1, *QUESTION],  # nothing alike
        ]
        for before, ids in itertools.pairwise([QUESTION, *turns]):
            assert list(talker.answer(ids, 6, ())) == fresh(ids), (before, ids)
        continuations = [[5, 6], [7, 8, 9]]
        together = [score.log_probability for score in talker.scores(QUESTION, continuations)]
        apart = [talker.scores(QUESTION, [continuation])[0].log_probability for continuation in continuations]
        assert together == pytest.approx(apart, rel=1e-5)
