"""Truth tests: does the proxy protocol order layouts as the literature does?

    python -m benchmarks.quality.truth run [--seeds 4] [--minutes M]      trains what is missing
    python -m benchmarks.quality.truth report [--page docs/measured/truth.md]

With --only, --task-lr and --task-steps both look at some orderings under another protocol. With N times the steps, the
part of the page is called verdicts-N. With --recall claims of recall are judged by the task `recall` in place of MQAR,
in verdicts-recall; but for those about a short convolution, which that task leaves nothing to do.

Each ordering is two layouts, the evaluation groups in which one is known to be better, and the source that says so. All
layouts are narrowed and trained by `PROTOCOL`, two seeds in one pass. The verdict is *right* or *wrong* where the mean
paired difference is two standard errors from 0, else *undecided*. One training is one line of `RECORDED`, under its
result key: the script may be stopped at any moment, and a changed protocol trains again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any, Literal

from benchmarks.lines import read_lines
from benchmarks.page import markdown, write_part
from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, TaskStage
from nas.core.task import make_task
from nas.model.text.corpus import CorpusRef, refer
from nas.search.proxy.job import TrainJob, is_part
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.tasks.mqar import AssociativeRecall

RECORDED = Path(__file__).parents[1] / "recorded" / "truth.jsonl"

PROTOCOL = QualityConfig(
    rungs=(
        Rung(
            name="truth",
            lm_steps=300,
            tasks={
                "recall": TaskStage(steps=150, batch=16),
                "mqar": TaskStage(steps=300, settings={"pairs": 8, "keys": 16, "values": 16, "length": 64}),
                "selcopy": TaskStage(steps=240),
                "induction": TaskStage(steps=240),
            },
        ),
    ),
)
"""The rung that the orderings are judged at: the default protocol with half the text of its top rung, and MQAR.

