"""Preference alignment: the objective against plain arithmetic, pairs from judged samples, and what is generated."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from pretrain_lab import LAYOUT, SETTINGS, end_sampled_answers, tiny_family
from safetensors.torch import load_file, save_file
from scipy.stats import binomtest  # type: ignore[import-untyped]
from tokenizer_lab import ASK, CHATML, with_template, write_model_tokenizer
from torch import Tensor

from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.family import MemberTraining, TaskScore
from nas.core.task import IGNORE
from nas.model.nn.model import Model
from nas.serve.views.family import member_folder
from nas.train.posttrain import prefer
from nas.train.posttrain.conversations import ChatTokenizer, Conversation, Message, Preference, read_lines
from nas.train.posttrain.evaluate import Chat, read_tools
from nas.train.posttrain.generation import answerer, counts, exact_answers, generate, grouped
from nas.train.posttrain.judges import RULES, Sample, command_judge, preference_of
from nas.train.posttrain.prefer import ACCURACY, PreferSettings, answer_log_probabilities, preference_loss
from nas.train.posttrain.reward_model import RewardModel
from nas.train.posttrain.sft import TokenisedConversations
from nas.train.posttrain.toy_data import TASKS, conversations, is_test, preferences, write_tasks
from nas.train.recipe import PostTrainingRecipe, run_recipe
from nas.train.release.options import FileOptions
from nas.train.release.tokenizer import BOS, SPECIAL, byte_tokenizer, chat_template

Numbers = list[float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_equations(
    policy: Numbers, reference: Numbers, lengths: Numbers, beta: float, margin: float, omega: float, lam: float
) -> float:
    (w, l), (w0, l0), (nw, nl) = policy, reference, lengths  # noqa: E741 - as in the report
    rw, rl = beta * (w - w0) / nw, beta * (l - l0) / nl
    delta = rw - rl
    return -(omega * math.log(sigmoid(delta - margin)) + lam * (sigmoid(rw) - sigmoid(rl)))


def drawn(seed: int, rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-10 * torch.rand(2, rows, 2, generator=generator)).double()
    return policy, reference, torch.randint(1, 9, (rows, 2), generator=generator).double()


@pytest.mark.parametrize("settings", [(5.0, 0.0, 1.0, 0.0), (5.0, 0.0, 0.0, 1.0), (2.0, 0.1, 1.0, 0.2)])
def test_objective_is_that_of_the_equations(settings: tuple[float, float, float, float]) -> None:
    policy, reference, lengths = drawn(0)
    beta, margin, omega, lam = settings
    losses = preference_loss(policy, reference, lengths, beta=beta, margin=margin, relative=omega, absolute=lam)
    expected = [
        by_equations(*row, beta, margin, omega, lam)
        for row in zip(policy.tolist(), reference.tolist(), lengths.tolist(), strict=True)
    ]
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64))


def test_limits_of_the_objective() -> None:
    policy, reference, lengths = drawn(1)
    dpo = {"margin": 0.0, "relative": 1.0, "absolute": 0.0}
    none = preference_loss(policy, reference, lengths, beta=0.0, **dpo)
    torch.testing.assert_close(none, torch.full_like(none, math.log(2)))
    torch.testing.assert_close(preference_loss(reference, reference, lengths, beta=5.0, **dpo), none)
    ones = torch.ones_like(lengths)
    ratio = (policy - reference) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(preference_loss(policy, reference, ones, beta=0.3, **dpo), -F.logsigmoid(0.3 * ratio))
    # For small beta: log 2 - (beta * difference - margin) / 2, and -lambda * beta * difference / 4.
    small = 1e-4
    difference = ((policy - reference) / lengths) @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    slope = (preference_loss(policy, reference, lengths, beta=small, **dpo) - math.log(2)) / small
    torch.testing.assert_close(slope, -difference / 2, rtol=1e-3, atol=1e-3)
    zero = {"margin": 0.0, "relative": 0.0, "absolute": 1.0}
    slope = preference_loss(policy, reference, lengths, beta=small, **zero) / small
    torch.testing.assert_close(slope, -difference / 4, rtol=1e-3, atol=1e-3)


def test_log_probability_of_an_answer_is_the_sum_over_its_tokens() -> None:
    model = Model(LAYOUT)
    inputs = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    labels = torch.tensor([[IGNORE, 3, 4, 9], [IGNORE, 7, IGNORE, IGNORE]])
    logs = model(inputs).log_softmax(-1)
    expected = torch.stack([logs[0, 1, 3] + logs[0, 2, 4] + logs[0, 3, 9], logs[1, 1, 7]])
    torch.testing.assert_close(answer_log_probabilities(model, inputs, labels), expected)


def sample(answer: str, right: str = "four") -> Sample:
    messages = (Message(role="user", content="2 + 2?"), Message(role="assistant", content=right))
    return Sample(Conversation(messages=messages), answer, "data.jsonl, conversation 1")


def test_best_and_worst_answers_become_a_preference() -> None:
    samples = [sample(" four"), sample("It is four."), sample("five"), sample("  ")]
    scores = RULES["contains"](samples)
    assert scores == [1.0, 0.5, 0.0, 0.0]
    preference = preference_of(sample("four"), samples, scores, 1.0)
    assert preference is not None and (preference.chosen, preference.rejected) == ("four", "five")
    refined = preference_of(sample("four"), samples[1:3], [0.5, 0.0], 1.0)
    assert refined is not None and refined.chosen == "four", "the data's own answer is better"
    assert preference_of(sample("four"), samples[:1], [1.0], 1.0) is None
    assert preference_of(sample("four"), [], [], 1.0) is None, "no answer came to an end"
    for token, special in (("<|im_start|>", SPECIAL), ("<|eot_id|>", ("<|eot_id|>",))):
        preference = preference_of(sample("four"), [sample(token)], [0.0], 1.0, special)
        assert preference is None, "what no conversation may contain"


def test_command_judges_each_answer_without_a_shell() -> None:
    code = "import json, sys\nfor line in sys.stdin: print(len(json.loads(line)['answer']))"
    assert command_judge([sys.executable, "-c", code])([sample("a"), sample("$(b)")]) == [1.0, 4.0]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print(1); raise SystemExit('no memory')", r"exit code 1 after 1 of 2 scores, at data.jsonl, .*\nno memory"),
        ("print(1); print('good')", "'good' is not a score, for data.jsonl, conversation 1"),
        ("print(1); print('nan')", "'nan' is not a score"),
        ("import time; time.sleep(60)", "no scores after 0.5 s"),
    ],
)
def test_judges_that_fail_are_named_with_the_question(code: str, problem: str) -> None:
    with pytest.raises(InfrastructureFailed, match=problem):
        command_judge([sys.executable, "-c", code], deadline_s=0.5 if "sleep" in code else 60)([sample("a")] * 2)


def test_missing_judge() -> None:
    with pytest.raises(InfrastructureFailed, match="judge /nowhere: No such file"):
        command_judge(["/nowhere"])([sample("a")])


def greedy(model: Model, ids: Sequence[int], most: int, ends: Sequence[int]) -> list[int]:
    answer: list[int] = []
    while len(answer) < most and not (answer and answer[-1] in ends):
        answer.append(int(model(torch.tensor([[*ids, *answer]]))[0, -1].argmax()))
    return answer


def test_answers_are_those_of_a_model_run_alone() -> None:
    model = Model(LAYOUT).eval()
    questions = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    ends = greedy(model, questions[0], 4, ())[3:]
    assert generate(model, questions, 6, ends) == [greedy(model, question, 6, ends) for question in questions]
    sampled = [generate(model, questions[:2], 6, (), temperature=2.0, seeds=[[0, i] for i in range(2)])]
    sampled.append(generate(model, questions[1::-1], 6, (), temperature=2.0, seeds=[[0, 1], [0, 0]])[::-1])
    assert sampled[0] == sampled[1] and sampled[0] != generate(model, questions[:2], 6, ())


def test_exact_answers_are_counted_by_task() -> None:
    chat = ChatTokenizer(byte_tokenizer(320), "bytes")
    examples = [example for task in ("lookup", "arithmetic") for example in _examples(task, 2)]

    def respond(questions: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        assert most >= max(len(example.answer) for example in examples)
        return [chat.encode(f" {example.answer}<|im_end|>x") for example in examples[:3]] + [chat.encode("?")]

    expected = {"all": (3, 4), "arithmetic": (1, 2), "lookup": (2, 2)}
    scores = counts(grouped(examples, exact_answers(examples, chat, respond)))
    assert scores == {task: TaskScore.of(*score) for task, score in expected.items()}
    assert exact_answers(examples[:1], chat, answerer(Model(LAYOUT).eval(), chat).respond) == [False]


@pytest.mark.parametrize(("exact", "questions"), [(0, 10), (33, 120), (24, 24)])
def test_intervals_of_shares_are_wilson_s(exact: int, questions: int) -> None:
    expected = binomtest(exact, questions).proportion_ci(0.95, "wilson")
    assert TaskScore.of(exact, questions).ci95 == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_changes_of_a_file_are_counted_and_have_intervals_of_paired_shares() -> None:
    examples = _examples("lookup", 2) + _examples("arithmetic", 2)
    right, before = [False, True, True, True], [True, True, False, True]
    scores = counts(grouped(examples, right), grouped(examples, before))
    assert [(scores[task].lost, scores[task].gained) for task in ("all", "arithmetic", "lookup")] == [
        (1, 1),
        (0, 1),
        (1, 0),
    ]
    assert counts(grouped(examples, [True] * 4))["all"].change is None
    value, low, high = TaskScore.of(600, 10_000, 300, 100).change or (0, 0, 0)
    half = 1.96 * math.sqrt(0.04 - 0.02**2) / 100  # with so many questions, the added ones change next to nothing
    assert (value, low, high) == pytest.approx((-0.02, -0.02 - half, -0.02 + half), abs=2e-4)
    swapped = TaskScore.of(600, 10_000, 100, 300).change or (0, 0, 0)
    assert swapped == pytest.approx((-value, -high, -low))
    value, low, high = TaskScore.of(5, 10, 0, 0).change or (1, 1, 1)
    assert value == 0 and low == -high and 0.1 < high < 0.3


def _examples(task: str, count: int) -> list[Conversation]:
    return [example for example in conversations(60, 0, test=False) if example.task == task][:count]


def test_generated_conversations_are_valid_and_their_test_set_is_apart() -> None:
    train, test = conversations(500, 0, test=False), conversations(100, 0, test=True)
    assert all(example.problem() is None for example in (*train, *test, *preferences(100, 0)))
    assert {example.task for example in train} == {*TASKS, "tool result"}
    assert all(map(is_test, test)) and {e.question for e in train}.isdisjoint(e.question for e in test)
    assert conversations(500, 0, test=False) == train != conversations(500, 1, test=False)
    sums = [example for example in train if example.task == "arithmetic"]
    assert all(eval(example.question[0].content[8:-1]) == int(example.answer) for example in sums)


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_family(tmp_path, monkeypatch)
    write_tasks(tmp_path, train=30, test=6, pairs=60, lines=20)
    return tmp_path


def run(folder: Path, *stages: dict[str, object]) -> MemberTraining:
    settings = SETTINGS.model_copy(update={"tokens": 4 * 256}).model_dump(mode="json")
    first: list[dict[str, object]] = [
        {"kind": "pretrain", "corpus": ["corpus"], "settings": settings},
        {"kind": "sft", "data": [{"path": "train.jsonl"}], "batch": 8, "lr": 5e-3, "epochs": 1},
    ]
    recipe = PostTrainingRecipe.model_validate({"tokenizer": "tokenizer.json", "stages": [*first, *stages]})
    return run_recipe("tiny", "1M", recipe, folder, lambda line: None, workers=1, files=FileOptions(gguf=()))


def test_alignment_raises_the_chosen_answers_and_merges_follow(member: Path) -> None:
    stage: dict[str, object] = {
        "kind": "prefer", "pairs": ["pairs.jsonl"], "batch": 8, "epochs": 4, "lr": 3e-3, "held_out": 0.4,
        "evaluate": ["test.jsonl"],
    }  # fmt: skip
    training = run(member, stage, {"kind": "merge", "method": "ties", "density": 0.5, "evaluate": ["test.jsonl"]})
    aligned = training.before[-1]
    assert [record.kind for record in training.history] == ["pretrain", "sft", "prefer", "merge"]
    start = math.log1p(math.exp(0.1))  # -log sigmoid(-0.1)
    assert aligned.curve[0][1] == pytest.approx(start, abs=1e-3) and aligned.curve[-1][1] < 0.9 * start
    assert set(aligned.held_out) >= {ACCURACY, "exact all"} and 0 < aligned.held_out[ACCURACY] < 1
    assert training.steps == 0 and training.start == "ties of sft, prefer" and "exact all" in training.held_out
    assert 15 < aligned.config["counts"][ACCURACY] < 35 and set(aligned.spent) == {"prepare", "train", "score"}
    assert aligned.whole_s > aligned.seconds == aligned.spent["train"] and training.prepare_memory_mb
    assert training.config["models"] == [training.before[1].checkpoint, aligned.checkpoint]
    assert run(member, stage, {"kind": "merge", "models": ["prefer"]}).checkpoint == aligned.checkpoint


def test_sampled_answers_that_the_template_changes_are_dropped(tmp_path: Path) -> None:
    calm = with_template(CHATML.replace("{{ m.content }}", "{{ m.content | replace('!', '.') }}") + ASK)
    chat = ChatTokenizer.read(write_model_tokenizer(tmp_path / "model", calm))
    question = (Message(role="user", content="one"),)
    pairs = [Preference(messages=question, chosen="two", rejected=worse) for worse in ("three", "four!")]
    settings, lines = PreferSettings(pairs=("pairs.jsonl",), held_out=0.0), list[str]()
    prefer._write_pairs(tmp_path / "pairs.safetensors", pairs, chat, settings, lines.append)
    assert len(TokenisedConversations(tmp_path / "pairs.safetensors").lengths) == 2
    assert lines[0].startswith("1 preferences; 0 longer") and lines[1].startswith("1 preferences with an answer that")


def test_on_policy_pairs_are_sampled_once(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_sampled_answers(monkeypatch)
    judge = [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(len(line))"]
    stage: dict[str, object] = {
        "kind": "prefer", "questions": ["asked.jsonl"], "judge_command": judge, "samples": 2, "answer_tokens": 4,
        "batch": 4, "epochs": 1,
    }  # fmt: skip
    (member / "asked.jsonl").write_text("\n" + (member / "test.jsonl").read_text())
    for scores, problem in (
        ("1\\n" * 3, "exit code 1 after 3 of 18 scores, at {}:3"),  # the second sample of the second question
        ("1\\n" * 4 + "well\\n", "'well' is not a score, for {}:4"),
    ):
        bad = [sys.executable, "-c", f"print('{scores}', end=''); raise SystemExit({int('well' not in scores)})"]
        with pytest.raises(InfrastructureFailed, match=problem.format(re.escape(str(member / "asked.jsonl")))):
            run(member, {**stage, "judge_command": bad})
    even = [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(1)"]
    with pytest.raises(InvalidInput, match=r"asked\.jsonl: no preference is left to train on"):
        run(member, {**stage, "judge_command": even})
    training = run(member, stage)
    pairs = [path for path in (member / "NAS_CACHE" / "preferences").glob("*/*.jsonl") if path.stat().st_size]
    assert set(training.spent) == {"prepare", "sample", "judge", "train", "score"}
    assert len(pairs) == 1 and training.config["preferences"] == len(pairs[0].read_text().splitlines()) > 0
    again = run(member, {**stage, "lr": 1e-6})
    assert again.config["preferences"] == training.config["preferences"] and again.checkpoint != training.checkpoint


def test_answers_without_an_end_are_neither_judged_nor_chosen(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTokenizer(byte_tokenizer(512), "bytes")
    whole, cut = chat.encode("No.<|im_end|>"), chat.encode("The capital of France is Par")
    monkeypatch.setattr(prefer, "generate", lambda *_, **__: [whole, cut] * 2)
    judged: list[str] = []

    def longest(samples: Sequence[Sample]) -> list[float]:
        judged.extend(one.answer for one in samples)
        return [float(len(one.answer)) for one in samples]

    settings = PreferSettings(questions=("f",), judge="exact", samples=2)
    subject: Any = SimpleNamespace(timed=lambda _: nullcontext())
    model: Any = None
    questions = [(sample("", "Paris and Madrid.").conversation, "f:1")] * 2
    pairs, dropped = prefer._judged(settings, subject, model, chat, longest, questions, 0)
    assert judged == ["No."] * 2 + ["Paris and Madrid."] * 2 and dropped == 2
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("Paris and Madrid.", "No.")] * 2


def test_an_edited_judge_judges_again(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_sampled_answers(monkeypatch)
    (member / "asked.jsonl").write_text((member / "test.jsonl").read_text())
    script = member / "judge.py"
    stage: dict[str, object] = {
        "kind": "prefer", "questions": ["asked.jsonl"], "judge_command": [sys.executable, str(script)], "samples": 2,
        "answer_tokens": 4, "batch": 4, "epochs": 1,
    }  # fmt: skip
    keys = []
    for sign in ("", "-", ""):
        script.write_text(f"import sys\nfor line in sys.stdin: print({sign}len(line))")
        keys.append(run(member, stage).config["key"])
    assert keys[0] == keys[2] != keys[1]


def test_children_of_a_judge_end_with_it(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path / 'child'}; echo 1; wait"
    with pytest.raises(InfrastructureFailed, match=r"no scores after 0\.5 s"):
        command_judge(["bash", "-c", script], deadline_s=0.5)([sample("a")])
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_two_rounds_of_alignment_sample_from_different_weights(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_sampled_answers(monkeypatch)
    judge = [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(len(line))"]
    (member / "asked.jsonl").write_text((member / "test.jsonl").read_text())
    first: dict[str, object] = {
        "kind": "prefer", "name": "one", "questions": ["asked.jsonl"], "judge_command": judge, "samples": 2,
        "answer_tokens": 4, "batch": 4, "epochs": 1, "lr": 5e-3,
    }  # fmt: skip
    training = run(member, first, {**first, "name": "two"})
    one, two = training.history[2:]
    assert (one.label, two.label) == ("one", "two")
    assert two.start == f"checkpoint:{one.checkpoint}" and two.checkpoint != one.checkpoint
    rounds = [
        [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
        for folder in (member / "NAS_CACHE/preferences").iterdir()
    ]
    assert len(rounds) == 2 and rounds[0] != rounds[1], "answers of the second round are of the first one's weights"
    merged = run(member, first, {**first, "name": "two"}, {"kind": "merge", "models": ["one", "two"]})
    assert merged.config["models"] == [one.checkpoint, two.checkpoint]


class Remembering:
    """A dialogue that notes the questions and answers each with `yes`."""

    def __init__(self, chat: ChatTokenizer, context: int) -> None:
        self.context, self.questions, self._chat = context, list[str](), chat

    def answer(self, question: Sequence[int], most: int, ends: Sequence[int], **_: object) -> list[int]:
        assert len(question) + most // 2 <= self.context
        self.questions.append(self._chat.decode(question))
        return self._chat.encode("yes<|im_end|>")


def test_chat_forgets_its_oldest_turns_and_says_so() -> None:
    chat = ChatTokenizer(byte_tokenizer(320), "bytes")
    dialogue: Any = Remembering(chat, 160)
    warnings: list[str] = []
    talk = Chat(dialogue, chat, "brief", [{"name": "sum"}], warnings.append)
    for number in range(5):
        assert "".join(talk.say(f"question {number}", most=8, temperature=0, seed=0)) == "yes"
    last = dialogue.questions[-1]
    assert "brief" in last and '"sum"' in last and "question 4" in last and "question 0" not in last
    assert warnings and all(
        re.fullmatch(r"forgot the oldest \d of \d turns: the context is full", line) for line in warnings
    )
    assert talk.messages[0].role == "system" and talk.messages[1].role == "user"
    lines = [b"caf\xe9".decode(errors="surrogateescape"), "tea"]
    assert "".join(talk.answers(lines, most=8, temperature=0, seed=0)) == "\nyes\n"
    assert "the message is not text in the encoding of the locale" in warnings


def test_tools_of_a_chat_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text('[{"name": "sum"}, "text"]')
    assert read_tools(path) == [{"name": "sum"}, "text"]
    path.write_text('["text"]', encoding="utf-8-sig")
    assert read_tools(path) == ["text"]
    for content, problem in (
        ("{}", "no JSON list of tools: [^\n]*$"),
        ('["<|im_end|>"]', "contains the special token"),
    ):
        path.write_text(content)
        with pytest.raises(InvalidInput, match=rf"^{path}: .*{problem}"):
            read_tools(path)


def write_reward_model(folder: Path, outputs: int = 1, template: str | None = None) -> None:
    """A random Llama with outputs for whole sequences, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=outputs, pad_token_id=None, initializer_range=0.5, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    template = chat_template() if template is None else template
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(320).tokenizer, bos_token=BOS)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def test_scores_of_a_reward_model_are_those_of_transformers(tmp_path: Path) -> None:
    write_reward_model(tmp_path / "m")
    samples = [sample("four"), sample("five is more than four"), sample("")]
    tool = {"name": "sum", "parameters": {}}
    messages = (Message(role="system", content="brief"), *samples[0].conversation.messages)
    samples.append(Sample(Conversation(messages=messages, tools=(tool,)), "4", "data.jsonl:9"))
    samples.append(Sample(Conversation(messages=messages, tools=(json.dumps(tool),)), "4", "data.jsonl:9"))
    scores = RewardModel(tmp_path / "m")(samples)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    for case, score in zip(samples, scores, strict=True):
        question = [message.model_dump() for message in case.conversation.question]
        text = tokenizer.apply_chat_template(
            [*question, {"role": "assistant", "content": case.answer}],
            tools=[tool] if case.conversation.tools else None,
            tokenize=False,
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert score == pytest.approx(model(ids).logits.item(), rel=1e-5)
    assert len(set(scores)) == 4 and scores[3] == scores[4]
    end_score, plain = RewardModel(tmp_path / "m")([sample("four<|im_end|>"), sample("four")])
    assert end_score != plain, "an answer cannot spell the end of its turn"


def test_folders_that_are_no_reward_models_are_refused(tmp_path: Path) -> None:
    def refused(name: str, problem: str) -> None:
        with pytest.raises(InvalidInput, match=rf"^judge_model: {tmp_path / name}: {problem}"):
            RewardModel(tmp_path / name)

    refused("none", "no such folder")
    write_reward_model(tmp_path / "two", outputs=2)
    refused("two", "has 2 outputs; a reward model has one")
    write_reward_model(tmp_path / "silent", template="")
    refused("silent", "its tokenizer has no chat template")
    write_reward_model(tmp_path / "headless")
    weights = load_file(tmp_path / "headless/model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if name != "score.weight"},
              tmp_path / "headless/model.safetensors", {"format": "pt"})  # fmt: skip
    refused("headless", "holds no weights of score.weight")
    (tmp_path / "headless/adapter_config.json").write_text("{}")
    refused("headless", "holds an adapter")
    write_reward_model(tmp_path / "pickled")
    torch.save(weights, tmp_path / "pickled/pytorch_model.bin")
    (tmp_path / "pickled/model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="pickled weights are never read"):
        RewardModel(tmp_path / "pickled")
    write_reward_model(tmp_path / "foreign")
    config = json.loads((tmp_path / "foreign/config.json").read_text())
    code = {"AutoConfig": "code.Config", "AutoModelForSequenceClassification": "code.Model"}
    (tmp_path / "foreign/config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": code}))
    (tmp_path / "foreign/code.py").write_text("raise SystemExit('ran')")
    refused("foreign", "transformers cannot load it: ")


