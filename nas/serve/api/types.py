"""Parameter and field types that several operations of the users' API share."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

MAX_PAGE = 500
LONGEST_WAIT_S = 30.0
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="most entries of a page")]
EventId = Annotated[int, Query(ge=0, lt=1 << 53, description="id of the last known event")]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, description="longest wait for an event, seconds")]
Time = Annotated[float, Field(description="seconds since the epoch, by the coordinator's clock")]
ONE_LINE = r"^[^\x00-\x1f\x7f]*$"
TrialNumber = Annotated[int, Path(ge=0, le=2**31 - 1)]
Trials = Annotated[int | None, Field(ge=1, le=1_000_000, description="layouts to try; null: as the space says")]
StudyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def shared(view: type[BaseModel], source: object) -> dict[str, Any]:
    """Returns the attributes of an object whose names are those of fields of a model that shows it."""
    return {name: getattr(source, name) for name in view.model_fields if hasattr(source, name)}


def with_example(**example: Any) -> ConfigDict:
    """Returns the configuration of a model that is read from rows and documented with an example."""
    return ConfigDict(from_attributes=True, frozen=True, json_schema_extra={"examples": [example]})
