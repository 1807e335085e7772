"""Fine-tuning on conversations: which lines are refused, what is trained on, and that nothing leaks or is lost."""

from __future__ import annotations

import json
import sys
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jinja2 import Environment
from pretrain_lab import LAYOUT, SETTINGS, KilledError, killed_after, tiny_family, write_family
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from nas.core.errors import InvalidInput
from nas.core.family import FILES, TRAINING, MemberFiles, MemberTraining, read_record
from nas.core.layout import Layout
from nas.core.task import IGNORE
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import Worker
from nas.model.nn.model import Model
from nas.model.nn.weights import save_weights
from nas.search.spaces.problems import read_model
from nas.serve.views.family import member_folder
from nas.train.posttrain import curriculum, languages, sft
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, Preference, read_lines
from nas.train.posttrain.curriculum import CurriculumSettings, solved_shares, solvers
from nas.train.posttrain.filters import (
    Filters,
    in_languages,
    jaccard,
    minhash,
    question_text,
    without_duplicates,
    without_near_duplicates,
    without_overlap,
    words_of,
)
from nas.train.posttrain.generation import generate
from nas.train.posttrain.objective import answer_nats, dropped_embeddings
from nas.train.posttrain.sft import (
    HELD_OUT,
    DataSource,
    Mixture,
    Sft,
    SftSettings,
    TokenisedConversations,
    held_out_by_question,
    padded,
    passes_of,
)
from nas.train.pretrain import member_training
from nas.train.pretrain.member_training import MemberToTrain, run_plan
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.options import FileOptions
from nas.train.release.tokenizer import byte_tokenizer, chat_template

EVERY_KIND = Layout.parse(
    "d32 v320 ffn=swiglu:64 [C3 A4/2(canon=3) A4/2(kv=1) W4/2@8 W4/2@8(sink=1) M16 D2/1:16 G2:16 X2:16 L2/16"
    " C3+relu2:64 C3+moe:4x2:32 C3&A4/2 -+moe:4x2:32(shared=1) A4/2+none ^11 ^14]"
)


def conversation(*contents: str, roles: tuple[str, ...] = ("user", "assistant"), **fields: Any) -> Conversation:
    cycle = [roles[i % len(roles)] for i in range(len(contents))]
    messages = [{"role": role, "content": content} for role, content in zip(cycle, contents, strict=True)]
    return Conversation.model_validate({"messages": messages, **fields})


