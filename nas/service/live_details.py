"""What is read of the few trials of a live study that are told one by one: layouts, and intervals of their figures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from nas.core.errors import UnknownName
from nas.core.layout import Layout
from nas.proxy.ladder import proxy_of
from nas.service.live_table import Constants, LiveTable, by_place, figure_at
from nas.store import columns
from nas.store.columns import MeasuredRow
from nas.store.store import Store

Interval = tuple[float | None, float | None]

_TRIALS_PER_READ = 500
_MOST_KEPT = 2000


class LiveDetails:
    """Details of one study's trials; where they are many, those that were not asked for at last are forgotten.

    Args:
        store: where the study is.
        study: its id.
        constants: say what its figures are.
    """

    def __init__(self, store: Store, study: int, constants: Constants) -> None:
        self._store, self._study, self._constants = store, study, constants
        self._layouts: dict[int, Layout] = {}
        self._texts: dict[int, str] = {}
        self._proxies: dict[int, str] = {}
        self._intervals: dict[int, tuple[int, list[Interval]]] = {}

    def layouts(self, trials: Iterable[int]) -> Mapping[int, Layout]:
        """Trial -> layout; a layout never changes.

        Raises:
            UnknownName: the study was deleted meanwhile.
        """
        wanted = sorted(set(trials))
        missing = [trial for trial in wanted if trial not in self._layouts]
        rows = [row for some in _in_pieces(missing) for row in columns.layouts(self._store, self._study, some)]
        if len(rows) < len(missing):
            raise UnknownName("study with the id", str(self._study), ())
        self._layouts |= {row.number: Layout.from_json(row.layout) for row in rows}
        if len(self._layouts) > _MOST_KEPT:
            self._layouts = {trial: self._layouts[trial] for trial in wanted}
            self._proxies = {trial: proxy for trial, proxy in self._proxies.items() if trial in self._layouts}
            self._texts = {trial: text for trial, text in self._texts.items() if trial in self._layouts}
        return self._layouts

    def texts(self, trials: Collection[int]) -> Mapping[int, str]:
        """Trial -> its layout's one-line string."""
        layouts = self.layouts(trials)
        self._texts |= {trial: layouts[trial].format() for trial in trials if trial not in self._texts}
        return self._texts

    def proxies(self, trials: Collection[int]) -> Mapping[int, str]:
        """Trial -> id of what is trained for it: trials with one proxy share the error of its quality."""
        quality = self._constants.space.quality
        layouts = self.layouts(trials)
        self._proxies |= {trial: proxy_of(layouts[trial], quality).id for trial in trials if trial not in self._proxies}
        return self._proxies

    def intervals(self, trials: Iterable[int], table: LiveTable) -> Mapping[int, Sequence[Interval]]:
        """Trial -> the 95 % intervals of the figures beside the objectives, as the table's `changed` has it."""
        changed = {trial: int(table.rows["changed"][trial]) for trial in sorted(set(trials))}
        missing = [trial for trial, event in changed.items() if self._intervals.get(trial, (-1,))[0] != event]
        for some in _in_pieces(missing):
            rows: dict[int, list[MeasuredRow]] = {trial: [] for trial in some}
            for row in columns.measured(self._store, self._study, some):
                rows[row.trial].append(row)
            self._intervals |= {trial: (changed[trial], self._of(rows[trial])) for trial in some}
        if len(self._intervals) > _MOST_KEPT:
            self._intervals = {trial: self._intervals[trial] for trial in changed}
        return {trial: self._intervals[trial][1] for trial in changed}

    def _of(self, rows: Sequence[MeasuredRow]) -> list[Interval]:
        kept = by_place(rows, self._constants, {})
        taken = [figure_at(kept, each) for each in self._constants.further]
        return [(None, None) if each is None else (each["low"], each["high"]) for each in taken]


def _in_pieces(trials: Sequence[int]) -> Iterable[Sequence[int]]:
    return [trials[start : start + _TRIALS_PER_READ] for start in range(0, len(trials), _TRIALS_PER_READ)]
