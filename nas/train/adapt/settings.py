"""Settings of `nas adapt`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nas.core.errors import InvalidInput
from nas.train.adapt.healing import Healing
from nas.train.adapt.library import LibrarySettings


class AdaptSettings(BaseModel):
    """Settings of an adaptation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    library: LibrarySettings = LibrarySettings()
    healing: Healing = Healing()
    window: int = Field(128, ge=2, description="of sliding windows among the alternatives")
    mixers: tuple[str, ...] = Field(
        (), exclude_if=lambda given: not given, description="further alternatives for attention, in one-line form"
    )
    recall: float = Field(
        0.0, ge=0, description="weight of the divergence at generated answers, beside 1 of that over all held-out text"
    )
    pairs: int = Field(0, ge=0, description="pairs of mixers in neighbouring layers whose terms are computed, at most")
    points: int = Field(5, ge=2, description="of the front")
    report_tokens: int = Field(
        1 << 17, ge=1024, description="held-out tokens that bits per byte are computed on, at most"
    )
    held_out: float = Field(0.05, gt=0, lt=0.5, description="share of the text that is never trained on")


def read_settings(path: Path) -> AdaptSettings:
    """Reads settings from a JSON file.

    Raises:
        InvalidInput: the file cannot be read, or a value is out of range or unknown.
    """
    try:
        return AdaptSettings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", where="--config") from error
    except ValidationError as error:
        problems = (f"{path}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise InvalidInput("\n".join(problems)) from None
