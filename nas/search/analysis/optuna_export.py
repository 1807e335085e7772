"""Writes a study into an Optuna database, for `optuna-dashboard` and Optuna's own tools to read.

Our own tables stay authoritative. A trial is copied once it has ended for good; running the export again copies those
that have ended since. Optuna's trials cannot be changed later: while a study runs that will score its front on fresh
seeds, its complete trials are not copied.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from nas.core import paths
from nas.core.block import Block, Scalar
from nas.core.block_space import EXPANSION, BlockSpace
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.layout import Layout
from nas.core.model_choices import choice_of, ffn_width
from nas.core.space import SearchSpace
from nas.core.trial import TrialState
from nas.infra.store import leases, studies
from nas.infra.store.engine import database_url, translated
from nas.infra.store.migrate import OWN_TABLES
from nas.infra.store.store import Store
from nas.search.analysis.axes import axis_views
from nas.search.analysis.record import Record, StudyRecord, read_study
from nas.search.analysis.report import measured, trial_row

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_MARK = "hilnas"


class MirrorResult(NamedTuple):
    """The outcome of `mirror`.

    Args:
        name: of the Optuna study.
        url: of its database, without a password.
        added: trials that were copied.
        trials: all that it has now.
        waiting: complete trials that are copied once the study has scored them on fresh seeds.
    """

    name: str
    url: str
    added: int
    trials: int
    waiting: int


class Parameters:
    """Layouts of a space as Optuna's parameters.

    `d_model`, `vocab` and `depth`; `KIND.layers`, how many layers use a block kind; `KIND.KNOB`, where one value holds
    for all layers; and for each layer from 0 on `layerNN.mixer`, `layerNN.ffn` and `layerNN.KIND.KNOB`. Knobs with one
    choice are left out, and so is what a layout does not have.

    Args:
        space: of the layouts.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._slots = int(max(space.model.depth.choices))

    def of(self, layout: Layout) -> dict[str, tuple[Scalar | str, BaseDistribution]]:
        """Returns name -> (value, distribution), equal distributions for all layouts of the space."""
        return dict(self._all(layout))

    def _all(self, layout: Layout) -> Iterator[tuple[str, tuple[Scalar | str, BaseDistribution]]]:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        model = self._space.model
        depths = [int(depth) for depth in model.depth.choices]
        yield "depth", (layout.depth, IntDistribution(min(depths), max(depths)))
        yield "d_model", (layout.d_model, CategoricalDistribution(model.d_model.choices))
        yield "vocab", (layout.vocab, CategoricalDistribution(model.vocab.choices))
        if len(widths := self._space.model.vectors.choices) > 1:
            yield "vectors", (layout.vectors, CategoricalDistribution(widths))
        if len(towers := self._space.model.tower.choices) > 1 and layout.tower:
            yield "tower", (layout.tower.format(), CategoricalDistribution(towers))
        if self._space.quantisations:
            yield "quantisation", (layout.quantisation, CategoricalDistribution(self._space.quantisations))
        used = Counter(block.kind for layer in layout.layers for block in layer.blocks)
        for role, kinds in (("mixer", self._space.mixers), ("ffn", self._space.ffn)):
            spaces = {kind.kind: kind for kind in kinds}
            choices = self._space.mixer_choices if role == "mixer" else tuple(spaces)
            for name in spaces:
                yield f"{name}.layers", (used[name], IntDistribution(0, self._slots))
            for number, layer in enumerate(layout.layers):
                half = layer.mixers if role == "mixer" else (layer.ffn,) if layer.ffn else ()
                if (choice := choice_of(half)) in choices:
                    yield f"layer{number:02}.{role}", (choice, CategoricalDistribution(choices))
                    for block in half:
                        yield from self._knobs(spaces[block.kind], block, number, layout.d_model)

    def _knobs(
        self, kind: BlockSpace, block: Block, number: int, d_model: int
    ) -> Iterator[tuple[str, tuple[Scalar, BaseDistribution]]]:
        from optuna.distributions import CategoricalDistribution

        for name, knob in kind.knobs.items():
            choices, argument = _numbers(kind, name), name
            if name == EXPANSION:
                d_models = [int(width) for width in self._space.model.d_model.choices]
                widths = {ffn_width(float(choice), width) for choice in choices for width in d_models}
                choices, argument = tuple(sorted(widths)), "width"
            value = block.resolve(d_model).get(argument)
            if len(choices) > 1 and value is not None:
                prefix = f"layer{number:02}." if knob.scope == "layer" else ""
                yield f"{prefix}{kind.kind}.{argument}", (value, CategoricalDistribution(choices))


def _numbers(kind: BlockSpace, name: str) -> tuple[Scalar, ...]:
    """Returns the values of a knob; a choice that names another argument has the values of that argument's knob."""
    values: list[Scalar] = []
    for choice in kind.knobs[name].choices:
        values += _numbers(kind, choice) if isinstance(choice, str) else [choice]
    return tuple(dict.fromkeys(values))