def test_answers_that_a_reward_model_cannot_score_are_named(tmp_path: Path) -> None:
    write_reward_model(
        tmp_path / "m", template="{% if messages[0].content == 'no' %}{{ 1 / 0 }}{% endif %}{{ messages }}"
    )
    judge = RewardModel(tmp_path / "m")
    with pytest.raises(InvalidInput, match=r"^data.jsonl, conversation 1: .*: [0-9,]+ tokens, of at most 512"):
        judge([sample("four" * 200)])
    messages = (Message(role="user", content="no"), Message(role="assistant", content="yes"))
    with pytest.raises(InvalidInput, match=r"^a:7: .* its chat template fails: division by zero"):
        judge([Sample(Conversation(messages=messages), "no", "a:7")])
    weights = load_file(tmp_path / "m/model.safetensors")
    save_file(weights | {"score.weight": weights["score.weight"] * math.nan},
              tmp_path / "m/model.safetensors", {"format": "pt"})  # fmt: skip
    with pytest.raises(InvalidInput, match=r"^data.jsonl, conversation 1: .*: the score is nan"):
        RewardModel(tmp_path / "m")([sample("four")])


def test_a_reward_model_judges_on_policy_answers(member: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_sampled_answers(monkeypatch)
    write_reward_model(member / "judge")
    judged: dict[tuple[object, str], list[float]] = defaultdict(list)
    score = RewardModel._score

    def recorded(self: RewardModel, one: Sample) -> float:
        result = score(self, one)
        judged[one.conversation.question, one.answer.strip()].append(result)
        return result

    monkeypatch.setattr(RewardModel, "_score", recorded)
    (member / "asked.jsonl").write_text((member / "test.jsonl").read_text())
    stage: dict[str, object] = {
        "kind": "prefer", "questions": ["asked.jsonl"], "judge_model": "judge", "samples": 2, "answer_tokens": 4,
        "batch": 4, "epochs": 1,
    }  # fmt: skip
    with pytest.raises(InvalidInput, match=r"judge_model: .*nowhere: no such folder"):
        run(member, {**stage, "judge_model": "nowhere"})
    assert not (member_folder("tiny", "1M") / "training").exists(), "found before the first stage begins"
    training = run(member, stage)
    preferences = [
        line for path in (member / "NAS_CACHE/preferences").glob("*/*.jsonl") for line in read_lines(path, Preference)
    ]
    assert training.config["preferences"] == len(preferences) > 0
    for pair in preferences:
        assert max(judged[pair.messages, pair.chosen]) > min(judged[pair.messages, pair.rejected])
    (member / "judge").rename(member / "moved")
    assert run(member, {**stage, "judge_model": "moved"}).checkpoint == training.checkpoint
    keys = len(list((member / "NAS_CACHE/preferences").iterdir()))
    (member / "moved/note.txt").write_text("changed")
    run(member, {**stage, "judge_model": "moved"})
    assert len(list((member / "NAS_CACHE/preferences").iterdir())) == keys + 1


def test_stages_without_data_or_judges_are_refused(member: Path) -> None:
    for stage, problem in (
        ({"kind": "prefer"}, "name files of preferences"),
        ({"kind": "prefer", "questions": ["a"]}, "one of judge, judge_command and judge_model"),
        ({"kind": "prefer", "questions": ["a"], "judge": "exact", "judge_model": "m"}, "one of judge, judge_command"),
        ({"kind": "merge", "models": ["prefer"]}, "neither weights nor an earlier stage"),
    ):
        with pytest.raises((InvalidInput, ValueError), match=problem):
            run(member, stage)


def test_written_tasks_are_read(member: Path) -> None:
    assert len(read_lines(member / "test.jsonl", Conversation)) == 6
