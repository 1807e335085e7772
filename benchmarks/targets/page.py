"""The tables of docs/measured/targets.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.page import fill, table
from benchmarks.targets import figures, models
from benchmarks.targets.figures import KINDS, Choice
from benchmarks.targets.measuring import workload
from benchmarks.targets.models import COUNTS, WAYS
from benchmarks.targets.table import Table, Times

PAGE = Path("docs/measured/targets.md")
TIMES = {
    "latency": f"TTFT and {workload(1).gen} tokens",
    "ttft": "time to first token",
    "decode_p50": "time per decoded token",
}

_MODELLED = ("ttft", "decode_p50", "peak_rss")


def write(study: Table, page: Path) -> None:
    """Writes all parts of the page."""
    fill(page, "machine", _machine(study))
    fill(page, "losses", "\n".join(_losses(study)))
    fill(page, "kinds", "\n".join(_kinds(study)))
    fill(page, "correlations", "\n".join(_correlations(study)))
    fill(page, "models", "\n".join(_models(study)))
    write_report(page)


def write_report(page: Path) -> None:
    """Writes the parts that need no study: an earlier recording, and the published tables of a phone and a laptop."""
    fill(page, "recorded", "\n".join(_recorded()))
    fill(page, "report", _report())


def _machine(study: Table) -> str:
    foreign = [row["foreign_cpu"] for row in study.rows if row["foreign_cpu"] is not None]
    hours = sum(row["seconds"] for row in study.rows) / 3600
    by_figure = {name: study.times(name) for name in TIMES}
    times = by_figure["latency"]
    sizes = [layout.params.total / 1e6 for layout in times.layouts]
    lines = [
        f"{study.machine['cpu']}, {study.machine['cores']} cores. {len(sizes)} layouts of {min(sizes):.1f}M to "
        f"{max(sizes):.1f}M weights, each measured on every target, {times.counts.mean():.1f} times in the mean "
        f"({len(study.rows)} measurements, {hours:.2f} hours of device time). Other processes had "
        f"{np.median(foreign):.2f} cores in the median, {np.quantile(foreign, 0.9):.2f} or more in every tenth run.",
        "",
    ]
    rows = [
        [target.name, target.runtime, target.device, target.threads]
        + [f"{by_figure[name].noise[place]:.1%}" for name in TIMES]
        for place, target in enumerate(study.targets)
    ]
    head = ("target", "runtime", "device", "threads", *(f"noise of one run, {what}" for what in TIMES.values()))
    return "\n".join(lines) + "\n" + table(head, rows)


def _good(study: Table, times: Times) -> tuple[list[int], int, bool]:
    """Returns the trained layouts whose quality is the published one's or better, and the number of trained ones.

    Also whether every layout that is faster than these on some target was trained. Layouts count as in `times`.
    """
    base = study.scores[0]
    scores = [study.scores[place] for place in times.places]
    trained = [place for place, seeds in enumerate(scores) if len(seeds) == len(base) > 0]
    good = [place for place in trained if fmean(scores[place]) >= fmean(base)]
    if not good:
        return [], len(trained), False
    fastest = times.means[good].min(axis=0)
    faster = {place for place, means in enumerate(times.means) if (means < fastest).any()}
    return good, len(trained), faster <= set(trained)


def _losses(study: Table) -> Iterator[str]:
    for name, what in TIMES.items():
        times = _once(study, study.times(name))
        yield f"### {what[0].upper()}{what[1:]}: all layouts\n"
        yield from _loss_table(study, times, figures.choose(times, range(len(times.layouts))))
    times = _once(study, study.times("latency"))
    good, trained, complete = _good(study, times)
    if not good:
        yield "Quality was not trained: layouts are compared by time alone, at equal weights.\n"
        return
    yield "### As good as LFM2's pattern or better\n"
    yield (
        f"{len(good)} of {trained} trained layouts have the quality of LFM2's pattern or more, by proxies of "
        f"{len(study.scores[0])} seeds; "
        + (
            "every layout that is faster than the fastest of them on some target was trained.\n"
            if complete
            else "some layouts that are faster than these were not trained: the choice may be too narrow.\n"
        )
    )
    yield from _loss_table(study, times, figures.choose(times, good))


def _once(study: Table, times: Times) -> Times:
    """Returns the times without targets that repeat another one."""
    return times.of([place for place, target in enumerate(study.targets) if not target.repeats])


def _loss_table(study: Table, times: Times, choice: Choice) -> Iterator[str]:
    names = [target.name for target in study.targets if not target.repeats]
    rows = [
        [f"best for {name}", *(("0" if i == j else str(loss)) for j, loss in enumerate(choice.losses[i])), _worst(row)]
        for i, (name, row) in enumerate(zip(names, choice.losses, strict=True))
    ]
    for rule, losses in choice.compromise_losses.items():
        rows.append([f"compromise, `{rule}`", *map(str, losses), _worst(losses)])
    if choice.published:
        rows.append(["LFM2's pattern", *map(str, choice.published), _worst(choice.published)])
    rows.append(["its best seems faster by", *(f"{share:.1%}" for share in choice.flattery), ""])
    yield table(("layout", *(f"on {name}" for name in names), "worst"), rows)
    best: dict[int, list[str]] = {}
    for place, layout in enumerate(choice.best):
        best.setdefault(layout, []).append(names[place])
    for layout, of in best.items():
        yield f"- best for {', '.join(of)}: `{times.layouts[layout]}`"
    for rule, layout in choice.compromise.items():
        yield f"- compromise by `{rule}`: `{times.layouts[layout]}`"
    yield ""


def _worst(losses: Sequence[figures.Interval]) -> str:
    return f"{max(loss.value for loss in losses):.1%}"


def _kinds(study: Table) -> Iterator[str]:
    names = [target.name for target in study.targets]
    for name, what in list(TIMES.items())[1:]:
        costs = figures.kind_costs(study.times(name))
        yield f"### {what[0].upper()}{what[1:]}\n"
        rows = [
            [kind, *(_cost(costs, place, target) for target in range(len(names)))] for place, kind in enumerate(KINDS)
        ]
        rows.append(["error of the sums", *(f"{off:.1%}" for off in costs.off)])
        yield table(("a layer of", *names), rows)
        flips = costs.flips()
        if not flips:
            yield "No two kinds change their order for sure (in 97.5 % of draws on both sides)."
        for a, b, first, second in flips:
            yield f"- {KINDS[a]} costs more than {KINDS[b]} on {names[first]}, and less on {names[second]}"
        yield f"\nIf all kinds cost the same, about {costs.flips_by_chance():.1f} pairs would be listed.\n"


def _cost(costs: figures.KindCosts, kind: int, target: int) -> str:
    value, low, high = (part[kind, target] for part in (costs.costs, costs.low, costs.high))
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def _correlations(study: Table) -> Iterator[str]:
    names = [target.name for target in study.targets]
    for name, what in TIMES.items():
        matrix = figures.correlations(study.times(name))
        yield f"### {what[0].upper()}{what[1:]}\n"
        yield table(
            ("Spearman", *names), [[row, *(f"{value:.2f}" for value in matrix[i])] for i, row in enumerate(names)]
        )
    for place, target in enumerate(study.targets):
        if target.repeats:
            other = names.index(target.repeats)
            deviation, expected = figures.repeated(study.times("latency"), place, other)
            yield (
                f"{target.name} is the same build with as many threads as {target.repeats}: their means differ by "
                f"{deviation:.1%} (standard deviation of one), where noise between rounds alone makes {expected:.1%}.\n"
            )


def _models(study: Table) -> Iterator[str]:
    for name in _MODELLED:
        yield f"### {_heading(name)}\n"
        yield from _errors_table(models.of_table(study, name, workload(1)))


def _recorded() -> Iterator[str]:
    for name in _MODELLED:
        yield f"### {_heading(name)}\n"
        yield from _errors_table(models.of_recorded(name))


def _heading(name: str) -> str:
    return TIMES.get(name, "peak memory").capitalize()


def _errors_table(errors: Mapping[str, Mapping[int, Mapping[str, models.Errors]]]) -> Iterator[str]:
    counts = [count for count in COUNTS if any(count in row for row in errors.values())]
    pooled = [
        [
            "**all targets**",
            way,
            *(str(models.mean_errors([row[count][way] for row in errors.values()])) for count in counts),
        ]
        for way in WAYS
    ]
    rows = [
        [target, WAYS[0], *(str(by_count[count][WAYS[0]]) for count in counts)] for target, by_count in errors.items()
    ]
    yield table(("new target", "from", *(f"{count} measured" for count in counts)), [*pooled, *rows])


def _report() -> str:
    rows = []
    for column in models.report_errors():
        rows.append(
            [
                f"{column.metric.removesuffix('_tps')} {column.prompt // 1024}K",
                *map(str, column.moved.values()),
                str(column.factor),
                str(column.alone),
                f"{column.worst[0]}, {column.worst[1]:.0%}",
            ]
        )
        counts = list(column.moved)
    head = (
        "column",
        *(f"moved by {count}" for count in counts),
        "one factor",
        "S25 alone",
        "worst model, moved by all",
    )
    return table(head, rows)