def mirror(store: Store, study: str, url: str, name: str | None = None) -> MirrorResult:
    """Copies the ended trials of a study into the Optuna study `name`, by default its own name.

    References are in the study's user attributes, not among its trials: they are exempt from budgets, and no
    proposal. So Optuna's `best_trials` are our front. A second process waits until the first has ended.

    Raises:
        UnknownName: no such study.
        InvalidInput: the URL cannot be used, is a database of hilnas, or the Optuna study is not a copy of this one.
        InfrastructureFailed: the database cannot be reached.
    """
    is_run = leases.holder(store, studies.find_id(store, study)) is not None  # before its trials are read
    record, target = read_study(store, study), database_url(url, "--optuna")
    lock = paths.home() / "studies" / record.study.name / "mirror.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock), _database_errors(target):
        _refuse_ours(target)
        copy = _open(target, record, name or record.study.name)
        copied = {trial.user_attrs.get("trial") for trial in copy.get_trials(deepcopy=False)}
        parameters = Parameters(record.space)
        final = [
            trial
            for number, trial in record.records.items()
            if trial.trial.status.terminal
            and not trial.trial.status.retryable
            and trial.trial.origin != "reference"
            and number not in copied
        ]
        rescored = is_run and record.space.quality.rescore is not None
        new = [trial for trial in final if not (rescored and trial.trial.status.state is TrialState.COMPLETE)]
        copy.add_trials([_frozen_trial(record, trial, parameters) for trial in new])
        _describe(copy, record)
    waiting = len(final) - len(new)
    return MirrorResult(copy.study_name, target.render_as_string(), len(new), len(copied) + len(new), waiting)


def _frozen_trial(study: StudyRecord, record: Record, parameters: Parameters) -> FrozenTrial:
    """Returns an ended trial as Optuna stores it.

    A complete trial has values. One that broke a budget or was stopped at a rung is pruned, since it has no final
    quality; one that failed or was cancelled is failed.
    """
    from optuna.trial import TrialState as OptunaState
    from optuna.trial import create_trial

    row, state = record.trial, record.trial.status.state
    pruned = state in (TrialState.INFEASIBLE, TrialState.STOPPED)
    complete = state is TrialState.COMPLETE
    assert not complete or None not in record.axes, f"trial {row.number} is complete but lacks an objective"
    values = parameters.of(record.layout)
    excess: dict[str, float] = {}
    for check in study.checks(record):
        if check.log_excess is not None:  # several budgets may limit one figure
            excess[check.name] = max(excess.get(check.name, -math.inf), check.log_excess)
    trial = create_trial(
        state=OptunaState.COMPLETE if complete else OptunaState.PRUNED if pruned else OptunaState.FAIL,
        values=[axis.value for axis in record.axes if axis is not None] if complete else None,
        params={name: value for name, (value, _) in values.items()},
        distributions={name: distribution for name, (_, distribution) in values.items()},
        user_attrs={**trial_row(record), "operator": row.operator, "parents": list(row.parents), **measured(record)},
        constraints=excess,
    )
    trial.datetime_start = datetime.fromtimestamp(row.created)
    trial.datetime_complete = datetime.fromtimestamp(row.updated)
    return trial


def _open(url: URL, record: StudyRecord, name: str) -> Study:
    """Opens the copy; creates it if there is none."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = optuna.storages.RDBStorage(url.render_as_string(hide_password=False))
    except (RuntimeError, ImportError) as error:  # tables of another Optuna; a driver that is not installed
        raise InvalidInput(str(error).splitlines()[0], where="--optuna") from error
    objectives = [axis for axis in axis_views(record.space, record.published, None) if axis.objective]
    directions: list[Literal["maximize", "minimize"]] = [
        "maximize" if axis.direction == "max" else "minimize" for axis in objectives
    ]
    study = optuna.create_study(study_name=name, storage=storage, directions=directions, load_if_exists=True)
    mark = {"study": record.study.name, "created": record.study.created, "space": record.study.space_hash}
    # Without a mark and without trials: a run was killed between its first two steps.
    if study.user_attrs.get(_MARK, mark if not study.get_trials(deepcopy=False) else None) != mark:
        raise InvalidInput(f"the Optuna study {name!r} is no copy of this study; choose another name", where="--name")
    _set(study, _MARK, mark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([axis.name for axis in objectives])
    return study


def _describe(copy: Study, record: StudyRecord) -> None:
    """Stores the space, reference point and reference layouts in the study's user attributes."""
    names = [objective.name for objective in record.space.objectives]
    point = dict(zip(names, record.reference_point, strict=True)) if record.reference_point else None
    _set(copy, "space", record.space.name)
    _set(copy, "reference_point", point)
    for name, reference in record.references.items():
        values = [axis.value if axis else None for axis in reference.axes]
        layout = {"layout": reference.layout.format()}
        _set(copy, f"reference {name}", layout | dict(zip(names, values, strict=True)))


def _set(copy: Study, key: str, value: Any) -> None:
    if copy.user_attrs.get(key) != value:
        copy.set_user_attr(key, value)


def _refuse_ours(url: URL) -> None:
    engine = create_engine(url)
    try:
        if set(inspect(engine).get_table_names()) >= OWN_TABLES:
            raise InvalidInput("this is a database of hilnas; give Optuna one of its own", where="--optuna")
    finally:
        engine.dispose()


@contextmanager
def _database_errors(url: URL) -> Iterator[None]:
    """Raises errors of Optuna's database as the store raises those of its own, without the password."""
    from optuna.exceptions import StorageInternalError

    try:
        with translated(url):
            try:
                yield
            except StorageInternalError as error:
                raise error.__cause__ or error from error
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise InfrastructureFailed(f"database {url.render_as_string()}: {reason}") from error