The defaults train no MQAR. Its size was chosen before the orderings were trained: after 300 steps attention has learned
something of it and convolutions nothing, for a quarter of the time of 16 pairs in 256 tokens.
"""

_TOGETHER = 2
"""Seeds of one pass."""
_ERRORS = 2
"""Standard errors that a difference has to be from 0."""
_DECIDED = ("right", "wrong")
Equal = Literal["total", "active", None]


@dataclass(frozen=True)
class Ordering:
    """A claim of the literature about two layouts.

    Args:
        name: short, unique.
        claim: in words.
        source: paper, and where in it.
        better: layout text.
        worse: layout text.
        groups: names of evaluation groups, or their beginning up to a slash ('lm').
        equal: weights outside the embedding that the two have in common.
    """

    name: str
    claim: str
    source: str
    better: str
    worse: str
    groups: tuple[str, ...]
    equal: Equal = None


def _d512(ffn: str, body: str) -> str:
    return f"d512 v8192 ffn={ffn} [{body}]"


_LM = ("lm",)
_RECALL = ("task/mqar",)

ORDERINGS = (
    Ordering(
        "attention-over-convolution-recall",
        "attention recalls more than gated convolution",
        "Arora et al. 2023, Zoology (arXiv:2312.04927), section 4",
        _d512("swiglu:1536", "A8/2*4"),
        _d512("swiglu:1536", "C3*4"),
        _RECALL,
    ),
    Ordering(
        "convolution-recall",
        "gated short convolutions alone recall far less than with some attention",
        "Arora et al. 2023, Zoology (arXiv:2312.04927), MQAR and hybrids",
        _d512("swiglu:1536", "C3 A8/2 C3 A8/2"),
        _d512("swiglu:1536", "C3*4"),
        _RECALL,
    ),
    Ordering(
        "state-space-recall",
        "a state-space stack recalls more once two of its layers are attention",
        "Waleffe et al. 2024, An Empirical Study of Mamba-based Language Models (arXiv:2406.07887), recall tasks",
        _d512("swiglu:1536", "M A8/2 M A8/2"),
        _d512("swiglu:1536", "M*4"),
        _RECALL,
    ),
    Ordering(
        "state-size-recall",
        "a larger state recalls more",
        "Dao and Gu 2024, Transformers are SSMs (arXiv:2405.21060), MQAR over state sizes",
        _d512("swiglu:1536", "M512*4"),
        _d512("swiglu:1536", "M*4"),
        _RECALL,
    ),
    Ordering(
        "delta-rule-recall",
        "gated DeltaNet recalls more than Mamba-2, each of its usual size",
        "Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), retrieval in context",
        _d512("swiglu:1536", "D8*4"),
        _d512("swiglu:1536", "M*4"),
        _RECALL,
    ),
    Ordering(
        "delta-rule-recall-equal-state",
        "gated DeltaNet recalls more than Mamba-2 of as many state numbers",
        "Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), retrieval in context",
        _d512("swiglu:1536", "D2*4"),
        _d512("swiglu:1536", "M*4"),
        _RECALL,
    ),
    Ordering(
        "delta-rule-over-gla-recall",
        "the delta rule recalls more than gated linear attention",
        "Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule (arXiv:2406.06484), MQAR",
        _d512("swiglu:1536", "D8*4"),
        _d512("swiglu:1536", "G8*4"),
        _RECALL,
    ),
    Ordering(
        "mamba2-over-gla-recall",
        "Mamba-2 recalls more than gated linear attention of as many state numbers",
        "Dao and Gu 2024 (arXiv:2405.21060), short convolution and scalar decays; a weak source, as Yang et al. 2023"
        " (arXiv 2312.06635) report GLA above the first Mamba",
        _d512("swiglu:1536", "M*4"),
        _d512("swiglu:1536", "G2*4"),
        _RECALL,
    ),
    Ordering(
        "window-recall",
        "attention to everything recalls more than a window shorter than the distance",
        "Arora et al. 2024, Based (arXiv:2402.18668), recall over window sizes",
        _d512("swiglu:1536", "A8/2*4"),
        _d512("swiglu:1536", "W8/2@512*4"),
        _RECALL,
    ),
    Ordering(
        "window-and-full-recall",
        "windows with layers of full attention recall more than windows alone",
        "Gemma Team 2025, Gemma 3 (arXiv:2503.19786), ratio of local to global layers",
        _d512("swiglu:1536", "W8/2@512 A8/2 W8/2@512 A8/2"),
        _d512("swiglu:1536", "W8/2@512*4"),
        _RECALL,
    ),
    Ordering(
        "canon-recall",
        "attention with a short convolution in front recalls more than without",
        "Allen-Zhu 2025, Physics of Language Models: Part 4.1, Canon layers",
        _d512("swiglu:1536", "A8/2(canon=4)*4"),
        _d512("swiglu:1536", "A8/2*4"),
        _RECALL,
    ),
    Ordering(
        "selective-copying",
        "selective state spaces copy selectively, fixed convolutions do not",
        "Gu and Dao 2023, Mamba (arXiv:2312.00752), selective copying",
        _d512("swiglu:1536", "M*4"),
        _d512("swiglu:1536", "C4*4"),
        ("task/selcopy",),
    ),
    Ordering(
        "induction",
        "attention forms induction heads; convolutions of a few tokens cannot",
        "Olsson et al. 2022, In-context Learning and Induction Heads (arXiv:2209.11895)",
        _d512("swiglu:1536", "A8/2*4"),
        _d512("swiglu:1536", "C3*4"),
        ("task/induction",),
    ),
    Ordering(
        "canon-text",
        "attention with a short convolution in front models text better than without",
        "Allen-Zhu 2025, Physics of Language Models: Part 4.1, Canon layers",
        _d512("swiglu:1536", "A8/2(canon=4)*4"),
        _d512("swiglu:1536", "A8/2*4"),
        _LM,
    ),
    Ordering(
        "window-sinks",
        "windows with a learned sink model text no worse than without",
        "Xiao et al. 2023, StreamingLLM (arXiv:2309.17453), pre-training with a sink",
        _d512("swiglu:1536", "W8/2@512(sink=1)*4"),
        _d512("swiglu:1536", "W8/2@512*4"),
        _LM,
    ),
    Ordering(
        "fewer-kv-heads",
        "as many key-value heads as query heads model text better than one",
        "Ainslie et al. 2023, GQA (arXiv:2305.13245), figure 3; Shazeer 2019 (arXiv:1911.02150)",
        _d512("swiglu:1536", "A8/8*4"),
        _d512("swiglu:1536", "A8/1*4"),
        _LM,
    ),
    Ordering(
        "hybrid-text",
        "a hybrid of convolution and attention models text better than attention alone at equal weights",
        "Liquid AI 2025, LFM2 Technical Report (arXiv:2511.23404), section 2",
        _d512("swiglu:1536", "C3 A8/4 C3 A8/4"),
        _d512("swiglu:1624", "A8/4*4"),
        _LM,
        "total",
    ),
    Ordering(
        "state-space-hybrid-text",
        "a hybrid of Mamba-2 and attention models text better than attention alone at equal weights",
        "Waleffe et al. 2024 (arXiv:2406.07887), Mamba-2-Hybrid against the transformer",
        _d512("swiglu:1192", "M A8/2 M A8/2"),
        _d512("swiglu:1536", "A8/2*4"),
        _LM,
        "total",
    ),
    Ordering(
        "deep-and-thin",
        "at small size, more and thinner layers model text better at equal weights",
        "Liu et al. 2024, MobileLLM (arXiv:2402.14905), depth against width",
        _d512("swiglu:488", "C3 A8/2 C3 A8/2 C3 A8/2 C3 A8/2"),
        _d512("swiglu:1536", "C3 A8/2 C3 A8/2"),
        _LM,
        "total",
    ),
    Ordering(
        "experts-at-equal-active",
        "a mixture of experts models text better than a dense layer of as many active weights",
        "Fedus et al. 2021, Switch Transformers (arXiv:2101.03961); Muennighoff et al. 2024, OLMoE (arXiv:2409.02060)",
        _d512("moe:8x2:512", "C3 A8/2 C3 A8/2"),
        _d512("swiglu:1024", "C3 A8/2 C3 A8/2"),
        _LM,
        "active",
    ),
    Ordering(
        "dense-at-equal-total",
        "a dense layer models text better than a mixture of experts of as many weights in all",
        "Clark et al. 2022, Unified Scaling Laws for Routed Language Models (arXiv:2202.01169)",
        _d512("swiglu:4096", "C3 A8/2 C3 A8/2"),
        _d512("moe:8x2:512", "C3 A8/2 C3 A8/2"),
        _LM,
        "total",
    ),
    Ordering(
        "more-weights",
        "more feed-forward weights model text better",
        "Kaplan et al. 2020, Scaling Laws for Neural Language Models (arXiv:2001.08361)",
        _d512("swiglu:4096", "C3 A8/2 C3 A8/2"),
        _d512("swiglu:1024", "C3 A8/2 C3 A8/2"),
        _LM,
    ),
    Ordering(
        "more-layers",
        "more layers of the same kind model text better",
        "Kaplan et al. 2020 (arXiv:2001.08361)",
        _d512("swiglu:1536", "C3 A8/2 C3 A8/2"),
        _d512("swiglu:1536", "C3 A8/2"),
        _LM,
    ),
    Ordering(
        "shared-layers",
        "running each layer twice models text better than once, at equal weights",
        "Liu et al. 2024, MobileLLM (arXiv:2402.14905), MobileLLM-LS",
        _d512("swiglu:1536", "C3 ^0 A8/2 ^2"),
        _d512("swiglu:1536", "C3 A8/2"),
        _LM,
        "total",
    ),
    Ordering(
        "shared-caches",
        "keys and values of one's own model text better than those of the layer below",
        "Brandon et al. 2024, Cross-Layer Attention (arXiv:2405.12981)",
        _d512("swiglu:1536", "A8/2*4"),
        _d512("swiglu:1536", "A8/2 A8/2(kv=0) A8/2 A8/2(kv=2)"),
        _LM,
    ),
    Ordering(
        "hybrid-ratio-recall",
        "three linear layers to one of attention recall more than seven to one",
        "Wang et al. 2025, A Systematic Analysis of Hybrid Linear Attention (arXiv:2507.06457), recall over ratios",
        _d512("swiglu:1536", "M*3 A8/2 M*3 A8/2"),
        _d512("swiglu:1536", "M*7 A8/2"),
        _RECALL,
    ),
)
"""Named beforehand: an ordering is not taken out because the protocol fails it."""

_ABOUT_CONVOLUTIONS = ("canon-recall", "mamba2-over-gla-recall")
"""Claims that a short convolution in front of a mixer is what recalls more."""


@dataclass(frozen=True)
class Suite:
    """What is trained and judged.

    Args:
        corpus: of the language models.
        seeds: number of seeds, counted from 0.
        protocol: its last rung is the one that is trained.
        orderings: those that are judged.
    """

    corpus: CorpusRef
    seeds: int
    protocol: QualityConfig = PROTOCOL
    orderings: tuple[Ordering, ...] = ORDERINGS

    def jobs_of(self, layout: str) -> list[TrainJob]:
        """Returns the trainings of a layout, all units with each seed."""
        config = self.protocol.with_seeds(tuple(range(self.seeds)))
        return rung_jobs(config, len(config.rungs) - 1, Layout.parse(layout), self.corpus)

    def jobs_for(self, ordering: Ordering) -> Iterator[tuple[str, TrainJob]]:
        """Yields layout and training for everything that an ordering is judged by."""
        for layout in (ordering.better, ordering.worse):
            for job in self.jobs_of(layout):
                if any(_counts(group, job) for group in ordering.groups):
                    yield layout, job

    def all_jobs(self) -> dict[str, tuple[str, TrainJob]]:
        """Returns result key -> layout and training, of all orderings."""
        return {job.key: (layout, job) for ordering in self.orderings for layout, job in self.jobs_for(ordering)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running, reporting = commands.add_parser("run"), commands.add_parser("report")
    running.add_argument("--minutes", type=float, default=600.0, help="begin no training after this time")
    reporting.add_argument("--page", type=Path)
    for command in (running, reporting):
        command.add_argument("--seeds", type=int, default=4)
        command.add_argument("--only", nargs="*", metavar="NAME", choices=[ordering.name for ordering in ORDERINGS])
        command.add_argument("--task-lr", type=float, default=PROTOCOL.task_lr, help="another learning rate of tasks")
        command.add_argument("--task-steps", type=int, default=1, metavar="N", help="N times the steps of tasks")
        command.add_argument("--recall", action="store_true", help="judge recall by the task of that name")
    options = parser.parse_args()
    suite = Suite(
        refer(PROTOCOL.corpus, Path.cwd()),
        options.seeds,
        variant(options.task_lr, options.task_steps),
        tuple(
            judged_by_recall(ordering) if options.recall else ordering
            for ordering in ORDERINGS
            if options.only is None or ordering.name in options.only
        ),
    )
    if options.command == "run":
        run(suite, options.minutes)
        return
    suffix = f"-{options.task_steps}" if options.task_steps > 1 else "-recall" if options.recall else ""
    write_part(options.page, "verdicts" + suffix, verdicts(suite))


def judged_by_recall(ordering: Ordering) -> Ordering:
    """Returns `ordering` with the task `recall` in place of MQAR, unless it is about short convolutions."""
    if ordering.groups != _RECALL or ordering.name in _ABOUT_CONVOLUTIONS:
        return ordering
    return replace(ordering, groups=("task/recall",))


def variant(task_lr: float, times: int) -> QualityConfig:
    """Returns `PROTOCOL` with another learning rate of tasks, and `times` as many steps of them."""
    (rung,) = PROTOCOL.rungs
    tasks = {name: task.model_copy(update={"steps": times * task.steps}) for name, task in rung.tasks.items()}
    return PROTOCOL.model_copy(update={"task_lr": task_lr, "rungs": (rung.model_copy(update={"tasks": tasks}),)})


def run(suite: Suite, minutes: float) -> None:
    """Trains what has no line in `RECORDED` yet, first seeds first.

    So every ordering soon has a difference with an error. Layouts that several orderings share are trained once.
    """
    todo = sorted(suite.all_jobs().items(), key=lambda item: item[1][1].seed // _TOGETHER)
    train_missing(dict(todo), RECORDED, minutes)


def train_missing(todo: Mapping[str, tuple[str, TrainJob]], path: Path, minutes: float) -> None:
    """Trains, in the order of `todo`, what has no line in `path` yet, two seeds in one pass; begins none after a time.

    Raises:
        CandidateFailed: a training diverged.
    """
    from nas.search.proxy.train import train_seeds

    ends = time.monotonic() + 60 * minutes
    trained = recorded(path)
    missing: dict[tuple[int, str], list[tuple[str, TrainJob]]] = {}
    for key, (layout, job) in todo.items():
        if key not in trained:
            missing.setdefault((job.seed // _TOGETHER, job.seeds_key), []).append((layout, job))
    print(f"{len(todo)} trainings, {sum(map(len, missing.values()))} missing", flush=True)
    for together in missing.values():
        if time.monotonic() > ends:
            return
        jobs = [job for _, job in together]
        with tempfile.TemporaryDirectory(prefix="hilnas-truth-") as folder:
            results = train_seeds(
                jobs, yield_hook=lambda: None, checkpoint_dir=Path(folder), device="cpu", log=lambda _: None
            )
        for (layout, job), result in zip(together, results, strict=True):
            if isinstance(result, CandidateFailed):
                raise result
            row = {
                "key": job.key,
                "layout": layout,
                "run": job.run.name,
                "seed": job.seed,
                "steps": job.steps,
                "lr": job.lr,
                "scores": result.scores,
                "cpu_seconds": round(result.cpu_seconds, 2),
            }
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{job.run.name} seed {job.seed} {result.cpu_seconds:.0f} s {layout}", flush=True)


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """Returns result key -> recorded line."""
    return {row["key"]: row for row in read_lines(path)}


@dataclass(frozen=True)
class Verdict:
    """What the protocol says of an ordering.

    Args:
        differences: per seed, mean over groups of (better - worse), in units of the group's score.
    """

    differences: Sequence[float]

    @property
    def mean(self) -> float:
        """Mean paired difference."""
        return fmean(self.differences)

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite with fewer than two seeds."""
        count = len(self.differences)
        return stdev(self.differences) / math.sqrt(count) if count > 1 else math.inf

    @property
    def word(self) -> str:
        """'right', 'wrong' or 'undecided'."""
        if abs(self.mean) <= _ERRORS * self.error:  # both are 0 of layouts whose proxies are the same
            return "undecided"
        return "right" if self.mean > 0 else "wrong"


