"""Writes a study into an Optuna database, for `optuna-dashboard` and Optuna's own tools to read.

Our tables stay the truth. A trial is copied once it has ended for good; running again copies what has ended since.
"""

from __future__ import annotations

import fcntl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from nas.core import paths
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.metrics import METRICS
from nas.core.scoring import places
from nas.core.space import Objective, SearchSpace
from nas.service.optuna_trials import Parameters, frozen
from nas.service.record import Record, StudyRecord, read_study
from nas.store.engine import database_url
from nas.store.store import Store

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import RDBStorage

_OURS = {"study", "study_lease", "result_use"}
"""Tables by which a database of hilnas is known."""
_MARK = "hilnas"


@dataclass(frozen=True)
class Mirrored:
    """What a run did.

    Args:
        name: of the Optuna study.
        url: of its database, without a password.
        added: trials copied now.
        trials: in the Optuna study altogether.
    """

    name: str
    url: str
    added: int
    trials: int


def mirror(store: Store, study: str, url: str, name: str | None = None) -> Mirrored:
    """Copies what has ended of a study into the Optuna study `name`, by default its own name.

    References stand in the study's user attributes, not among its trials: they are exempt from budgets, and no
    proposal. So Optuna's `best_trials` are our front.

    Raises:
        UnknownName: no such study.
        InvalidInput: no URL that can be used, a database of hilnas, or an Optuna study that is not a copy of this one.
        InfrastructureFailed: the database cannot be reached, or another process mirrors the study.
    """
    record = read_study(store, study)
    target = database_url(url)
    with _alone(record.study.name), _told(target):
        _refuse_ours(target)
        copy = _open(_storage(target), record, name or record.study.name)
        known = {trial.user_attrs.get("trial") for trial in copy.get_trials(deepcopy=False)}
        parameters = Parameters(record.space)
        new = [each for each in record.records.values() if _is_final(each) and each.trial.number not in known]
        for each in new:
            copy.add_trial(frozen(record, each, parameters))
        _describe(copy, record)
    return Mirrored(copy.study_name, target.render_as_string(), len(new), len(known) + len(new))


def _is_final(each: Record) -> bool:
    status = each.trial.status
    return status.terminal and not status.retryable and each.trial.origin != "reference"


def _storage(url: URL) -> RDBStorage:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.storages.RDBStorage(url.render_as_string(hide_password=False))
    except (RuntimeError, ImportError) as error:  # tables of another Optuna; a driver that is not installed
        raise InvalidInput(str(error).splitlines()[0], where="--optuna") from error


def _open(storage: RDBStorage, record: StudyRecord, name: str) -> Study:
    """The copy, made where there is none."""
    import optuna

    mark = {"study": record.study.name, "created": record.study.created, "space": record.study.space_hash}
    names = [known.study_name for known in optuna.get_all_study_summaries(storage, include_best_trial=False)]
    if name in names:
        study = optuna.load_study(study_name=name, storage=storage)
        # Without a mark and without trials: a run was killed between its first two steps.
        if study.user_attrs.get(_MARK, mark if not study.get_trials(deepcopy=False) else None) != mark:
            raise InvalidInput(
                f"the Optuna study {name!r} is no copy of this study; choose another name", where="--name"
            )
    else:
        directions = [_direction(record.space, objective) for objective in record.space.objectives]
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
    _set(study, _MARK, mark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([objective.name for objective in record.space.objectives])
    return study


def _direction(space: SearchSpace, objective: Objective) -> Literal["maximize", "minimize"]:
    metric = METRICS[objective.metric]
    several = metric.source != "proxy" and len(places(space, objective)) > 1
    return "maximize" if metric.direction == "max" and not several else "minimize"


def _describe(copy: Study, record: StudyRecord) -> None:
    """What concerns the study as a whole."""
    names = [objective.name for objective in record.space.objectives]
    _set(copy, "space", record.space.name)
    _set(
        copy,
        "reference_point",
        dict(zip(names, record.reference_point, strict=True)) if record.reference_point else None,
    )
    for name, each in record.references.items():
        axes = each.axes(record.space, record.published)
        values = {objective: axis.value if axis else None for objective, axis in zip(names, axes, strict=True)}
        _set(copy, f"reference {name}", {"layout": each.layout.format(), **values})


def _set(copy: Study, key: str, value: Any) -> None:
    if copy.user_attrs.get(key) != value:
        copy.set_user_attr(key, value)


def _refuse_ours(url: URL) -> None:
    engine = create_engine(url)
    try:
        if set(inspect(engine).get_table_names()) >= _OURS:
            raise InvalidInput("this is a database of hilnas; give Optuna one of its own", where="--optuna")
    finally:
        engine.dispose()


@contextmanager
def _alone(study: str) -> Iterator[None]:
    """Two at once would copy a trial twice."""
    folder = paths.home() / "studies" / study
    folder.mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "mirror.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InfrastructureFailed(f"another process mirrors study {study!r}") from None
        yield


@contextmanager
def _told(url: URL) -> Iterator[None]:
    """Errors of the database as ours, without a password."""
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = str(getattr(cause, "orig", None) or cause).splitlines()[0]
        raise InfrastructureFailed(f"database {url.render_as_string()}: {reason}") from error