@pytest.fixture
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(320), "bytes")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": [', "Invalid JSON: EOF while parsing a list at column 14"),
        ("[1]", "no JSON object"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "Invalid JSON: "),
        ('{"messages": []}', "messages: Tuple should have at least 1 item"),
        ('{"messages": [{"role": "narrator", "content": "a"}]}', "messages.0.role: Input should be"),
        ('{"messages": [{"role": "user", "content": {"text": "a"}}]}', "messages.0.content: Input should be a valid"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "message 1 has role assistant, expected system or"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "the last message has role user, expected assistant"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}', "message 2 (assi"),
        ('{"messages": [{"role": "user", "content": "<|im_end|>"}]}', "contains the special token <|im_end|>"),
        ('{"messages": [{"role": "user", "content": "<|tool_call_start|>"}]}', "special token <|tool_call_start|>"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path, good = tmp_path / "chat.jsonl", conversation("a", "b").model_dump_json()
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(InvalidInput) as raised:
        read_lines(path, Conversation)
    assert str(raised.value).startswith(f"{path}:3: ") and problem in str(raised.value)


def test_a_line_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    path, good = tmp_path / "chat.jsonl", conversation("a", "b").model_dump_json().encode()
    path.write_bytes(good + b"\n" + good.replace(b'"b"', b'"\xff"') + b"\n")
    with pytest.raises(InvalidInput, match=r"chat\.jsonl:2: Invalid JSON"):
        read_lines(path, Conversation)


def test_preferences_need_two_answers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    question = [{"role": "user", "content": "a"}]
    lines = [{"messages": question, "chosen": "b", "rejected": "b"}, {"messages": question, "chosen": "b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidInput, match=r":1: chosen and rejected are the same\n.*:2: rejected: Field required"):
        read_lines(path, Preference)


def test_template_is_rendered_as_by_plain_jinja(chat: ChatTokenizer) -> None:
    tools = ({"name": "weather", "city": "Zürich <b>"},)
    one = conversation("be brief", "hi", "hello", roles=("system", "user", "assistant"))
    plain = Environment().from_string(chat_template())  # differs in the escapes of JSON alone
    expected = plain.render(messages=one.model_dump()["messages"], tools=[json.dumps(tools[0], ensure_ascii=False)],
                            bos_token="<|startoftext|>")  # fmt: skip
    assert chat.render(one.messages, tools) == expected


def test_answers_alone_are_trained_on(chat: ChatTokenizer) -> None:
    one = conversation("one", "two", "three", "four")
    ids, answers = chat.conversation(one)
    assert chat.decode(ids[answers].tolist()) == "two<|im_end|>four<|im_end|>"
    assert chat.decode(ids.tolist()) == chat.render(one.messages).removesuffix("\n")
    question = chat.question(one.question)
    assert ids[: len(question)].tolist() == question and answers[len(question) :].all()
    assert chat.answer_of([*ids[len(question) :].tolist(), 65]) == "four"


def test_packed_conversations_have_the_losses_and_gradients_of_single_ones_for_every_kind(chat: ChatTokenizer) -> None:
    model = Model(EVERY_KIND)
    sequences = [chat.conversation(conversation(*texts)) for texts in (("a", "b c"), ("d" * 20, "e" * 80), ("f", "g"))]
    inputs = [ids[:-1].astype(np.int64) for ids, _ in sequences]
    labels = [np.where(answers[1:], ids[1:], IGNORE).astype(np.int64) for ids, answers in sequences]
    nats, rows = answer_nats(model, padded(inputs, chat.pad), padded(labels, IGNORE))
    mask = padded([np.ones_like(ids) for ids in inputs], 0) > 0
    logits = model.logits(model.packed_features(padded(inputs, chat.pad), mask))
    together = torch.autograd.grad(nats.sum(), list(model.parameters()), allow_unused=True)
    alone_ = [torch.from_numpy(ids)[None] for ids in inputs]
    expected = [
        F.cross_entropy(model(one)[0], torch.from_numpy(target), ignore_index=IGNORE, reduction="sum")
        for one, target in zip(alone_, labels, strict=True)
    ]
    torch.testing.assert_close(logits, torch.cat([model(one)[0] for one in alone_]), rtol=1e-5, atol=1e-5)
    for row, one in enumerate(expected):
        torch.testing.assert_close(nats[rows == row].sum(), one, rtol=1e-5, atol=1e-5)
    separate = torch.autograd.grad(torch.stack(expected).sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(together, separate, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_dropout_of_a_row_depends_on_its_seed_alone() -> None:
    model, labels, seeds = Model(LAYOUT), torch.full((2, 6), IGNORE), torch.tensor([3, 4])
    labels[0, 5] = labels[1, 2] = 7
    ids = torch.arange(9)[None]  # as packed: all of the first row, three of the second
    plain = model.embed(ids)
    with dropped_embeddings(model, 0.5, labels, seeds):
        both = model.embed(ids)
    with dropped_embeddings(model, 0.5, labels[1:, :4], seeds[1:]):
        assert torch.equal(model.embed(ids[:, 6:]), both[:, 6:])
    assert torch.equal(model.embed(ids), plain)
    mask = both != 0
    assert 0.3 < mask.float().mean() < 0.7
    torch.testing.assert_close(both[mask], 2 * plain[mask])


def test_a_step_of_several_workers_or_smaller_passes_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path))
    rng, rows = np.random.default_rng(0), []
    for _ in range(40):
        length = int(rng.integers(8, 40))
        rows.append((rng.integers(0, LAYOUT.vocab, length).astype(np.int32), rng.random(length) < 0.5))
    path = sft.tokens_path("key")
    path.parent.mkdir()
    TokenisedConversations.write(path, rows, [0] * 40, [False] * 40, {})
    settings = SftSettings(data=(DataSource(path="x"),), batch=16, dropout=0.1, held_out=0.0)
    plan = Sft(
        layout=LAYOUT.to_json(), seed=0, tokenizer=tmp_path, tokenizer_sha256="", tokens="key",
        weights=Checkpoint(tmp_path, ""), pad=0, settings=settings, date="2026-01-01", evaluations=[],
    )  # fmt: skip

    def gradient(workers: int) -> torch.Tensor:
        model = Model(LAYOUT, seed=1)
        for rank in range(workers):
            (phase,) = plan.phases(Worker(torch.device("cpu"), print, rank=rank, world=workers))
            for tensors in phase.batches(1):
                phase.loss(model, *tensors).backward()
        return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    expected = gradient(1)
    torch.testing.assert_close(gradient(2), expected, rtol=1e-3, atol=1e-6)
    monkeypatch.setattr(sft, "TOKENS_AT_ONCE", (64, 64))
    torch.testing.assert_close(gradient(1), expected, rtol=1e-3, atol=1e-6)


def test_all_conversations_of_a_question_are_held_out_or_none() -> None:
    lines = [conversation(f"question {number % 50}", f"answer {number}") for number in range(500)]
    held_out = held_out_by_question(lines, 0.3)
    by_question = {number: {held_out[other] for other in range(number, 500, 50)} for number in range(50)}
    assert all(len(sides) == 1 for sides in by_question.values())
    assert 0.1 < sum(held_out) / 500 < 0.5
    assert not any(held_out_by_question(lines, 0.0))
    with pytest.raises(InvalidInput, match="all 500 conversations are of questions that are held out"):
        held_out_by_question(lines, 1.0)


def test_exact_duplicates_and_overlap_with_evaluations() -> None:
    texts = [("What is it", "A"), ("what  is IT", "a"), ("another question", "A"), ("x one two three four y", "B")]
    conversations = [conversation(*contents) for contents in texts]
    assert without_duplicates(conversations) == [0, 2, 3]
    questions = [question_text(example) for example in conversations]
    assert without_overlap(questions, ["one two three four five", "Another question"], 4) == [0, 1]
    tools = [conversation("a", "b", tools=[{"name": name}]) for name in ("x", "y", "x")]
    assert without_duplicates([conversation("a", "b"), *tools, conversation("\uff21", "b")]) == [0, 1, 2]
    assert without_near_duplicates([conversation("a", "b"), *tools], 0.5) == [0, 1, 2]


def test_a_system_prompt_that_an_evaluation_shares_is_no_overlap(tmp_path: Path, chat: ChatTokenizer) -> None:
    prompt = " ".join(f"word{number}" for number in range(20))

    def lines(name: str, *questions: str) -> Path:
        roles = ("system", "user", "assistant")
        text = "".join(
            conversation(prompt, question, "b", roles=roles).model_dump_json() + "\n" for question in questions
        )
        (tmp_path / name).write_text(text)
        return tmp_path / name

    evaluations = sft.evaluation_questions([str(lines("asked.jsonl", "How many days has a week?"))], None)
    data = lines("chat.jsonl", "And how many has a year?", "Now, how many days has a week?", "A third one")
    selected = sft.select([data], evaluations, Filters(), chat)
    assert [one.messages[1].text for one in selected.conversations] == ["And how many has a year?", "A third one"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's a well-known day.", "it s a well known day"),
        ("2 - 3*x = -5%", "2 - 3 * x = - 5 %"),
        ("2 \N{MINUS SIGN} 3", "2 - 3"),
        ("\uff26ull\u3000\uff37idth", "full width"),
        ("法国的首都,是?", "法 国 的 首 都 是"),
        ("カタ ひら", "カ タ ひ ら"),
        ("ไทย", "ไ ท ย"),
        ("한국어 말", "한국어 말"),
        ("हिन्दी में", "हिन्दी में"),
    ],
)
def test_words_of_texts(text: str, words: str) -> None:
    assert words_of(text) == unicodedata.normalize("NFKC", words).split()


@pytest.mark.parametrize(
    ("question", "evaluation", "overlaps"),
    [
        ("How many legs has a spider on a day.", "how many legs has a spider on a day", True),
        ("Be kind. Now: what is the capital of France? Say it in a word.", "What is the capital of France", True),
        ("Hello there, what is it", "Hello there", False),
        ("Hello, there!", "hello there", True),
        ("请问法国的首都是哪里?谢谢你", "法国的首都是哪里", True),
        ("请问德国的首都是哪里?谢谢你", "法国的首都是哪里", False),
        ("What is 23 + 45?", "What is 23 - 45?", False),
        ("a b c d e f g h i j k l m n", "z b c d e f g h i j k l m n", True),
        ("a b c d e f g h i j k l X", "a b c d e f g h i j k l m", False),
        ("what is the capital", "what is the capital of France", False),
    ],
)
def test_overlaps_with_questions_of_evaluations(question: str, evaluation: str, overlaps: bool) -> None:
    assert (without_overlap([question], [evaluation], 13) == []) == overlaps


def test_near_duplicates_are_those_above_the_threshold() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(2000)]
    base = [list(rng.choice(words, 60)) for _ in range(40)]
    texts = [" ".join(row) for row in base]
    texts += [" ".join([*row[:-1], "other"]) for row in base[:20]]  # 57 of 59 shingles in common
    texts += [" ".join(row[:40] + base[i + 1][:20]) for i, row in enumerate(base[:20])]
    conversations = [conversation(text, "yes") for text in texts]
    survivors = without_near_duplicates(conversations, 0.8)
    assert survivors == [*range(40), *range(60, 80)]


SPOKEN = {
    "en": ("What is the capital of France?", "The capital of France is Paris."),
    "de": ("Was ist die Hauptstadt von Frankreich?", "Die Hauptstadt von Frankreich ist Paris."),
    "fr": ("Quelle est la capitale de la France ?", "La capitale de la France est Paris."),
    "zh": ("法国的首都是哪里?", "法国的首都是巴黎。"),
}
UNDETERMINED = [
    ("2 + 3 = ?", "5"),
    ("Hi", "ok"),
    ("hm", "Guten Tag"),
    ("while (i < 10) { a[i] = b[i]; }", "x[0] = y[1]"),
]


def test_conversations_in_other_languages_are_dropped_and_undetermined_ones_kept() -> None:
    texts = [*SPOKEN.values(), *UNDETERMINED]
    conversations = [conversation(*contents) for contents in texts]
    undetermined = list(range(len(SPOKEN), len(texts)))
    for number, code in enumerate(SPOKEN):
        assert in_languages(conversations, [code]) == [number, *undetermined]
    assert in_languages(conversations, ["fr", "de"]) == [1, 2, *undetermined]
    dialogue = conversation("Réponds en allemand s'il te plaît.", *SPOKEN["de"], SPOKEN["fr"][1],
                            roles=("system", "user", "assistant", "user"))  # fmt: skip
    brief = dialogue.model_copy(update={"messages": dialogue.messages[:3]})
    assert in_languages([brief], ["de"]) == [0], "instructions of the system do not count"


def test_minhash_estimates_jaccard_similarity() -> None:
    values = [zlib.crc32(str(i).encode()) for i in range(800)]
    a, b = frozenset(values[:600]), frozenset(values[200:])
    estimate = float((minhash(a) == minhash(b)).mean())
    assert abs(estimate - jaccard(a, b)) < 0.13  # three standard deviations of 128 draws


def test_mixture_draws_each_source_by_its_share_and_in_turn() -> None:
    sources = np.asarray([0] * 90 + [1] * 10 + [-1] * 5)
    whole = Mixture(sources, None, seed=1)
    assert sorted(whole[i] for i in range(100)) == list(range(100))
    half = Mixture(sources, [1.0, 1.0], seed=1)
    drawn = [half[i] for i in range(2 * half.epoch)]
    assert half.epoch == 100 and sum(index >= 90 for index in drawn) == 100
    counts = np.bincount(drawn, minlength=100)
    assert (counts[90:] == 10).all() and set(counts[:90]) == {1, 2}
    assert [Mixture(sources, [1.0, 1.0], seed=1)[i] for i in (150, 3)] == [drawn[150], drawn[3]]


def test_a_curriculum_sorts_what_each_epoch_draws() -> None:
    rng = np.random.default_rng(0)
    solved = rng.choice([0.0, 0.25, 1 / 3, 1.0], 105).astype(np.float32)
    sources = np.asarray([0] * 90 + [1] * 10 + [-1] * 5)
    for shares in (None, [1.0, 1.0]):
        plain, sorted_ = Mixture(sources, shares, 1), Mixture(sources, shares, 1, solved)
        assert sorted_.epoch == plain.epoch == 100
        epochs = [[[mix[i] for i in range(first, first + 100)] for first in (0, 100)] for mix in (plain, sorted_)]
        for drawn, order in zip(*epochs, strict=True):
            assert order == sorted(drawn, key=lambda index: -solved[index]), "ties in the order without a curriculum"
        assert epochs[1][0] != epochs[1][1]
        assert [Mixture(sources, shares, 1, solved)[i] for i in (150, 3)] == [epochs[1][1][50], epochs[1][0][3]]


def asked_of(models: Sequence[Model], chat: ChatTokenizer) -> list[Conversation]:
    """Conversations whose answers are those of the first model, of the second, or of none."""
    questions = [conversation(text, "?") for text in ("one", "two")]
    answers = [
        [chat.answer_of(generate(model, [chat.question(case.question)], 6, chat.ends)[0]).strip() for case in questions]
        for model in models
    ]
    assert len({"", *answers[0], *answers[1]}) == 5, "models and answers that differ"
    return [
        conversation("one", answers[0][0]),
        conversation("one", answers[1][0]),
        conversation("one", answers[0][0] + "!"),
        conversation("two", answers[0][1][:-1]),
        conversation("three", "none of them"),
    ]


def test_shares_are_those_of_models_asked_directly_and_kept_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(curriculum, "_QUESTIONS_AT_ONCE", 2)
    path = tmp_path / "tokenizer.json"
    byte_tokenizer(320).tokenizer.save(str(path))
    chat = ChatTokenizer.read(path)
    layouts = [LAYOUT, Layout.parse("d32 v320 ffn=swiglu:64 [A2/1 C3]")]
    models = [Model(layout, seed).eval() for seed, layout in enumerate(layouts)]
    for number, model in enumerate(models):
        model.norm.weight.data.normal_(generator=torch.Generator().manual_seed(number))  # else they repeat a token
        save_weights(model, tmp_path / f"{number}.safetensors")
    lines = asked_of(models, chat)
    settings = CurriculumSettings(models=tuple(str(tmp_path / f"{number}.safetensors") for number in range(2)),
                                  answer_tokens=6)  # fmt: skip
    ensemble = solvers(settings, MemberToTrain(tmp_path, LAYOUT, path, ()))
    assert [solver.layout for solver in ensemble] == layouts
    calls, budget = [0], [4]

    def counted(*args: Any, **more: Any) -> list[list[int]]:
        calls[0] += 1
        budget[0] -= 1
        if budget[0] < 0:
            raise KilledError
        return generate(*args, **more)

    monkeypatch.setattr(curriculum, "generate", counted)

    def shares(**changed: Any) -> list[float]:
        copy = settings.model_copy(update=changed)
        return [
            float(share) for share in solved_shares(copy, ensemble, lines, ChatTokenizer.read(path), lambda line: None)
        ]

    with pytest.raises(KilledError):
        shares()
    budget[0] = 100
    assert shares() == [0.5, 0.5, 0, 0, 0] and calls == [7], "3 chunks of 2 models, and the one that was interrupted"
    assert shares(judge="contains") == [0.5, 0.5, 0, 0.5, 0] and calls == [7]
    lines[1] = lines[1].model_copy(update={"solved": 0.125})
    assert shares()[1] == 0.125
    partial = shares(questions=2)
    assert partial[1] == 0.125 and all(0 <= share <= 1 for share in partial)


def test_shares_of_questions_like_known_ones_are_predicted() -> None:
    rng = np.random.default_rng(0)

    def questions(count: int) -> tuple[list[str], np.ndarray[Any, np.dtype[np.float32]]]:
        digits = rng.integers(1, 5, count)
        sums = rng.random(count) < 0.5
        texts = [
            f"what is {rng.integers(10 ** (d - 1), 10**d)} plus 1?" if is_sum else f"say {'so ' * int(d)}"
            for d, is_sum in zip(digits, sums, strict=True)
        ]
        return texts, np.where(sums, 1 - digits / 5, 0.9).astype(np.float32)

    texts, shares = questions(300)
    new, expected = questions(100)
    predictions = curriculum.predicted(texts, shares, new)
    assert spearmanr(predictions, expected).statistic > 0.95
    np.testing.assert_allclose(predictions, expected, atol=0.1)


def test_passes_hold_similar_lengths() -> None:
    lengths = [5, 100, 6, 90, 5, 300]
    passes = passes_of(lengths, 200)
    assert [[lengths[place] for place in one] for one in passes] == [[300], [100, 90], [6, 5, 5]]
    assert sorted(place for one in passes for place in one) == list(range(6))
    assert [len(places) for places in passes_of([100, 50, 50, 50, 49], 200)] == [2, 3]
    assert passes_of([], 200) == []


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_family(tmp_path, monkeypatch)
    lines = [conversation(f"say {word}", word) for word in ("one", "two", "small", "large")] * 2
    lines += [conversation(f"count {i}", "tokens") for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return tmp_path


def recipe(**sft: Any) -> PostTrainingRecipe:
    settings = SETTINGS.model_copy(update={"tokens": 4 * 256}).model_dump(mode="json")
    stages = [
        {"kind": "pretrain", "corpus": ["corpus"], "settings": settings},
        {"kind": "sft", "data": [{"path": "chat.jsonl"}], "batch": 6, "lr": 5e-3, "held_out": 0.1, **sft},
    ]
    return PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": stages})


def run(
    folder: Path, what: PostTrainingRecipe, log: Callable[[str], None] = lambda line: None, checkpoint_s: float = 60.0
) -> MemberTraining:
    files = FileOptions(gguf=())
    return run_recipe("tiny", "1M", what, folder, log, workers=1, files=files, checkpoint_s=checkpoint_s)


def run_and_kill(folder: Path, what: PostTrainingRecipe, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a recipe whose process is killed after so many passes."""
    with monkeypatch.context() as patch:
        worker = killed_after(passes)
        patch.setattr(member_training, "run_workers", lambda work, workers, log: run_plan(work, worker))
        with pytest.raises(KilledError):
            run(folder, what, checkpoint_s=0)


def test_a_recipe_that_is_killed_ends_with_the_same_weights(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(member, recipe())
    assert [record.kind for record in whole.history] == ["pretrain", "sft"]
    assert whole.curve[-1][1] < whole.curve[0][1] and set(whole.held_out) == {HELD_OUT}
    assert whole.config["conversations"] == 24
    files = read_record(member_folder("tiny", "1M") / FILES, MemberFiles)
    assert files is not None and files.weights == f"checkpoint:{whole.checkpoint}"

    monkeypatch.setenv("NAS_HOME", str(member / "other"))
    write_family()
    for passes in (2, 5, 9):  # of 4 steps of pre-training and 11 of fine-tuning
        run_and_kill(member, recipe(), passes, monkeypatch)
    lines: list[str] = []
    again = run(member, recipe(), lines.append)
    assert again.checkpoint == whole.checkpoint and again.curve == whole.curve
    assert "1M is trained with these settings already" in lines and any("from step" in line for line in lines)
    changed = run(member, recipe(epochs=1))
    assert changed.before == again.before and changed.checkpoint != again.checkpoint
    assert read_record(member_folder("tiny", "1M") / TRAINING, MemberTraining) == changed


def test_a_curriculum_resumes_and_orders_the_training(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [conversation(f"count {i}", "tokens", solved=i / 20) for i in range(20)]
    lines += [conversation("count to ten", "tokens")]
    (member / "chat.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
    messages: list[str] = []
    whole = run(member, recipe(curriculum={}), messages.append)
    assert any("curriculum: 4" in line and "20 given, 0 by 0 models, 1 predicted" in line for line in messages)
    (tokens,) = (member / "NAS_CACHE/conversations").iterdir()
    data = TokenisedConversations(tokens)
    assert data.solved is not None and data.solved[:20].tolist() == pytest.approx([i / 20 for i in range(20)])
    monkeypatch.setenv("NAS_HOME", str(member / "other"))
    write_family()
    run_and_kill(member, recipe(curriculum={}), 8, monkeypatch)
    assert run(member, recipe(curriculum={})).checkpoint == whole.checkpoint
    assert run(member, recipe()).checkpoint != whole.checkpoint
    record = run(member, recipe(curriculum={"models": ["pretrain"], "answer_tokens": 4}), messages.append)
    assert any("20 given, 1 by 1 models, 0 predicted" in line for line in messages)
    assert record.config["key"] != whole.config["key"]


def test_curricula_that_nothing_orders_are_refused(member: Path) -> None:
    other = Model(Layout.parse("d32 v256 ffn=swiglu:64 [C3]"))
    save_weights(other, member / "other.safetensors")
    for settings, problem in (
        ({}, r"curriculum: name models, or give conversations a share"),
        ({"models": ["none"]}, r"curriculum\.models: .*/none is neither weights nor an earlier stage"),
        (
            {"models": ["prefer"]},
            r"curriculum\.models: prefer is neither weights nor an earlier stage; stages: pretrain",
        ),
        ({"models": ["other.safetensors"]}, r"curriculum\.models: .*: 320 tokens, but the layout's vocabulary is v256"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            run(member, recipe(curriculum=settings))
    (member / "chat.jsonl").write_text(conversation("a", "b").model_dump_json().replace("null", "1.5"))
    with pytest.raises(InvalidInput, match=r"chat\.jsonl:1: solved: Input should be less than or equal to 1"):
        run(member, recipe())


def test_bad_files_of_later_stages_are_named_before_the_first_one_begins(member: Path) -> None:
    good, bad = conversation("a", "b").model_dump_json(), conversation("a", " ").model_dump_json()
    (member / "bad.jsonl").write_text(f"{good}\n{bad}\n{{\n")
    named = rf"^{member}/bad.jsonl:2: message 2 \(assistant\) is empty\n{member}/bad.jsonl:3: Invalid JSON"
    question = {"kind": "prefer", "questions": ["chat.jsonl"]}
    for stage, problem in (
        ({"kind": "prefer", "questions": ["bad.jsonl"], "judge": "exact"}, named),
        ({"kind": "merge", "models": ["sft"], "evaluate": ["bad.jsonl"]}, named),
        ({"kind": "prefer", "pairs": ["chat.jsonl"]}, r"chat.jsonl:1: chosen: Field required"),
        ({"kind": "prefer", "pairs": ["none.jsonl"]}, r"none.jsonl: cannot read it: No such file"),
        ({**question, "judge_command": ["./no-judge"]}, "judge_command: no such program: ./no-judge"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            run(member, PostTrainingRecipe.model_validate({"stages": [*recipe().model_dump()["stages"], stage]}))
    for changed in ({"data": [{"path": "bad.jsonl"}]}, {"evaluate": ["chat.jsonl", "bad.jsonl"]}):
        with pytest.raises(InvalidInput, match=named):
            run(member, recipe(**changed))
    assert not (member_folder("tiny", "1M") / "training").exists()


def test_languages_are_part_of_the_key_where_they_are_used(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = (member / "chat.jsonl", member / "more.jsonl")
    files[1].write_text("".join(conversation(*contents).model_dump_json() + "\n" for contents in SPOKEN.values()))
    data = [{"path": "chat.jsonl"}, {"path": "more.jsonl"}]
    lines: list[str] = []
    record = run(member, recipe(data=data, epochs=1, filters={"languages": ["en", "fr"]}), lines.append)
    assert record.config["conversations"] == 26 and "26 conversations; dropped: duplicates 4, languages 2" in lines

    def tokenised() -> int:
        return len(list((member / "NAS_CACHE/conversations").iterdir()))

    assert tokenised() == 1
    monkeypatch.setattr("py3langid.__version__", "0.4.1")
    assert run(member, recipe(data=data, epochs=1, filters={"languages": ["en", "fr"]})).checkpoint == record.checkpoint
    assert tokenised() == 2
    assert run(member, recipe(data=data, epochs=1)).config["conversations"] == 28
    assert "languages" not in Filters().model_dump(), "keys without languages are those of earlier versions"


def test_unknown_languages_and_a_missing_detector_are_named(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"filters\.languages: unknown language 'english'.*valid: ace, af, am"):
        run(member, recipe(filters={"languages": ["en", "english"]}))
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setattr("nas.train.posttrain.languages._identifier", languages._identifier.__wrapped__)
    with pytest.raises(InvalidInput, match=r"filters\.languages: needs py3langid, of the extra 'languages'"):
        run(member, recipe(filters={"languages": ["en"]}))
    assert not (member_folder("tiny", "1M") / "training").exists()


def test_filters_that_leave_nothing_are_named(member: Path) -> None:
    with pytest.raises(InvalidInput, match="dropped every conversation: duplicates 4, length 24"):
        run(member, recipe(filters={"length": 2}))


def test_recipe_problems_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("stages:\n  - kind: sft\n    data: [{path: a}]\n    lr: 0\n  - kind: rlhf\n")
    with pytest.raises(InvalidInput) as raised:
        read_model(path, PostTrainingRecipe)
    assert f"{path}:4: stages.0.lr: " in str(raised.value) and f"{path}:5: stages.1" in str(raised.value)
