"""Tasks that a small instruct model is above chance in, asked of GGUF files: what an adaptation keeps of its model.

    python -m benchmarks.adapt tasks FOLDER [--limit N]

FOLDER is that of `benchmarks.adapt real`. Questions are made from WordNet and the Debian reference manual, packages of
Debian that no child is trained on, and of words and numbers. The Q4_0 files of model and child answer them, by the
runtime that they are measured in. Report: `recorded`.

Of several answers, the one with the largest log-probability for each byte counts as chosen. Other answers are generated
greedily and checked. Each answer is a line of FOLDER/tasks/answers.jsonl: a stopped run continues.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapt_real import is_long, unpacked
from benchmarks.lines import read_lines
from benchmarks.page import table
from benchmarks.runs import say
from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import write_durably
from nas.core.family import TaskScore
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.dialogue import Dialogue
from nas.measure.runtimes.llama_cpp.binding import dialogue
from nas.model.nn.weights import checkpoint_layout
from nas.train.posttrain.conversations import ChatTokenizer, Message
from nas.train.release.files import write_files
from nas.train.release.model_tokenizer import read_model_tokenizer
from nas.train.release.options import FileOptions

PACKAGES = ("wordnet-base", "debian-reference-common", "debian-reference-en")
_CONTEXT = 2304
_NEEDLES = (512, 1024, 2048)
_WORDS = re.findall(
    r"\w+",
    "apple river stone window garden paper music silver forest bridge candle winter table orange mountain letter ocean"
    " copper basket yellow planet engine rabbit coffee market pencil castle summer button island ladder pepper tiger"
    " doctor kitchen blanket hammer pocket school thunder",
)
_NAMES = ("Maria", "James", "Anna", "Peter", "Laura", "David", "Helen", "Thomas")
_POINT = re.compile(r"^(?:\d+\.|[-*•]) ", re.MULTILINE)
_TURNS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How do I list the files of a folder in a shell?",
    "What is a kernel of an operating system?",
    "Explain in two sentences why the sky is blue.",
    "Translate to German: The house is small.",
    "Name three fruits.",
    "What is 7 times 6?",
    "Write a Python function that adds two numbers.",
    "Tell me a short story about a cat.",
)
_THINGS = ("key", "book", "picture", "friend", "teacher", "car", "dog", "song", "house", "letter")


@dataclass(frozen=True)
class Question:
    """A question with answers to choose from, the right one first; or one whose generated answer is checked.

    Args:
        task: it belongs to.
        text: that the answer continues.
        answers: to choose from; empty: the answer is generated.
        most: tokens of a generated answer.
        check: whether a generated answer is right.
        chat: the text is a message of a user, in the chat template.
    """

    task: str
    text: str
    answers: tuple[str, ...] = ()
    most: int = 0
    check: Callable[[str], bool] = bool
    chat: bool = False


class _Answers:
    """Which answers of files were right, one JSON line for each answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._right = {(row["file"], row["question"]): row["right"] for row in read_lines(path)}

    def right(self, file: str, question: Question) -> bool | None:
        """Returns whether a file's answer was right, None without one; `file` is its SHA-256."""
        return self._right.get((file, _key(question)))

    def add(self, file: str, question: Question, right: bool) -> None:
        """Records an answer."""
        self._right[file, _key(question)] = right
        with self._path.open("a") as lines:
            lines.write(json.dumps({"file": file, "question": _key(question), "right": right}) + "\n")


def _key(question: Question) -> str:
    return content_hash([question.task, question.text, question.answers, question.most, question.chat])


def recorded(long: bool) -> Path:
    """Returns the report of the child of long requests, or of that of 512 tokens."""
    return Path(__file__).parent / "recorded" / ("adapt-tasks-long.json" if long else "adapt-tasks.json")


def run(folder: Path, limit: int) -> None:
    """Asks model and child, and records how many answers are right.

    Raises:
        SystemExit: there is no child, or a package cannot be fetched.
    """
    child, model = folder / "child/files/gguf/child-Q4_0.gguf", folder / "tasks/gguf/model-Q4_0.gguf"
    if not child.is_file():
        raise SystemExit(f"{child}: no such file; run `python -m benchmarks.adapt real` first")
    chat = ChatTokenizer.read(folder / "child/teacher.tokenizer/tokenizer.json")
    _export_model(folder)
    with unpacked(PACKAGES) as share:
        questions = [question for task in _questions(share, limit, chat) for question in task]
    answers = _Answers(folder / "tasks" / "answers.jsonl")
    turns: list[dict[str, str]] = [{"user": text} for text in _TURNS]
    files: dict[str, str] = {}
    for name, file in {"model": model, "child": child}.items():
        files[name] = sha256_of(file)
        with dialogue(file, _CONTEXT) as talker:
            for number, question in enumerate(questions):
                if number % 50 == 0:
                    say(f"{name}: {number} of {len(questions)} questions")
                if answers.right(files[name], question) is None:
                    answers.add(files[name], question, _is_right(talker, chat, question))
            for turn in turns:
                ids = chat.question([Message(role="user", content=turn["user"])])
                turn[name] = chat.answer_of(list(talker.answer(ids, 96, chat.ends)))
    tasks: dict[str, Any] = {}
    for question in questions:
        chance = 1 / len(question.answers) if question.answers else 0.0
        task = tasks.setdefault(question.task, {"chance": chance, "model": "", "child": ""})
        for name, sha256 in files.items():
            task[name] += "01"[bool(answers.right(sha256, question))]
    write_durably(recorded(is_long(folder)), (json.dumps({"tasks": tasks, "turns": turns}, indent=1) + "\n").encode())


