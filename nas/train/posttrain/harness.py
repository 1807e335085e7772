"""Benchmarks of the LFM2 report (section 4.5, appendix C) by lm-evaluation-harness, on a member and its files.

Configurations are `benchmarks/NAME.yaml`. `metadata` has what the harness does not know: `datasets`, names of data sets
that are one benchmark together; `column` and `values`, groups with examples of their own; `examples`, a data set that
examples are drawn from; `chat: false`, questions without the chat template; `group`, as in the report; `version`, to
increase with every change after which the same answers score otherwise; `score: mean`, where a benchmark's score is the
mean of its metrics and not the first.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import TemplateError

from nas.core import paths
from nas.core.errors import InvalidInput, UnknownName, Unsupported
from nas.core.family import BENCHMARKS
from nas.core.progress import Log
from nas.train.posttrain.conversations import ChatTokenizer, Message
from nas.train.posttrain.generation import Answerer, Judgements

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

# Nothing is fetched, and progress is reported line by line; read at the imports below.
os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"), "1")

try:
    import datasets
    from datasets.exceptions import DatasetsError
    from lm_eval import __version__ as VERSION
    from lm_eval.api.model import LM
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate
except ImportError as error:
    raise InvalidInput(
        f"benchmarks need lm-evaluation-harness: pip install '.[evaluation]' in a checkout ({error})"
    ) from error

datasets.disable_progress_bars()

_FOLDER = Path(__file__).parent / "lm_eval_tasks"
_SEED = 1234
_QUESTIONS = ("question", "Question", "problem", "prompt")
"""Columns of data sets, of which each has one."""
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

NAMES = sorted(path.stem for path in _FOLDER.glob("*.yaml"))
"""The benchmarks."""


class Benchmarks:
    """Benchmarks as `nas.train.posttrain.evaluate.Questions`.

    Args:
        data: folder of data sets, each in a folder named as on the Hugging Face Hub, such as `openai/gsm8k`.
        names: of benchmarks; empty: all that `data` has.
        context: most tokens of a question with its answer; longer questions lose their beginnings.
        limit: most questions of each data set; None: all.
        log: takes one line at a time.

    Raises:
        UnknownName: there is no such benchmark.
        InvalidInput: data of a wanted benchmark is missing or is not as expected, or there is none at all.
    """

    record = BENCHMARKS

    def __init__(self, data: Path, names: Sequence[str], context: int, limit: int | None, log: Log) -> None:
        self._context, self._limit, self._log = context, limit, log
        self.tasks: dict[str, list[ConfigurableTask]] = {}
        for name in names or NAMES:
            if name not in NAMES:
                raise UnknownName("benchmark", name, NAMES, where="--benchmark")
            try:
                self.tasks[name] = [ConfigurableTask(config=config) for config in configurations(name, data)]
            except InvalidInput as error:
                if names:
                    raise
                log(f"{name}: left out: {error}")
            except (DatasetsError, TemplateError, LookupError, ValueError, OSError) as error:
                raise InvalidInput(f"{name}: its data is not as expected: {error}", where=str(data)) from error
        if not self.tasks:
            raise InvalidInput("has no data of any benchmark", where=str(data))
        self.groups: dict[str, dict[str, tuple[str, ...]]] = {}
        self.versions: dict[str, int] = {}
        for name, (first, *_) in self.tasks.items():
            about, rows = first.config.metadata, [_row(name, metric, first) for metric in _metrics(first)]
            counted = rows if about.get("score") == "mean" else rows[:1]
            self.groups.setdefault(about["group"], {})[name] = tuple(counted)
            self.versions[name] = about["version"]
        self.name = f"lm-evaluation-harness {VERSION}, {', '.join(self.tasks)}"

    def judge(self, answerer: Answerer, chat: ChatTokenizer) -> Judgements:
        """Scores answers by the harness's metrics of each question."""
        model = HarnessModel(answerer, chat, self._context)
        judgements: dict[str, list[bool]] = defaultdict(list)
        for name, tasks in self.tasks.items():
            for row, right in self._judged(model, name, tasks):
                judgements[row].append(right)
        if model.cut:
            self._log(f"{model.cut:,} questions lost their beginnings to fit into {self._context:,} tokens")
        return dict(judgements)

    def _judged(self, model: HarnessModel, name: str, tasks: Sequence[ConfigurableTask]) -> Iterator[tuple[str, bool]]:
        """Yields rows and whether an answer is right in each; the first metric has the benchmark's own name."""
        for task in tasks:
            task.set_fewshot_seed(_SEED)
        with_chat = tasks[0].config.metadata.get("chat", True)
        results = evaluate(
            model,
            {"tasks": {task.config.task: task for task in tasks}},
            limit=self._limit,
            bootstrap_iters=0,
            apply_chat_template=with_chat,
            fewshot_as_multiturn=with_chat,
        )
        for task in tasks:
            for sample in results["samples"][task.config.task]:
                for metric in _metrics(task):
                    value = sample[metric]
                    for right in value if isinstance(value, list) else [value]:
                        yield _row(name, metric, task), bool(right)