def judge(ordering: Ordering, suite: Suite, trained: Mapping[str, Mapping[str, Any]]) -> Verdict | None:
    """Returns the verdict from the seeds that have all trainings; None where there are none."""
    scores: dict[int, dict[tuple[str, str], float]] = {}
    expected: dict[int, int] = {}
    for layout, job in suite.jobs_for(ordering):
        expected[job.seed] = expected.get(job.seed, 0) + 1
        if row := trained.get(job.key):
            wholes = [group for group in row["scores"] if not is_part(group, row["scores"])]
            values = [row["scores"][group] for group in wholes if _matches(group, ordering.groups)]
            scores.setdefault(job.seed, {})[layout, job.run.name] = fmean(values)
    whole = [of_seed for seed, of_seed in sorted(scores.items()) if len(of_seed) == expected[seed]]
    differences = [
        fmean(value if layout == ordering.better else -value for (layout, _), value in of_seed.items()) * 2
        for of_seed in whole
    ]
    return Verdict(differences) if differences else None


def verdicts(suite: Suite) -> str:
    """Returns a count of verdicts and the table of those that were run, in Markdown."""
    rows_by_key = recorded(RECORDED)
    by_name = {ordering.name: judge(ordering, suite, rows_by_key) for ordering in suite.orderings}
    judged = [(ordering, verdict) for ordering in suite.orderings if (verdict := by_name[ordering.name])]
    rows, words, firm = [], [], 0
    for ordering, verdict in judged:
        words.append(verdict.word)
        deviation = pooled_deviation(
            [by_name[other.name] for other in suite.orderings if other.groups == ordering.groups]
        )
        if deviation is not None and verdict.word in _DECIDED:
            firm += abs(verdict.mean) >= _ERRORS * deviation / math.sqrt(len(verdict.differences))
        cited = ", ".join(re.findall(r"arXiv:[\d.]+\d", ordering.source))
        rows.append(
            {
                "claim": f"{ordering.claim} ({cited or ordering.source})",
                "better": f"`{_short(ordering.better)}`",
                "worse": f"`{_short(ordering.worse)}`",
                "difference": f"{verdict.mean:+.3f} ± {verdict.error:.3f}",
                "verdict": verdict.word,
            }
        )
    trained = [rows_by_key[key] for key in suite.all_jobs() if key in rows_by_key]
    cost = sum(row["cpu_seconds"] for row in trained)
    return (
        f"Right: {words.count('right')} of {sum(map(words.count, _DECIDED))} decided; undecided:"
        f" {words.count('undecided')}; not run: {len(suite.orderings) - len(judged)}. Of the decided, {firm} differ by"
        f" two pooled errors, too. {len(trained)} trainings, {suite.seeds} seeds, {cost:.0f} CPU seconds."
        f"{_mqar_scale(suite)}\n\n{markdown(rows)}"
    )