def rows(record: dict[str, Any]) -> str:
    """Returns the table: right answers of model and child, and the difference, with 95 % intervals."""
    lines = []
    for name, task in record["tasks"].items():
        pairs = list(zip(task["model"], task["child"], strict=True))
        model = TaskScore.of(task["model"].count("1"), len(pairs))
        child = TaskScore.of(task["child"].count("1"), len(pairs), pairs.count(("1", "0")), pairs.count(("0", "1")))
        assert child.change is not None
        change, low, high = child.change
        verdict = "lost" if high < 0 else "gained" if low > 0 else "no difference shown"
        difference = f"{100 * change:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
        lines.append([name, str(len(pairs)), f"{task['chance']:.0%}", str(model), str(child), difference, verdict])
    return table(["task", "n", "chance", "model", "child", "difference, points", "reading"], lines)


def transcript(record: dict[str, Any]) -> str:
    """Returns the answers of model and child to ten messages, as they came."""
    names = {"user": "User", "model": "Model", "child": "Child"}
    return "\n\n".join(
        "\n>\n".join(f"> **{names[name]}:** {' '.join(text.split())}" for name, text in turn.items())
        for turn in record["turns"]
    )


def _is_right(talker: Dialogue, chat: ChatTokenizer, question: Question) -> bool:
    ids = chat.question([Message(role="user", content=question.text)]) if question.chat else chat.encode(question.text)
    if not question.answers:
        return question.check(chat.answer_of(list(talker.answer(ids, question.most, chat.ends))))
    scores = talker.scores(ids, [chat.encode(answer) for answer in question.answers])
    sizes = [len(answer.encode()) for answer in question.answers]
    values = [score.log_probability / size for score, size in zip(scores, sizes, strict=True)]
    return values[0] == max(values)


def _questions(share: Path, limit: int, chat: ChatTokenizer) -> Iterator[list[Question]]:
    """Yields the questions of each task; `share` is usr/share of `PACKAGES`."""
    manual = gzip.decompress((share / "debian-reference/debian-reference.en.txt.gz").read_bytes()).decode()
    rng = random.Random(0)
    yield _last_words(manual, rng, limit)
    yield _definitions(share / "wordnet", rng, limit)
    yield _grammar(rng, limit)
    yield _arithmetic(rng, limit)
    yield _copies(rng, limit)
    for length in _NEEDLES:
        yield [_needle(manual, length, chat, rng) for _ in range(min(limit, 40))]
    yield _instructions(rng, limit)


def _last_words(manual: str, rng: random.Random, limit: int) -> list[Question]:
    """Last words of passages that have them before (LAMBADA, Paperno et al. 2016), to be generated."""
    questions = []
    for paragraph in re.split(r"\n\s*\n", manual):
        text = " ".join(paragraph.split())
        match = re.fullmatch(r"([A-Z].{150,600}) ([a-z]{5,})\.", text)
        if match and re.search(rf"\b{match[2]}\b", match[1]):
            questions.append(Question("last words", match[1], most=6, check=_begins(match[2])))
    rng.shuffle(questions)
    return questions[:limit]


def _begins(word: str) -> Callable[[str], bool]:
    return lambda answer: re.match(rf"\s*{re.escape(word)}\b", answer) is not None


