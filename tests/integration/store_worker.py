"""One process of `test_store_processes.py`: argv is the database's URL, its artifacts, what to do, and arguments."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from nas.core.layout import Layout
from nas.core.plan import RoundResult
from nas.core.trial import EventKind
from nas.infra.store import artifacts, jobs, outcomes, results, trials
from nas.infra.store.rows import NewTrial
from nas.infra.store.store import Store


def propose(store: Store, worker: int, number: int) -> None:
    """`number` trials of study 1, each exported at once in the same transaction; some layouts are everybody's."""
    for n in range(number):
        vocab = 256 + n + (0 if n % 5 == 0 else 1000 * worker)
        layout = Layout.parse(f"d64 v{vocab} ffn=swiglu:64 [C3]")
        with store.write():
            [trial] = trials.propose(store, 1, [NewTrial(layout.to_json(), layout.id)])
            trials.add_event(store, 1, trial.number, EventKind.EXPORTED)
            results.put(store, layout.id, "export", {"worker": worker}, trial=(1, trial.number))
            with TemporaryDirectory() as folder:
                Path(folder, "layout").write_text(layout.format())
                artifacts.put_file(store, Path(folder, "layout"))


def forever(store: Store, worker: int, number: int) -> None:
    """`propose` until killed; a line on stdout says that it has begun."""
    propose(store, worker, 1)
    print("begun", flush=True)
    for n in count(number):
        propose(store, worker * 1000 + n, 3)


def claim(store: Store, device: int, number: int) -> None:
    """Claims and finishes jobs until there are none; prints each as 'job epoch'."""
    del number
    name = f"dev{device % 2}"  # two processes share each device, as an agent's successor does
    while (job := jobs.claim(store, name, "local")) is not None:
        assert job.epoch is not None
        if outcomes.submit(store, job.id, name, "local", job.epoch, RoundResult(pairs=[])).accepted:
            print(job.id, name, job.epoch, flush=True)


def main() -> None:
    """Runs one of the functions above."""
    url, folder, what, worker, number = sys.argv[1:]
    store = Store.open(url, artifacts=Path(folder))
    {"propose": propose, "forever": forever, "claim": claim}[what](store, int(worker), int(number))


if __name__ == "__main__":
    main()
