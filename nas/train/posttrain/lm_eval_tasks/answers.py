"""Questions, extraction of answers and their scores for the configurations of this folder (LFM2 report, appendix C).

The report names the patterns and their order, not its code. Functions here are named by `!function` in the YAML files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

LETTERS = "ABCDEFGHIJ"
_ORDERS = 10
_LAST_LINES = 5

Doc = Mapping[str, Any]

_ANSWERS = [
    re.compile(r"#{3,}\s*(.+)"),
    re.compile(r"ANSWER\s*[:.]\s*(.+)"),
    re.compile(r"answer is:?\s*(.+)", re.IGNORECASE),
    re.compile(r"final answer\s*(?:[:=]\s*)?(.+)", re.IGNORECASE),
    re.compile(r"answer\s*[:=]\s*(.+)", re.IGNORECASE),
]
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_LETTER_PATTERNS = [
    re.compile(r"(?i:answer(?:\s+is)?)\s*(?:[:=]\s*)?(?:(?i:option|choice)\s*)?\(?([A-J])\b"),
    re.compile(r"\(([A-J])\)"),
    re.compile(r"(?i:choice|option)\s+(?i:is\s+)?\(?([A-J])\b"),
    re.compile(r"\b([A-J])[.):/](?!\s*Let's)"),
]
_LINE_START = re.compile(r"[\s>-]*(?:([A-J])[.)/:](?!\s*Let's think)|\(?([A-J])\)?[.:]?\s*$)")
_EMPHASIS = re.compile(r"\*\*|__|`")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_LEADING_NUMBER = re.compile(r"(\\?\$?-?(?:[\d,]*\.\d+|[\d,]*\d)\$?),?\s+(?!and\b|or\b)[a-z]{2,}.*", re.IGNORECASE)
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|(-?[\d.]+)/(-?[\d.]+)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_WITHOUT_MEANING = re.compile(r"\\left|\\right|\\[!,;: ]|\^\{?\\circ\}?|\\?%|\\?\$|\\[()\[\]]|\s|[.,]$")


def mmlu_question(doc: Doc) -> str:
    """Returns question and choices."""
    return f"{doc['question'].strip()}\n{_listed(doc['choices'])}\nAnswer:"


def mmlu_pro_question(doc: Doc) -> str:
    """Returns question and options, without those that are "N/A"."""
    return f"Question: {doc['question'].strip()}\nOptions:\n{_listed([o for o in doc['options'] if o != 'N/A'])}"


def mmlu_pro_reasoning(doc: Doc) -> str:
    """Returns the reasoning of an example; of questions of the test the letter, as they have none."""
    return str(doc["cot_content"]).removeprefix("A: ") or str(doc["answer"])


def mmlu_pro_result(doc: Doc, results: Sequence[str]) -> dict[str, bool]:
    """Returns whether the extracted letter is right."""
    return {"exact": letter(results[0]) == doc["answer"]}


def gpqa_orders(dataset: Any) -> Any:
    """Returns each question ten times, with its choices in random orders, the same in every run."""
    rows = []
    for number, doc in enumerate(dataset):
        choices = [doc["Correct Answer"], *(doc[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        for order in range(_ORDERS):
            places = np.random.default_rng([number, order]).permutation(4).tolist()
            listed = "\n".join(f"({LETTERS[i]}) {choices[place].strip()}" for i, place in enumerate(places))
            rows.append({"Question": doc["Question"], "choices": listed, "answer": places.index(0)})
    return type(dataset).from_list(rows)


def level_5(dataset: Any) -> Any:
    """Returns the problems of level 5."""
    return dataset.filter(lambda doc: doc["level"] == "Level 5")


def mgsm_answer(doc: Doc) -> str:
    """Returns the reasoning of an example; of questions of the test the number."""
    return str(doc["answer"] or doc["answer_number"])


def number_result(doc: Doc, results: Sequence[str]) -> dict[str, bool]:
    """Returns whether the extracted answer is right, and whether the right number is anywhere in the text."""
    expected, strict = _expected(doc), strict_result(doc, results)["strict"]
    loose = any(same(answer, expected) for answer in _NUMBER.findall(_in_ascii(results[0])))
    return {"strict": strict, "loose": strict or loose}


def strict_result(doc: Doc, results: Sequence[str]) -> dict[str, bool]:
    """Returns whether the extracted answer is right."""
    return {"strict": same(number(results[0]), _expected(doc))}


def math_result(doc: Doc, results: Sequence[str]) -> dict[str, bool]:
    """Returns whether the extracted answer is right, as a number or as text."""
    return {"strict": same(extracted(results[0]), doc.get("answer") or boxed(doc["solution"]) or "")}


def math_examples() -> list[dict[str, str]]:
    """Returns four problems with solutions; ours, as the report does not publish its own."""
    return [
        {"problem": problem, "solution": solution}
        for problem, solution in (
            (
                r"Find the sum of the roots of $x^2 - 7x + 10 = 0$.",
                r"By Vieta's formulas the sum of the roots is $\boxed{7}$.",
            ),
            (
                r"How many positive divisors does $72$ have?",
                r"As $72 = 2^3 \cdot 3^2$, it has $(3 + 1)(2 + 1) = \boxed{12}$ positive divisors.",
            ),
            (
                r"Two fair dice are rolled. What is the probability that the sum is $5$?",
                r"Four of the $36$ results have the sum $5$, so it is $\frac{4}{36} = \boxed{\frac{1}{9}}$.",
            ),
            (
                r"A right triangle has legs of $9$ and $12$. What is its perimeter?",
                r"The hypotenuse is $\sqrt{81 + 144} = 15$, so the perimeter is $9 + 12 + 15 = \boxed{36}$.",
            ),
        )
    ]


def letter(text: str) -> str:
    """Returns the chosen letter; empty: none was found."""
    text = _EMPHASIS.sub("", text)
    inside = _plain(boxed(text) or "").strip("()")
    if inside[:1] and inside[0] in LETTERS and inside[1:2] in ("", ".", ")", ":"):
        return inside[0]
    for line in reversed(text.strip().splitlines()[-_LAST_LINES:]):
        if match := _LINE_START.match(line):
            return str(match[1] or match[2])
    for pattern in _LETTER_PATTERNS:
        if answers := pattern.findall(text):
            return str(answers[-1])
    return ""


def extracted(text: str) -> str:
    """Returns the answer of a text: boxed, after ###, ANSWER, "answer is" or the like, or the last number.

    After such words it ends with the sentence.
    """
    text = _in_ascii(text)
    if (inside := boxed(text)) is not None:
        return inside
    text = _EMPHASIS.sub("", text)
    for pattern in _ANSWERS:
        if answers := pattern.findall(text):
            answer = _SENTENCE_END.split(str(answers[-1]).strip())[0]
            return match[1] if (match := _LEADING_NUMBER.fullmatch(answer)) else answer
    return str((_NUMBER.findall(text) or [""])[-1])


def number(text: str) -> str:
    """Returns the first number of the extracted answer, or all of it where it has none."""
    answer = extracted(text)
    return str((_NUMBER.findall(answer) or [answer])[0])


def boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, with its inner braces; None: there is none that is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        short = re.findall(r"\\boxed\s+([^\s$]+)", text)
        return str(short[-1]) if short else None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin + 1 : place]
    return None


def same(answer: str, expected: str) -> bool:
    """Returns whether two answers are the same number, or the same text but for spaces, signs of money and the like."""
    a, b = _plain(answer), _plain(expected)
    if "=" not in b:
        a = re.sub(r"^[a-zA-Z](?:\([a-zA-Z]\))?=", "", a)
    return bool(b) and (a == b or ((value := _value(a)) is not None and value == _value(b)))


def _listed(choices: Sequence[str]) -> str:
    return "\n".join(f"{name}. {choice}" for name, choice in zip(LETTERS, choices, strict=False))


def _expected(doc: Doc) -> str:
    if doc.get("answer_number") is not None:
        return str(doc["answer_number"])
    return str(doc["answer"]).rpartition("####")[2].strip()


def _in_ascii(text: str) -> str:
    r"""Returns a text with `-` for Unicode's sign, and `,` in 10{,}000 and the like: LaTeX's, and narrow blanks."""
    return _THOUSANDS.sub(",", text.replace("\N{MINUS SIGN}", "-"))


def _plain(text: str) -> str:
    text = re.sub(r"\\[dt]frac", r"\\frac", _in_ascii(text).strip()).replace(r"\!", "")
    text = _SHORT_FRACTION.sub(lambda match: rf"\frac{{{match[1] or match[2]}}}{{{match[3] or match[4]}}}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d)\s*\\(?:text|mathrm|mbox)\{\s[^{}]*\}$", "", text)  # a unit
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return _WITHOUT_MEANING.sub("", text)


def _value(text: str) -> Fraction | None:
    try:
        if match := _FRACTION.fullmatch(text):
            sign, top, bottom, above, below = match.groups()
            value = Fraction(top or above) / Fraction(bottom or below)
            return -value if sign else value
        return Fraction(text) if _DECIMAL.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None
