"""The form that submits a study: what was typed, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from nas.core.errors import NasError
from nas.dashboard.actions import Form
from nas.service.api_errors import Conflict
from nas.service.api_studies_models import SubmitRequest
from nas.service.submission_check import FILE

FieldName = Literal["study", "space", "trials", "warm_start", ""]

_PLACE = re.compile(rf"{re.escape(FILE)}(?::(\d+))?: (.+)")
_QUOTED = 200
_NAME_RULE = "use up to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"


class Problem(BaseModel):
    """Something that keeps a study from being submitted."""

    field: FieldName = Field(description="where; empty: nowhere in particular")
    line: int | None = Field(None, description="of the space, counted from 1")
    text: str
    quoted: str | None = Field(None, description="that line")


class LaunchForm(BaseModel):
    """What somebody typed."""

    study: str = ""
    space: str = Field("", description="YAML text")
    trials: str = ""
    accept_noise: bool = False
    warm_start: str = Field("", description="names, between spaces or commas")

    @classmethod
    def of(cls, posted: Form) -> LaunchForm:
        """From a posted form. A file counts in place of the text: browsers send an empty one where none was chosen."""
        space = posted.get("file") or posted.get("space", "")
        return cls(
            study=posted.get("study", "").strip(),
            space=space.replace("\r\n", "\n"),
            trials=posted.get("trials", "").strip(),
            accept_noise="accept_noise" in posted,
            warm_start=posted.get("warm_start", "").strip(),
        )

    def request(self) -> SubmitRequest:
        """As the users' API takes it.

        Raises:
            ValidationError: it would not.
        """
        return SubmitRequest.model_validate(
            {
                "study": self.study,
                "space": self.space,
                "trials": self.trials or None,
                "accept_noise": self.accept_noise,
                "warm_start": tuple(re.split(r"[\s,]+", self.warm_start)) if self.warm_start else (),
            }
        )


def problems_of(error: ValidationError | NasError, form: LaunchForm) -> list[Problem]:
    """What is wrong with a form that was refused so, each at its field, those of the space at their lines."""
    if isinstance(error, ValidationError):
        return list(_of_fields(error))
    if isinstance(error, Conflict):
        return [Problem(field="study", text=str(error))]
    return [_of_line(line, form) for line in str(error).splitlines()]


def _of_fields(error: ValidationError) -> Iterator[Problem]:
    for each in error.errors(include_url=False):
        name = str(each["loc"][0]) if each["loc"] else ""
        text = _NAME_RULE if each["type"] == "string_pattern_mismatch" else each["msg"]
        yield Problem(field=_field(name), text=text)


def _of_line(message: str, form: LaunchForm) -> Problem:
    found = _PLACE.fullmatch(message)
    if found is None:
        name, separator, text = message.partition(": ")
        return Problem(field=_field(name), text=text if separator and _field(name) else message)
    number = int(found[1]) if found[1] else None
    return Problem(field="space", line=number, text=found[2], quoted=_quoted(form.space, number, found[2]))


def _quoted(space: str, number: int | None, problem: str) -> str | None:
    """The line that is wrong; none where something is missing, which stands in no line."""
    lines = space.split("\n")
    if number is None or number > len(lines) or problem.endswith("is missing"):
        return None
    return lines[number - 1].strip()[:_QUOTED] or None


def _field(name: str) -> FieldName:
    return next((each for each in get_args(FieldName) if each == name), "")