def _mqar_scale(suite: Suite) -> str:
    """Returns what scores of MQAR mean, where a claim is judged by it."""
    if all(ordering.groups != _RECALL for ordering in suite.orderings):
        return ""
    mqar = make_task("mqar", suite.protocol.rungs[-1].tasks["mqar"].settings)
    assert isinstance(mqar, AssociativeRecall)
    return (
        f" MQAR: {score_of_shown_values(mqar.pairs, mqar.values):.2f} nats is to know which values were shown,"
        f" {mqar.chance_nats:.2f} to recall all of them."
    )


def score_of_shown_values(pairs: int, values: int) -> float:
    """Returns the MQAR score, in nats, of knowing the values in the context but not which key each belongs to.

    The best such guess is a value's share among the pairs: the score is log(values) less the expected entropy of the
    shares of `pairs` uniform draws.
    """
    entropy_sum: float = values * sum(
        math.comb(pairs, count) * (values - 1) ** (pairs - count) / values**pairs * count / pairs * math.log(count)
        for count in range(1, pairs + 1)
    )
    return math.log(values) - math.log(pairs) + entropy_sum


def pooled_deviation(verdicts_pooled: Sequence[Verdict | None]) -> float | None:
    """Returns the standard deviation of paired differences of several orderings, each about its mean."""
    several = [
        verdict.differences for verdict in verdicts_pooled if verdict is not None and len(verdict.differences) > 1
    ]
    freedom = sum(len(differences) - 1 for differences in several)
    return (
        math.sqrt(sum(variance(differences) * (len(differences) - 1) for differences in several) / freedom)
        if freedom
        else None
    )


def _short(layout: str) -> str:
    """Returns the text of a layout without the width and vocabulary that all have in common."""
    return layout.partition("ffn=")[2]


def _counts(group: str, job: TrainJob) -> bool:
    return group == "lm" if job.run.kind == "lm" else group == f"task/{job.run.name}"


def _matches(group: str, wanted_groups: Sequence[str]) -> bool:
    return any(group == prefix or group.startswith(f"{prefix}/") for prefix in wanted_groups)


if __name__ == "__main__":
    main()
