"""Public benchmarks: extraction of answers, questions and examples as configured, and scores of known answers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nltk
import numpy as np
import pytest
import torch
import yaml
from pretrain_lab import LAYOUT

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import AVERAGE, MemberEvaluation, TaskScore, read_record
from nas.measure.runtimes.dialogue import Score
from nas.model.nn.model import Model
from nas.train.posttrain.conversations import ChatTokenizer
from nas.train.posttrain.generation import Answerer, answerer
from nas.train.posttrain.harness import NAMES, Benchmarks
from nas.train.posttrain.lm_eval_tasks.answers import extracted, letter, math_result, number, number_result, same
from nas.train.release.tokenizer import byte_tokenizer

CHAT = ChatTokenizer(byte_tokenizer(320), "bytes")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"So 3 apples, \boxed{12} in all.", "12"),
        ("4 + 4 = 8\n#### 8", "8"),
        ("### 1,250 dollars", "1,250"),
        ("ANSWER: 7 of 9", "7"),
        ("The answer is $18.50.", "18.50"),
        ("Final answer: -3", "-3"),
        ("There are 5, then 6.", "6"),
        (r"\boxed{1} no, the answer is \boxed{2}", "2"),
        ("#### 3\nThe answer is 4.", "3"),
        ("no number", ""),
        ("The answer is 42. I hope it helps.", "42"),
        ("The answer is **42**, which is 6 times 7. Ask me 2 more.", "42"),
        ("**Final Answer:** 1,250.50 dollars", "1,250.50"),
        ("Answer:\n17", "17"),
        (r"So it is \boxed 9 .", "9"),
        ("The answer is 5 or 6. Or 7.", "5"),
        (r"\boxed{$9{,}500}", "9,500"),
        (r"The answer is $10\,000$ or so.", "10,000"),
        ("La réponse est 1\u202f250\u00a0000.", "1,250,000"),
        ("The answer is \N{MINUS SIGN}5.", "-5"),
    ],
)
def test_numbers_are_extracted_in_the_order_of_the_patterns(text: str, expected: str) -> None:
    assert number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Some reasoning.\nB. because", "B"),
        ("A: Let's think step by step. The answer is (C).", "C"),
        ("I would say (D) is right", "D"),
        ("we take option e", ""),
        ("we take option E here", "E"),
        ("Final answer: F", "F"),
        ("It must be G: the last", "G"),
        ("The answer is (Z).", ""),
        ("The answer is **B**", "B"),
        ("The **correct answer** is: (B)", "B"),
        ("Answer: B", "B"),
        ("ANSWER: `B`", "B"),
        ("the answer is option B because of A", "B"),
        ("The correct option is B", "B"),
        ("A", "A"),
        ("(C)", "C"),
        ("I think so.\n\nB", "B"),
        ("I think so.\n- B. the second", "B"),
        (r"\boxed{B}", "B"),
        (r"so $\boxed{\text{(B)}}$, not the answer is C", "B"),
        (r"\boxed{B. the second}", "B"),
        (r"\boxed{12} is option D", "D"),
        (r"\boxed{AB} is option D", "D"),
        ("A dog and a cat", ""),
        ("A: Let's think", ""),
        ("", ""),
    ],
)
def test_letters_are_extracted(text: str, expected: str) -> None:
    assert letter(text) == expected


def test_answers_that_repeat_themselves_are_read_at_once() -> None:
    start = time.process_time()
    assert letter("The answer is" + "\n" * 1000 + "x") == ""
    assert number("The answer is " + "1" * 10_000 + "x") == "1" * 10_000
    assert not same("1" * 10_000 + "x", "1")
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("1,250", "1250", True),
        ("18.0", "18", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\frac{2}{4}", "0.5", True),
        (r"-\frac{1}{2}", "1/2", False),
        (r"\text{red}", "red", True),
        (r"$x^2 + 1$.", "x^2+1", True),
        ("1/0", "0", False),
        ("$x=5$", "5", True),
        ("x=5", "x=5", True),
        ("f(x) = 2x", "2x", True),
        ("5", "x=5", False),
        (r"\frac12", r"\frac{1}{2}", True),
        (r"\frac1{2}", "0.5", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        (r"5\text{ cm}", "5", True),
        (r"10,\!000", "10000", True),
        (r"10{,}000", r"10,\!000", True),
        (r"1,\,2", "1,2", True),
        ("\N{MINUS SIGN}3", "-3", True),
        (r"\(7\)", "7", True),
        ("(1, 2)", "(1,2)", True),
        (r"90^\circ", "90", True),
        (r"x^2", "2", False),
        ("3 and 4", "3", False),
        ("", "", False),
    ],
)
def test_answers_are_compared_as_numbers_or_text(answer: str, expected: str, equal: bool) -> None:
    assert same(answer, expected) is equal


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("The answer is 42. I hope it helps.", "42", True),
        ("The answer is 42 apples. Not 3.", "42", True),
        ("So the answer is $x=5$.", "5", True),
        (r"The answer is \(\frac12\).", r"\frac{1}{2}", True),
        (r"Thus $\boxed{x = \frac{3}{4}}$", r"\frac{3}{4}", True),
        ("The answer is x^2 + 1.", "2", False),
        ("The answer is 3 or 4.", "3", False),
        ("I do not know", "7", False),
    ],
)
def test_mathematics_is_right_as_a_number_or_text(text: str, expected: str, right: bool) -> None:
    assert math_result({"answer": expected}, [text]) == {"strict": right}


def test_loose_scores_accept_the_number_anywhere() -> None:
    doc = {"answer": "1 + 2 = 3\n#### 3"}
    assert number_result(doc, ["It is 3, more than the 2 of before"]) == {"strict": False, "loose": True}
    assert number_result(doc, ["It is 30"]) == {"strict": False, "loose": False}
    assert extracted(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"


def rows(path: Path, *docs: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))


def sums(count: int) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {i} plus {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(count)
    ]


@pytest.fixture
def data(tmp_path: Path, home: Path) -> Path:
    folder = tmp_path / "data"
    (gsm8k := folder / "openai" / "gsm8k").mkdir(parents=True)
    rows(gsm8k / "files" / "a.jsonl", *sums(8))
    rows(gsm8k / "files" / "b.jsonl", *sums(3))
    files = [{"split": "train", "path": "files/a.jsonl"}, {"split": "test", "path": "files/b.jsonl"}]
    (gsm8k / "README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files: {json.dumps(files)}\n---\nData.\n"
    )
    for number_, subject in enumerate(_MMLU_SUBJECTS):
        docs = [
            {"question": f"{subject} {i}", "choices": ["one", "two", "three", "four"], "answer": (i + number_) % 4}
            for i in range(5)
        ]
        rows(folder / "cais" / "mmlu" / subject / "dev.jsonl", *docs)
        rows(folder / "cais" / "mmlu" / subject / "test.jsonl", *docs[:2])
    rows(
        folder / "Idavidrein" / "gpqa" / "train.jsonl",
        {"Question": "which", "Correct Answer": "yes", **{f"Incorrect Answer {i}": f"no{i}" for i in (1, 2, 3)}},
    )
    plus = [{"question": f"What is {i} plus {i}, exactly?", "answer": str(2 * i)} for i in range(3)]
    rows(folder / "qintongli" / "GSM-Plus" / "data" / "test-0.jsonl", *plus)
    math_ = [
        {"problem": f"Sum of {i} and 1.", "solution": rf"It is $\boxed{{{i + 1}}}$.", "level": f"Level {i}"}
        for i in range(3, 6)
    ]
    rows(folder / "HuggingFaceH4" / "MATH-500" / "test.jsonl", *({**doc, "answer": "4"} for doc in math_[:1]))
    for subject in _MATH_SUBJECTS:
        rows(folder / "EleutherAI" / "hendrycks_math" / subject / "test-0.jsonl", *math_)
    for language in ("AR_XY", "DE_DE", "ES_LA", "FR_FR", "JA_JP", "KO_KR", "ZH_CN"):
        doc = {"Question": f"Frage {language}", "A": "eins", "B": "zwei", "C": "drei", "D": "vier", "Answer": "B"}
        rows(folder / "openai" / "MMMLU" / language / "test.jsonl", doc)
    for language in ("es", "fr", "de", "zh", "ja", "ru"):
        shots = [{"question": f"{language} {i}", "answer": f"so {i}", "answer_number": i} for i in range(5)]
        rows(folder / "juletxara" / "mgsm" / language / "train.jsonl", *shots)
        rows(folder / "juletxara" / "mgsm" / language / "test.jsonl", {**shots[2], "answer": ""})
    pro = [
        {
            "question": f"{category} {i}", "options": ["x", "y", "N/A"], "answer": "B", "category": category,
            "cot_content": "A: Let's think step by step. The answer is (B).",
        }
        for category in _CATEGORIES
        for i in range(5)
    ]  # fmt: skip
    rows(folder / "TIGER-Lab" / "MMLU-Pro" / "data" / "validation-0.jsonl", *pro)
    rows(folder / "TIGER-Lab" / "MMLU-Pro" / "data" / "test-0.jsonl", *({**doc, "cot_content": ""} for doc in pro[::5]))
    return folder


_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
_CATEGORIES = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law",
    "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip
_MMLU = Path(__file__).parents[2] / "nas" / "train" / "posttrain" / "lm_eval_tasks" / "mmlu.yaml"
_MMLU_SUBJECTS = yaml.safe_load(_MMLU.read_text().replace("!function ", ""))["metadata"]["datasets"]


def knowing(prompts: list[str], say: Callable[[str], str], right: Callable[[str], str] = lambda text: "A") -> Answerer:
    """A model that answers each question by `say`, and finds the continuation `right` the likeliest."""

    def respond(questions: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        prompts.extend(CHAT.decode(ids) for ids in questions)
        return [CHAT.encode(say(CHAT.decode(ids)) + "<|im_end|>") for ids in questions]

    def scores(question: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Score]:
        prompts.append(CHAT.decode(question))
        expected = right(prompts[-1])
        return [Score(False, 0.0 if CHAT.decode(ids).strip() == expected else -1.0) for ids in continuations]

    return Answerer(respond, scores)


def judged(data: Path, name: str, model: Answerer, context: int = 1 << 16) -> dict[str, list[bool]]:
    verdicts = Benchmarks(data, [name], context, None, lambda line: None).judge(model, CHAT)
    return {row: list(right) for row, right in verdicts.items()}


def test_gsm8k_asks_five_examples_as_turns_and_scores_strict_and_loose(data: Path) -> None:
    prompts: list[str] = []
    answers = {0: "I know it: #### 0", 1: "2, or maybe 9", 2: "5"}
    verdicts = judged(data, "gsm8k", knowing(prompts, lambda text: answers[int(text.rsplit("What is ", 1)[1][0])]))
    assert verdicts == {"gsm8k": [True, False, False], "gsm8k (loose)": [True, True, False]}
    assert len(prompts) == 3 and all(text.count("<|im_start|>user") == 6 for text in prompts)
    assert all(text.endswith("<|im_start|>assistant\n") and "####" in text for text in prompts)
    again: list[str] = []
    judged(data, "gsm8k", knowing(again, lambda text: ""))
    assert again == prompts, "a file is asked with the same examples"


def test_mmlu_takes_the_likeliest_letter_after_the_subject_s_own_examples(data: Path) -> None:
    prompts: list[str] = []
    verdicts = judged(data, "mmlu", knowing(prompts, str, lambda text: "A"))
    expected = [(i + number_) % 4 == 0 for number_ in range(len(_MMLU_SUBJECTS)) for i in range(2)]
    assert len(_MMLU_SUBJECTS) == 57 and verdicts == {"mmlu": expected}
    assert prompts[0].count("abstract_algebra") == 6 and "A. one\nB. two\nC. three\nD. four" in prompts[0]


def test_choices_of_gpqa_are_asked_in_ten_orders(data: Path) -> None:
    prompts: list[str] = []

    def right(text: str) -> str:
        return text[text.index(") yes") - 1]

    assert judged(data, "gpqa_diamond", knowing(prompts, str, right)) == {"gpqa_diamond": [True] * 10}
    assert len({right(text) for text in prompts}) == 4


@pytest.mark.parametrize(
    ("name", "say", "expected"),
    [
        ("gsm_plus", "The answer is 2.", {"gsm_plus": [False, True, False]}),
        ("math_500", r"\boxed{4}", {"math_500": [True]}),
        ("math_level_5", r"\boxed{6.0}", {"math_level_5": [True] * 7}),
        ("mgsm", "Antwort: 2", {"mgsm": [True] * 6, "mgsm (strict)": [True] * 6}),
        ("mmlu_pro", "I think the answer is (B).", {"mmlu_pro": [True] * 14}),
    ],
)
def test_generated_answers(data: Path, name: str, say: str, expected: dict[str, list[bool]]) -> None:
    prompts: list[str] = []
    assert judged(data, name, knowing(prompts, lambda text: say)) == expected
    examples = {"gsm_plus": 5, "math_500": 4, "math_level_5": 0, "mgsm": 5, "mmlu_pro": 5}[name]
    assert {text.count("<|im_start|>user") for text in prompts} == {examples + 1}
    if name == "mmlu_pro":
        assert "about biology. Think step by step" in prompts[0] and prompts[0].count("biology ") == 6
        assert "N/A" not in prompts[0] and "C." not in prompts[0]


def test_mmmlu_has_no_chat_template(data: Path) -> None:
    prompts: list[str] = []
    assert judged(data, "mmmlu", knowing(prompts, str, lambda text: "B")) == {"mmmlu": [True] * 7}
    assert prompts and all("<|im_start|>" not in text and text.endswith("Answer:") for text in prompts)


def test_groups_have_means_of_their_benchmarks(data: Path) -> None:
    benchmarks = Benchmarks(data, ["gsm8k", "math_500", "mgsm", "mmmlu"], 1 << 16, None, lambda line: None)
    assert benchmarks.groups == {
        "mathematics": {"gsm8k": ("gsm8k",), "math_500": ("math_500",)},
        "languages": {"mgsm": ("mgsm",), "mmmlu": ("mmmlu",)},
    }
    assert benchmarks.versions == {"gsm8k": 3, "math_500": 3, "mgsm": 3, "mmmlu": 1}
    first = {"gsm8k": TaskScore.of(1, 4), "math_500": TaskScore.of(1, 2), "mgsm": TaskScore.of(3, 4)}
    first |= {"mmmlu": TaskScore.of(0, 7), "gsm8k (loose)": TaskScore.of(4, 4)}
    second = {name: TaskScore.of(0, score.questions, score.exact, 0) for name, score in first.items()}
    evaluation = MemberEvaluation(
        weights="checkpoint:0", tasks="t", scores={"pytorch": first, "q4_0": second}, groups=benchmarks.groups,
        versions=benchmarks.versions,
    )  # fmt: skip
    assert evaluation.means == {
        "mathematics": {"pytorch": 0.375, "q4_0": 0},
        "languages": {"pytorch": 0.375, "q4_0": 0},
        AVERAGE: {"pytorch": 0.375, "q4_0": 0},
    }
    assert evaluation.rows[-1] == ["mean: all benchmarks", "", "37.5%", "0.0%", "-37.5"]
    assert "gsm8k 3, math_500 3" in evaluation.notes[0]
    assert MemberEvaluation.model_validate_json(evaluation.model_dump_json()) == evaluation


@pytest.mark.parametrize(
    "part",
    [
        {"scores": {}},
        {"scores": {"pytorch": {}}},
        {"scores": {"pytorch": {"a": (1, 4)}, "q4_0": {"b": (1, 4)}}},
        {"scores": {"pytorch": {"a": (1, 0)}}},
        {"scores": {"pytorch": {"a": (9, 4)}}},
        {"scores": {"pytorch": {"a": (1, 4)}}, "groups": {"g": {"a": ["a", "c"]}}},
        {"scores": {"pytorch": {"a": (1, 4)}}, "groups": {"g": {"a": []}}},
    ],
)
def test_a_record_of_answers_that_cannot_be_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    scores = {
        model: {
            task: {"exact": exact, "questions": questions, "ci95": [0, 1]} for task, (exact, questions) in of.items()
        }
        for model, of in part["scores"].items()
    }
    record = {"weights": "checkpoint:0", "tasks": "t"} | part | {"scores": scores}
    (tmp_path / "evaluation.json").write_text(json.dumps(record))
    with pytest.raises(InvalidInput):
        read_record(tmp_path / "evaluation.json", MemberEvaluation)


def test_ifeval_is_judged_by_the_reference_implementation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No instruction here splits sentences, so none reads these data, but the judge wants them to be there.
    (tmp_path / "nltk/tokenizers/punkt_tab").mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    docs = [
        ("punctuation:no_comma", {}, "no commas"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "three words"),
        ("change_case:english_lowercase", {}, "lower case"),
    ]
    both = [{"key": 9, "prompt": "both", "instruction_id_list": [docs[0][0], docs[1][0]], "kwargs": [{}, docs[1][1]]}]
    one = [
        {"key": key, "prompt": prompt, "instruction_id_list": [name], "kwargs": [kwargs]}
        for key, (name, kwargs, prompt) in enumerate(docs)
    ]
    rows(data / "google/IFEval/train.jsonl", *one, *both)
    answers = {"no commas": "well, no", "three words": "it has four words", "lower case": "all is lower here now"}
    verdicts = judged(
        data, "ifeval", knowing([], lambda text: next((a for q, a in answers.items() if q in text), "a b"))
    )
    assert verdicts == {
        "ifeval": [False, True, True, False],
        "ifeval (prompt_level_loose_acc)": [False, True, True, False],
        "ifeval (inst_level_strict_acc)": [False, True, True, True, False],
        "ifeval (inst_level_loose_acc)": [False, True, True, True, False],
    }
    groups = Benchmarks(data, ["ifeval"], 1 << 16, None, lambda line: None).groups
    assert groups == {"instruction following": {"ifeval": tuple(verdicts)}}


def test_long_questions_lose_their_beginnings_and_it_is_said(data: Path) -> None:
    prompts: list[str] = []
    messages: list[str] = []
    Benchmarks(data, ["gsm8k"], 128, None, messages.append).judge(knowing(prompts, str), CHAT)
    assert [len(CHAT.encode(text)) for text in prompts] == [64] * 3
    assert messages == ["3 questions lost their beginnings to fit into 128 tokens"]


def test_missing_data_is_named(data: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    every = Benchmarks(data, (), 4096, None, messages.append)
    assert len(messages) == 1 and messages[0].startswith("ifeval: left out: ") and len(NAMES) == 10
    assert every.name.endswith(", ".join(name for name in NAMES if name != "ifeval"))
    with pytest.raises(UnknownName, match="unknown benchmark 'gsm8'; did you mean 'gsm8k'"):
        Benchmarks(data, ["gsm8"], 4096, None, messages.append)
    with pytest.raises(InvalidInput, match="there is no folder openai/gsm8k"):
        Benchmarks(tmp_path / "cache", ["gsm8k"], 4096, None, messages.append)
    with pytest.raises(InvalidInput, match="has no data of any benchmark"):
        Benchmarks(tmp_path / "cache", (), 4096, None, messages.append)
    (data / "HuggingFaceH4" / "MATH-500" / "test.jsonl").rename(data / "HuggingFaceH4" / "MATH-500" / "rows.jsonl")
    with pytest.raises(InvalidInput, match=r"MATH-500 has no README\.md and no files of test"):
        Benchmarks(data, ["math_500"], 4096, None, messages.append)
    rows(data / "HuggingFaceH4" / "MATH-500" / "test.jsonl", {"question": "no problem"})
    with pytest.raises(InvalidInput, match="math_500: its data is not as expected"):
        Benchmarks(data, ["math_500"], 4096, None, messages.append)


def test_scores_of_continuations_are_those_of_the_whole_text() -> None:
    torch.manual_seed(0)
    model = Model(LAYOUT).eval()
    question, continuations = list(range(3, 12)), [[5], [7, 8, 9], [1, 1], [2]]
    scores = answerer(model, CHAT).scores(question, continuations)
    for continuation, score in zip(continuations, scores, strict=True):
        with torch.no_grad():
            logits, _ = model.prefill(torch.tensor([question + continuation]))
        logs = logits[0, len(question) - 1 : -1].double().log_softmax(-1)
        expected = sum(float(row[token]) for row, token in zip(logs, continuation, strict=True))
        assert math.isclose(score.log_probability, expected, rel_tol=1e-5)
        assert score.greedy == bool(np.all(logs.argmax(-1).numpy() == continuation))
