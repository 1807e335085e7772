"""A family as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nas.cli.output import print_fields, print_table
from nas.core.family import Decision, Figure, Measured, MemberFiles
from nas.core.units import show_count
from nas.service.families import FamilyView

_UNITS = {"prefill_tps": "tokens/s", "decode_tps": "tokens/s", "ttft_ms": "ms", "peak_rss_mb": "MB"}
_NAMES = {"prefill_tps": "prefill", "decode_tps": "decode", "ttft_ms": "TTFT", "peak_rss_mb": "peak memory"}


def family_fields(view: FamilyView) -> list[tuple[str, object]]:
    """What the family is."""
    family = view.family
    sources = [
        ("given" if each.trial is None else f"trial {each.trial}") + f": {each.layout}" for each in family.sources
    ]
    return [
        ("family", family.name),
        ("study", family.study or "none: from given layouts"),
        ("made", family.made),
        ("pattern", family.pattern),
        *(("winner", each) for each in sources),
        *((f"  {name}", value) for name, value in family.provenance.items()),
        ("folder", view.folder),
    ]


def print_members(view: FamilyView) -> None:
    """The members, and what was measured of them."""
    print_table(
        ("size", "weights", "active", "files", "layout"),
        [
            (each.member.size, show_count(each.member.parameters), show_count(each.member.active), _files(each.files),
             each.member.layout)
            for each in view.members
        ],
        title="members",
    )  # fmt: skip
    rows = [
        (each.member.size, _device(taken), _runtime(taken), _NAMES[figure.metric], figure.prompt, _noted(figure, taken))
        for each in view.members
        for taken in each.member.measured
        for figure in taken.figures
    ]
    if rows:
        print_table(("size", "device", "runtime", "figure", "tokens", "value"), rows, title="measured")


def print_decisions(view: FamilyView) -> None:
    """Why everything is as it is."""
    rows = [*_decisions("family", view.family.decisions)]
    for each in view.members:
        rows += _decisions(each.member.size, each.member.decisions)
    print_table(("of", "what", "decided", "because"), rows, title="decisions")
    tried = [
        (each.member.size, "*" if one.chosen else "", show_count(one.parameters), one.verdict, one.layout)
        for each in view.members
        for one in each.member.tried
    ]
    print_table(("size", "", "weights", "verdict", "layout"), tried, title="candidates")


def print_training(view: FamilyView) -> None:
    """The members that were trained."""
    for each in view.members:
        if (training := each.training) is not None:
            scores = ", ".join(f"{name} {value:.3f}" for name, value in training.held_out.items())
            last = f", last loss {training.curve[-1][1]:.3f} nats" if training.curve else ""
            print_fields(
                [
                    (
                        f"{each.member.size} trained",
                        f"{show_count(training.tokens)} tokens, {training.steps} steps{last}",
                    ),
                    ("  from", training.start),
                    ("  held out", f"{scores} bits per byte" if scores else None),
                ]
            )


def print_comparisons(view: FamilyView) -> None:
    """The comparisons with reference models."""
    for comparison in view.comparisons:
        rows = [
            (model.name, "member" if model.member else "reference", show_count(model.parameters), model.architecture,
             _NAMES[figure.metric], figure.prompt, figure_text(figure))
            for model in comparison.models for figure in model.measured.figures
        ]  # fmt: skip
        columns = ("model", "", "weights", "architecture", "figure", "tokens", "value")
        print_table(columns, rows, title=f"on {comparison.device}")


def figure_text(figure: Figure) -> str:
    """A figure with its unit and interval, or why there is none."""
    if figure.value is None:
        return f"not known: {figure.reason or 'not read'}"
    interval = f" ({figure.ci95[0]:.4g} to {figure.ci95[1]:.4g})" if figure.ci95 else ""
    return f"{figure.value:.4g} {_UNITS[figure.metric]}{interval}"


def _device(taken: Measured) -> str:
    return taken.device + ("" if taken.searched else " (not searched)")


def _noted(figure: Figure, taken: Measured) -> str:
    return figure_text(figure) + (" (noisy)" if taken.noisy else "")


def _runtime(taken: Measured) -> str:
    return f"{taken.runtime} {taken.quantisation}, {taken.threads} thread{'s' * (taken.threads != 1)}"


def _files(files: MemberFiles | None) -> str:
    if files is None:
        return "none"
    kinds = dict.fromkeys(f"{each.kind} {each.quantisation}".strip() for each in files.files)
    return ", ".join(kinds)


def _decisions(of: str, decisions: Iterable[Decision]) -> Iterator[tuple[str, str, str, str]]:
    for each in decisions:
        yield of, each.what, each.value, each.reason
