"""The search space of a study, as the database keeps it."""

from __future__ import annotations

from pydantic import ValidationError

from nas.core.errors import InvalidInput
from nas.core.space import SearchSpace
from nas.store.rows import Study


def stored_space(study: Study) -> SearchSpace:
    """The study's space.

    Raises:
        InvalidInput: it is of another version of hilnas, which this one cannot read.
    """
    try:
        return SearchSpace.model_validate(study.space)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"study {study.name}: this version cannot read its space: {where}: {first['msg']}") from None
