"""The small search at one size: candidates, their measurements, the choice, and the winner on another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nas.core.errors import CandidateFailed, InfrastructureFailed, NasError, Unsupported
from nas.core.family import Decision, Measured, Member
from nas.core.layout import Layout
from nas.core.space import SearchSpace
from nas.family.choose import Choice, Judged, choose, tried_of
from nas.family.figures import measured_of
from nas.family.measure import Measurements, Measurer
from nas.family.scale import Scaled, candidates
from nas.family.sizes import Size
from nas.family.sources import Origin
from nas.family.terms import HELD, PER_TOKEN, Terms
from nas.family.words import member_decisions
from nas.service.benches import known_runtime

Log = Callable[[str], None]


def size_candidates(origin: Origin, size: Size, vocab: int | None, number: int) -> list[Scaled]:
    """The candidates of a size that the runtimes carry: on their stock builds if any is.

    Raises:
        InvalidInput: no shape has the size's weights.
        Unsupported: no runtime carries one that has.
    """
    parent = origin.pattern.parent.layout
    made = candidates(parent, size, vocab or parent.vocab)
    verdicts = [_verdicts(origin.terms.space, each.layout) for each in made]
    stock = [each for each, found in zip(made, verdicts, strict=True) if found == {"stock"}]
    carried = [each for each, found in zip(made, verdicts, strict=True) if "no" not in found]
    if not carried:
        told = "; ".join(_refusals(origin.terms.space, made[0].layout))
        raise Unsupported(f"{size.name}: no runtime carries {made[0].layout}: {told}", where="--runtime")
    return (stock or carried)[:number]


@dataclass
class SizeSearch:
    """Decides members.

    Args:
        origin: pattern and terms.
        measurer: None: nothing is measured.
        log: told what is tried.
        refused: device that the search does not use -> why it could not be made ready.
    """

    origin: Origin
    measurer: Measurer | None
    log: Log
    refused: dict[str, str] = field(default_factory=dict)

    def member(self, size: Size, shapes: Sequence[Scaled]) -> Member:
        """The member of a size.

        Raises:
            CandidateFailed: no candidate could be measured.
            InfrastructureFailed: a device went away, or is too noisy.
        """
        terms, parent = self.origin.terms, self.origin.pattern.parent.layout
        judged = self._judged(size, shapes)
        choice = choose(judged, terms.limits() if self.measurer else terms.computed_limits())
        chosen = judged[choice.index].scaled
        measured, where = self._elsewhere(chosen.layout)
        params = chosen.layout.params
        return Member(
            size=size.name,
            layout=chosen.layout.format(),
            parameters=params.total,
            active=params.active,
            non_embedding=params.non_embedding,
            decisions=(
                *member_decisions(chosen, parent, size),
                *_support_decisions(terms.space, chosen.layout),
                _layout_decision(chosen.layout, parent, choice),
                *_quality_decisions(terms, chosen.layout, choice, measured=self.measurer is not None),
                *where,
            ),
            tried=tried_of(judged, choice, terms.space),
            measured=(*measured_of(judged[choice.index].taken, terms.space), *measured),
        )

    def _judged(self, size: Size, shapes: Sequence[Scaled]) -> list[Judged]:
        terms = self.origin.terms
        if self.measurer is None:
            return [Judged(each, terms.computed_axes(each.layout, shapes[0].layout)) for each in shapes]
        ran: list[tuple[Scaled, Measurements, str]] = []
        for number, each in enumerate(shapes, 1):
            self.log(f"{size.name}: measuring {number} of {len(shapes)}: {each.layout}")
            try:
                ran.append((each, self.measurer.measure(each.layout, terms.space.devices), ""))
            except CandidateFailed as error:
                self.log(f"{size.name}: it failed: {error}")
                ran.append((each, {}, str(error)))
        anchor = next(((each.layout, taken) for each, taken, _ in ran if taken), None)
        if anchor is None:
            return [Judged(each, {}, {}, failed) for each, _, failed in ran]
        return [
            Judged(each, terms.axes(each.layout, taken, *anchor) if taken else {}, taken, failed)
            for each, taken, failed in ran
        ]

    def _elsewhere(self, layout: Layout) -> tuple[tuple[Measured, ...], list[Decision]]:
        """The winner on a device that no search used, where there is one."""
        measurer, terms = self.measurer, self.origin.terms
        if measurer is None:
            return (), []
        used = {*self.origin.searched, *(measurer.id(device) for device in terms.space.devices)}
        device = measurer.held_out(used)
        if device is None:
            told = "no device besides those that were searched on is registered and there"
            return (), [Decision(what="another device", value="none", reason=told)]
        self.log(f"measuring the winner on {device}, which the search did not use")
        try:
            self._prepare_once(measurer, device)
            taken = measurer.measure(layout, [device])
        except NasError as error:  # the choice stands without it
            told = f"not measured on {device}: {error}"
            self.log(told)
            return (), [Decision(what="another device", value="none", reason=told)]
        found = measured_of(taken, terms.space, searched=False)
        return found, [Decision(what="another device", value=device, reason="the search did not use it")]

    def _prepare_once(self, measurer: Measurer, device: str) -> None:
        """A device that could not be made ready is not tried again for every size: that takes minutes."""
        if device in self.refused:
            raise InfrastructureFailed(self.refused[device])
        try:
            measurer.prepare(device)
        except NasError as error:
            self.refused[device] = str(error)
            raise


def _verdicts(space: SearchSpace, layout: Layout) -> set[str]:
    """stock, patched or no, over the space's runtimes; patched counts where the space takes any build."""
    found: set[str] = set()
    for spec in space.runtimes:
        verdict = known_runtime(spec).supports(layout).verdict
        found.add("no" if verdict == "patched" and spec.build == "stock" else verdict)
    return found


def _refusals(space: SearchSpace, layout: Layout) -> list[str]:
    return [
        f"{spec.name}: {reason}"
        for spec in space.runtimes
        for reason in known_runtime(spec).supports(layout).reasons
    ]  # fmt: skip


def _support_decisions(space: SearchSpace, layout: Layout) -> Iterator[Decision]:
    for spec in space.runtimes:
        support = known_runtime(spec).supports(layout)
        reason = "its stock build carries it" if support.verdict == "stock" else "; ".join(support.reasons)
        yield Decision(what=spec.name, value=f"{support.arch} on the {support.verdict} build", reason=reason)


def _layout_decision(layout: Layout, parent: Layout, choice: Choice) -> Decision:
    own = "the parent itself, which is of this size: the search that found it has tried other shapes"
    return Decision(what="layout", value=layout.format(), reason=own if layout == parent else choice.reason())


def _quality_decisions(terms: Terms, layout: Layout, choice: Choice, *, measured: bool) -> Iterator[Decision]:
    if trained := terms.trained(layout):
        yield Decision(
            what="quality",
            value=f"{trained[1]:.4g}",
            reason=f"the study trained this layout's proxy, {trained[0][:12]}",
        )
    left_out = [name for name in terms.limits() if name not in choice.names] if measured else []
    if left_out:
        yield Decision(what="left out", value=", ".join(left_out), reason="the devices could not tell these objectives")
    if not measured:
        yield Decision(
            what="measured",
            value="nothing",
            reason=f"as asked for; {PER_TOKEN} and {HELD} at {terms.context} tokens, computed, stand in",
        )