def _metrics(task: ConfigurableTask) -> list[str]:
    return [metric["metric"] for metric in task.config.metric_list]


def _row(name: str, metric: str, task: ConfigurableTask) -> str:
    """Returns the name under which a metric is counted; the first one has the benchmark's own."""
    return name if metric == _metrics(task)[0] else f"{name} ({metric})"


def questions(data: Path) -> list[str]:
    """Returns the questions of all benchmarks that a folder has data of, for decontamination; see `Benchmarks`."""
    tasks = Benchmarks(data, (), 2, None, lambda line: None).tasks
    docs = (doc for group in tasks.values() for task in group for doc in task.test_docs())
    return [*dict.fromkeys(str(next(doc[name] for name in _QUESTIONS if name in doc)) for doc in docs)]


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval has no types
    """A model or a file for the harness: answers are greedy, and end where the chat template ends a turn.

    Args:
        answerer: the model.
        chat: tokenizer of the member.
        context: most tokens of a question with its answer.
    """

    def __init__(self, answerer: Answerer, chat: ChatTokenizer, context: int) -> None:
        super().__init__()
        self._answerer, self._chat, self._context = answerer, chat, context
        self.cut = 0
        """Questions that lost their beginnings."""

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Returns answers, up to the first of the strings in `until`."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            _, settings = request.args
            if settings.get("do_sample"):
                raise Unsupported("answers are greedy; the configuration asks for sampling")
            by_length[min(settings.get("max_gen_toks", 256), self._context // 2)].append(place)
        answers = [""] * len(requests)
        for most, places in by_length.items():
            questions = [self._ids(requests[place].args[0], most) for place in places]
            for place, ids in zip(places, self._answerer.respond(questions, most), strict=True):
                answers[place] = _until(self._chat.answer_of(ids), requests[place].args[1].get("until", ()))
        return answers

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Returns logarithm of the probability of each continuation, and whether it is the greedy one."""
        by_question: dict[str, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            by_question[request.args[0]].append(place)
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for question, places in by_question.items():
            continuations = [self._chat.encode(requests[place].args[1]) for place in places]
            ids = self._ids(question, max(map(len, continuations)))
            for place, score in zip(places, self._answerer.scores(ids, continuations), strict=True):
                scores[place] = score.log_probability, score.greedy
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Raises Unsupported: no benchmark here is scored by perplexity."""
        raise Unsupported("perplexity of whole texts is not scored here")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns messages in the member's chat template."""
        messages = [Message.model_validate(message) for message in chat_history]
        return self._chat.render(messages, ask=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """Name for caches of requests, which are not used."""
        return "member"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the member's chat template."""
        return self._chat.template

    def _ids(self, text: str, room: int) -> list[int]:
        begin = self._chat.begin
        ids = self._chat.encode(text if text.startswith(begin) else begin + text)
        most = self._context - room
        self.cut += len(ids) > most
        return ids[-most:]


def configurations(name: str, data: Path) -> list[dict[str, Any]]:
    """Returns the configurations of a benchmark's data sets, with local data.

    Raises:
        InvalidInput: the data or what the benchmark needs besides is missing.
    """
    if name == "ifeval":
        _check_ifeval()
    config = yaml.load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), _Loader)
    about = config["metadata"]
    if examples := about.get("examples"):
        path, subset, more = _source(data, examples["dataset_path"], examples["dataset_name"], [examples["split"]])
        config["fewshot_config"] = {"samples": datasets.load_dataset(path, subset, **more)[examples["split"]].to_list()}
    named = [config | {"task": f"{name} {dataset}", "dataset_name": dataset} for dataset in about.get("datasets", ())]
    configs = []
    for one in named or [config]:
        splits = [one[key] for key in ("test_split", "fewshot_split") if key in one]
        path, subset, more = _source(data, one["dataset_path"], one.get("dataset_name"), splits)
        local = {"dataset_path": path, "dataset_name": subset, "dataset_kwargs": more}
        configs += [one | local | group for group in _groups(one)]
    return configs


def _source(
    data: Path, dataset: str, name: str | None, splits: Sequence[str]
) -> tuple[str, str | None, dict[str, Any]]:
    """Returns path, name and further arguments for `datasets.load_dataset`.

    A folder with a README.md is loaded as it says there. In others the files of a split are called SPLIT.* or SPLIT-*,
    in the folder itself or in one called as the data set's name or `data`.
    """
    folder, more = data / dataset, {"cache_dir": str(paths.cache() / "datasets")}
    if not folder.is_dir():
        raise InvalidInput(f"there is no folder {dataset}", where=str(data))
    if (folder / "README.md").is_file():
        return str(folder), name, more
    for place in (folder / (name or "data"), folder / "data", folder):
        files = {split: sorted(place.glob(f"{split}[.-]*")) for split in splits}
        if all(files.values()):
            kinds = {_BUILDERS.get(file.suffix) for group in files.values() for file in group}
            if len(kinds) > 1 or None in kinds:
                raise InvalidInput(f"its files are not all of one kind of {', '.join(_BUILDERS)}", where=str(place))
            listed = {split: list(map(str, group)) for split, group in files.items()}
            return str(kinds.pop()), None, more | {"data_files": listed}
    where = f"{dataset}/{name}" if name else dataset
    raise InvalidInput(f"{where} has no README.md and no files of {', '.join(splits)}", where=str(data))


def _groups(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what differs between the groups of a data set: its name, and the rows and examples of the group alone."""
    about = config["metadata"]
    if "values" not in about:
        yield {}
    for value in about.get("values", ()):
        only = partial(_rows_of, column=about["column"], value=value)
        examples = config.get("fewshot_config", {}) | {"process_docs": only}
        yield {"task": f"{config['task']} {value}", "process_docs": only, "fewshot_config": examples}


def _rows_of(rows: Any, column: str, value: str) -> Any:
    return rows.filter(lambda row: row[column] == value)


def _check_ifeval() -> None:
    """Raises InvalidInput where the harness would fail or fetch data at the import of its judge."""
    import nltk

    missing = [module for module in ("immutabledict", "langdetect") if find_spec(module) is None]
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        missing.append("NLTK's data tokenizers/punkt_tab")
    if missing:
        raise InvalidInput(f"IFEval's judge needs {', '.join(missing)}: pip install 'lm-eval[ifeval]', nltk.download")


def _until(answer: str, ends: Sequence[str]) -> str:
    """Returns the part of an answer before the first of `ends`."""
    return answer[: min((place for end in ends if end and (place := answer.find(end)) >= 0), default=len(answer))]


class _Loader(yaml.SafeLoader):
    """YAML with `!function MODULE.NAME`: a function of the folder's answers.py or of an installed module."""


def _function(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    assert isinstance(node, yaml.ScalarNode)
    module, _, name = str(loader.construct_scalar(node)).rpartition(".")
    answers = f"{__package__}.lm_eval_tasks.answers"
    return getattr(importlib.import_module(answers if module == "answers" else module), name)


_Loader.add_constructor("!function", _function)