def _definitions(wordnet: Path, rng: random.Random, limit: int) -> list[Question]:
    """Definitions of frequent nouns, to be chosen among those of four."""
    glosses = {}
    for line in (wordnet / "data.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith(" "):
            glosses[line.split()[0]] = line.partition(" | ")[2].split(";")[0].strip()
    nouns = []
    for line in (wordnet / "index.noun").read_text(encoding="latin-1").splitlines():
        fields = line.split()
        if line.startswith(" ") or not fields[0].isalpha():
            continue
        senses = int(fields[2])
        if int(fields[-senses - 1]) > 0 and senses <= 2 and len(glosses[fields[-senses]]) > 20:
            nouns.append((fields[0], glosses[fields[-senses]]))
    rng.shuffle(nouns)
    questions = []
    for number in range(min(limit, len(nouns) // 4)):
        four = nouns[4 * number : 4 * number + 4]
        text = f'The meaning of the word "{four[0][0]}" is:'
        questions.append(Question("definitions", text, tuple(f" {gloss}" for _, gloss in four)))
    return questions


def _grammar(rng: random.Random, limit: int) -> list[Question]:
    """Agreement of a verb with a subject behind which another noun stands (BLiMP, Warstadt et al. 2020)."""
    questions: list[Question] = []
    while len(questions) < limit:
        subject, other = rng.sample(_THINGS, 2)
        frame = rng.choice(("near", "behind", "with", "of"))
        plural = rng.random() < 0.5
        text = f"The {subject}{'s' * plural} {frame} the {other}{'s' * (not plural)}"
        verbs = [(" is", " are"), (" was", " were"), (" has", " have")][rng.randrange(3)]
        questions.append(Question("grammar", text, verbs[::-1] if plural else verbs))
    return questions


def _arithmetic(rng: random.Random, limit: int) -> list[Question]:
    """Sums and differences of numbers below 50, to be chosen among four."""
    questions = []
    for _ in range(limit):
        x, y = rng.randint(2, 49), rng.randint(2, 49)
        plus = rng.random() < 0.5 or x < y
        result = x + y if plus else x - y
        wrong = rng.sample([number for number in range(max(0, result - 9), result + 10) if number != result], 3)
        text = f"3 + 4 = 7\n9 - 5 = 4\n12 + 8 = 20\n{x} {'+' if plus else '-'} {y} ="
        questions.append(Question("arithmetic", text, tuple(f" {number}\n" for number in (result, *wrong))))
    return questions


def _copies(rng: random.Random, limit: int) -> list[Question]:
    """The rest of a line of ten words that stands three times before, to be generated."""
    questions = []
    for _ in range(limit):
        words = rng.sample(_WORDS, 10)
        line, rest = " ".join(words), " ".join(words[4:])
        text = f"{line}\n{line}\n{line}\n{' '.join(words[:4])}"
        questions.append(Question("copying", text, most=20, check=_begins(rest)))
    return questions


def _needle(manual: str, length: int, chat: ChatTokenizer, rng: random.Random) -> Question:
    """A number in a text of `length` tokens, to be generated."""
    name, number = rng.choice(_NAMES), rng.randint(1000, 9999)
    start = rng.randrange(len(manual) // 2)
    text = " ".join(manual[start : start + 8 * length].split())
    filler = chat.decode(chat.encode(text)[: length - 48])
    place = filler.find(". ", int(rng.random() * 0.8 * len(filler))) + 1
    text = f"{filler[:place]} The number of {name} is {number}. {filler[place:]}\n\nThe number of {name} is"
    return Question(f"needle in {length:,} tokens", text, most=8, check=_begins(str(number)))


def _instructions(rng: random.Random, limit: int) -> list[Question]:
    """Instructions whose answers are checked by rules (IFEval, Zhou et al. 2023), in the chat template."""
    kinds: list[tuple[str, Callable[[str], Callable[[str], bool]]]] = [
        ("Write one sentence about a {}. Use the word {}.", lambda word: lambda answer: word in answer.lower()),
        ("Write three bullet points about a {}.", lambda _: lambda answer: len(_POINT.findall(answer)) == 3),
        ("Write a poem of two lines about a {}.", lambda _: lambda answer: len(answer.split("\n")) == 2),
        ("Is a {} alive? Answer yes or no.", lambda _: lambda answer: answer.lower().startswith(("yes", "no"))),
        ("Write a Python function named {}.", lambda word: lambda answer: f"def {word}(" in answer),
    ]
    words, questions = [rng.sample(_WORDS, len(_WORDS)) for _ in kinds], []
    for number in range(min(limit, len(kinds) * len(_WORDS))):
        (text, check), word = kinds[number % len(kinds)], words[number % len(kinds)].pop()
        questions.append(Question("instructions", text.replace("{}", word), most=96, check=check(word), chat=True))
    return questions


def _export_model(folder: Path) -> None:
    """Writes the Q4_0 file of the model that the child comes from, as that of the child is written."""
    weights = folder / "child/teacher.safetensors"
    tokenizer = read_model_tokenizer(folder / "child/teacher.tokenizer/tokenizer.json")
    options = FileOptions(name="model", tokenizer=tokenizer, transformers=False, gguf=("q4_0",))
    checkpoint = Checkpoint(weights, sha256_of(weights))
    write_files(folder / "tasks", checkpoint_layout(weights), checkpoint, options, say)
