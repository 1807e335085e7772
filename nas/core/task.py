"""Quality tasks: small synthetic problems that test one skill of a layout, such as recall.

The protocol and the registry live here so that a search space can be checked when it is read; the tasks themselves are
in `nas.search.proxy.tasks`, one file each, and need no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput, UnknownName
from nas.core.registry import Registry
from nas.core.tower import FEATURES_PER_SECOND, Media

IGNORE = -100
"""Label of positions that do not count; cross-entropy's customary ignore index."""

Batch = tuple[NDArray[np.int64], NDArray[np.int64 | np.float32]]
Setting = int | float | bool


@runtime_checkable
class Task(Protocol):
    """One problem at one difficulty. Implement it as a frozen dataclass whose fields are the settings.

    Two tasks with equal settings must give equal batches from equal generators. A class attribute `version` is part of
    result keys: change it when batches change. Without one, the version of the distribution that adds the task is.

    Example:
        A task that repeats each symbol once; a label stands where the repetition comes next:

        >>> @dataclasses.dataclass(frozen=True)
        ... class Repeat:
        ...     vocab: int = 8
        ...     length: int = 32
        ...
        ...     @property
        ...     def chance_nats(self) -> float:
        ...         return float(np.log(self.vocab))
        ...
        ...     def batch(self, generator: np.random.Generator, size: int) -> Batch:
        ...         x = np.repeat(generator.integers(0, self.vocab, (size, self.length // 2)), 2, axis=1)
        ...         labels = np.full_like(x, IGNORE)
        ...         labels[:, ::2] = x[:, ::2]
        ...         return x, labels
        >>> TASKS.add("repeat", Repeat)
        >>> make_task("repeat", {"vocab": 4}).vocab
        4

        A distribution names the class as an entry point of the group `nas.tasks`.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    @property
    def vocab(self) -> int:
        """Symbols: inputs and labels are below it."""
        ...

    @property
    def length(self) -> int:
        """T, tokens of one example."""
        ...

    @property
    def chance_nats(self) -> float:
        """Entropy of the labels' marginal distribution: the least loss of a guess that looks at no input."""
        ...

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns `size` examples: inputs [B, T] and, for each position, the symbol to predict, or `IGNORE`.

        It is the next symbol of the example, unless the task says otherwise. A task that shows n symbols at once has
        inputs [B, T, n]: a model reads the sum of their embeddings.
        """
        ...


@runtime_checkable
class RetrievalTask(Task, Protocol):
    """A task of late interaction: each example is a query, then the document that is to be found for it.

    Documents of other examples do not answer it. There are no labels: the score is the nDCG@10 of the search among all
    documents, above that of a random order.
    """

    @property
    def query(self) -> int:
        """Tokens of the query; the document has the others of `length`."""
        ...


class Exhibit(NamedTuple):
    """What an example of a `MediaTask` is about.

    Args:
        kind: pictures or sounds.
        rows: of pixels, or of features, of which there are 100 a second.
        columns: pixels or bands of a row.
    """

    kind: Media
    rows: int
    columns: int

    @property
    def amount(self) -> int:
        """Numbers in front of the text."""
        return self.rows * self.columns

    @property
    def size(self) -> tuple[float, ...]:
        """As a tower takes it: height and width, or seconds."""
        return (self.rows, self.columns) if self.kind == "images" else (self.rows / FEATURES_PER_SECOND,)


@runtime_checkable
class MediaTask(Task, Protocol):
    """A task of images or sound: each example is one, then a text about it, for which labels are as in other tasks.

    The first `media.amount` of the `length` numbers are its rows, one after another: pixels as 0xRRGGBB, or features in
    thousandths. They are not below `vocab`, and have no labels.
    """

    @property
    def media(self) -> Exhibit:
        """What an example is about."""
        ...


@runtime_checkable
class SpectraTask(Task, Protocol):
    """A task of detokenizers: codes [B, T, n] are to become spectra, float32 [B, T, bands], which are the labels.

    Loss is the mean absolute error, and chance that of each band's median, both in the unit of the spectra.
    """

    @property
    def bands(self) -> int:
        """Numbers of a spectrum."""
        ...


def text_length(task: Task) -> int:
    """Returns the symbols of an example, without what they are about."""
    return task.length - (task.media.amount if isinstance(task, MediaTask) else 0)


def task_kind(task: Task) -> str:
    """Returns the `task` of the spaces that a task is for: generation, retrieval, detokenization, vision or audio."""
    if isinstance(task, RetrievalTask):
        return "retrieval"
    if isinstance(task, SpectraTask):
        return "detokenization"
    if isinstance(task, MediaTask):
        return "vision" if task.media.kind == "images" else "audio"
    return "generation"


TASKS: Registry[type[Task]] = Registry(
    "quality task",
    "nas.tasks",
    {
        "selcopy": "nas.search.proxy.tasks.selcopy:SelectiveCopy",
        "induction": "nas.search.proxy.tasks.induction:Induction",
        "mqar": "nas.search.proxy.tasks.mqar:AssociativeRecall",
        "recall": "nas.search.proxy.tasks.recall:Recall",
        "noisyrecall": "nas.search.proxy.tasks.noisyrecall:NoisyRecall",
        "automata": "nas.search.proxy.tasks.automata:Automata",
        "knowledge": "nas.search.proxy.tasks.knowledge:Knowledge",
        "arithmetic": "nas.search.proxy.tasks.arithmetic:Arithmetic",
        "boundfacts": "nas.search.proxy.tasks.boundfacts:BoundFacts",
        "wordproblem": "nas.search.proxy.tasks.wordproblem:WordProblem",
        "pictures": "nas.search.proxy.tasks.pictures:Pictures",
        "sounds": "nas.search.proxy.tasks.sounds:Sounds",
        "spectra": "nas.search.proxy.tasks.spectra:Spectra",
    },
)


def make_task(name: str, settings: Mapping[str, Setting]) -> Task:
    """Creates the task `name` at the difficulty `settings` (the task's defaults where left out).

    Raises:
        UnknownName: no such task or setting.
        InvalidInput: settings of the wrong type, or not valid together.
    """
    kind = TASKS[name]
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    values = dict(settings)
    for key, value in settings.items():
        if key not in fields:
            raise UnknownName(f"setting of task {name}", key, fields)
        if fields[key] in ("int", int):
            if isinstance(value, bool) or int(value) != value:
                raise InvalidInput(f"task {name}: {key} must be a whole number, not {value}")
            values[key] = int(value)
    return kind(**values)


def task_settings(task: Task) -> dict[str, Setting]:
    """Returns every setting of `task`, defaults included, which identify it in a result key."""
    return dataclasses.asdict(task)
