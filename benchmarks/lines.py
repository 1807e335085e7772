"""Files with a JSON object on each line, to which a measurement that may be killed appends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects, first to last; a last line that a kill cut off is removed, so that the next one is whole."""
    text = path.read_text() if path.exists() else ""
    if (whole := text[: text.rfind("\n") + 1]) != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]
