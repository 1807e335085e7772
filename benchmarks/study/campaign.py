"""Runs the studies of a comparison one after the other through `nas launch`, in a folder of their own.

Finished studies are found in the folder's database, so a killed campaign can be continued.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import yaml

from benchmarks.study.terms import Terms, space_of
from nas.cli.options import INTERRUPTED
from nas.core.errors import InvalidInput, NasError
from nas.core.units import show_duration
from nas.infra.store import leases, studies, trials
from nas.infra.store.rows import Study, StudyState
from nas.infra.store.store import Store
from nas.measure.farm.farm import LOCAL, this_machine
from nas.search.analysis.report import Json, study_report
from nas.search.spaces import load_space
from nas.search.study.estimate import Span, estimate, estimate_left

_TRIES = 4
_PAUSE_S = 20.0
_LOOK_S = 2.0
_FOR_GOOD = (2, InvalidInput.exit_code)
"""Exit codes of launches that another try would end with, too: wrong options or spaces."""


class Campaign:
    """Studies of one space in one folder.

    Args:
        folder: gets a home of its own with the database, the spaces and the log of the launches.
        base: name or file of the space.
        say: called with progress messages.
    """

    def __init__(self, folder: Path, base: str, say: Callable[[str], None]) -> None:
        self.folder, self._base, self._say = folder, base, say
        self._home = folder / "home"

    def run(self, planned: Sequence[Terms]) -> None:
        """Runs what is not finished.

        Raises:
            NasError: a study does not come to its end; the message names the log.
            KeyboardInterrupt: the launch was interrupted.
        """
        unfinished = self.tell(planned)
        for index, terms in enumerate(unfinished):
            start = time.monotonic()
            self._finish(terms)
            took = show_duration(time.monotonic() - start)
            self._say(f"{terms.study}: done in {took}; {self._time_left(unfinished[index + 1 :]).text} left")

    def tell(self, planned: Sequence[Terms]) -> list[Terms]:
        """Prints the expected duration; returns the unfinished studies."""
        unfinished = [terms for terms in planned if not self._finished(terms)]
        self._say(f"{len(unfinished)} of {len(planned)} studies to run: {self._time_left(unfinished).text}")
        return unfinished

    def report(self, terms: Terms) -> Json | None:
        """Returns the report of a study as far as it is; None where it has not begun."""
        if self._study(terms) is None:
            return None
        with self.store() as store:
            return study_report(store, terms.study)

    @contextmanager
    def store(self) -> Iterator[Store]:
        """Opens the campaign's database."""
        store = Store.open(f"sqlite:///{self._database}", artifacts=self._home / "artifacts")
        try:
            yield store
        finally:
            store.close()

    def _time_left(self, unfinished: Sequence[Terms]) -> Span:
        """Returns how long studies take: an upper bound, as what they share is counted for each."""
        spans = list(map(self._span, unfinished))
        ends = {end: sum(getattr(span, end) for span in spans) for end in Span.model_fields}
        return Span.model_validate(ends)

    def _span(self, terms: Terms) -> Span:
        study = self._study(terms)
        with self.store() if self._database.is_file() else nullcontext() as store:
            time_left = None if store is None or study is None else estimate_left(store, study)
            if time_left is None:
                ids, workers = {LOCAL: this_machine().id}, os.cpu_count() or 1
                time_left = estimate(store, load_space(self._base), terms.trials, ids, workers)
            return time_left.seconds

    def _finish(self, terms: Terms) -> None:
        for attempt in range(_TRIES):
            if attempt:
                self._say(f"{terms.study}: {self._last_words()}; going on in {_PAUSE_S:.0f} s")
                time.sleep(_PAUSE_S)
            self._wait_for_others(terms)
            code = 0 if self._finished(terms) else self._launch(terms)
            if code == 0:
                if (study := self._study(terms)) is None or study.state is not StudyState.COMPLETE:
                    raise NasError(f"study {terms.study} was stopped; the same command continues")
                return
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code in _FOR_GOOD:
                break
        raise NasError(f"study {terms.study} did not come to its end: {self._last_words()} ({self._log})")

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing was said")

    def _launch(self, terms: Terms) -> int:
        space = self.folder / "spaces" / f"{terms.study}.yaml"
        space.parent.mkdir(parents=True, exist_ok=True)
        space.write_text(yaml.safe_dump(space_of(self._base, terms), sort_keys=False), encoding="utf-8")
        started = self._study(terms) is not None
        self._say(f"{terms.study}: {'going on' if started else 'begins'}, {terms.trials} trials")
        options = ["--resume"] if started else []
        argv = [
            sys.executable,
            "-m",
            "benchmarks.study.nas",
            "launch",
            "--space",
            str(space),
            "--study",
            terms.study,
            "--trials",
            str(terms.trials),
            "--yes",
            "--json",
            *options,
        ]
        with self._log.open("ab") as log:
            return subprocess.run(
                argv,
                env=os.environ | {"NAS_HOME": str(self._home)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            ).returncode

    @property
    def _database(self) -> Path:
        return self._home / "hilnas.db"

    @property
    def _log(self) -> Path:
        return self.folder / "launches.log"

    def _study(self, terms: Terms) -> Study | None:
        if not self._database.is_file():
            return None
        with self.store() as store:
            return next((study for study in studies.all(store) if study.name == terms.study), None)

    def _finished(self, terms: Terms) -> bool:
        study = self._study(terms)
        if study is None or study.state is not StudyState.COMPLETE:
            return False
        with self.store() as store:
            proposed = [trial for trial in trials.all(store, study.id) if trial.origin != "reference"]
        return len(proposed) >= terms.trials

    def _wait_for_others(self, terms: Terms) -> None:
        """Waits for a launch that outlived a killed campaign: its work counts for this one."""
        study = self._study(terms)
        while study is not None:
            with self.store() as store:
                lease = leases.current(store, study.id)
                if lease is None or lease.expires <= store.now():
                    return
            time.sleep(_LOOK_S)
