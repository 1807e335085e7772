"""Whether a submitted space can be searched here, before anything is started."""

from __future__ import annotations

from collections.abc import Iterable

from nas.core.errors import InvalidInput, UnknownName
from nas.core.space import SearchSpace
from nas.devices.host import own_attachments
from nas.search_spaces import parse_space
from nas.search_spaces.yaml_text import Document, read_yaml
from nas.service.device_names import LOCAL, find_name, known_devices
from nas.service.launch import support_filter
from nas.service.warm_start import require_studies
from nas.store.store import Store

FILE = "space.yaml"
"""What a submitted text is called in messages."""


def check_space(store: Store, text: str) -> SearchSpace:
    """The space in YAML `text`.

    Raises:
        InvalidInput: it cannot be searched here; a line for each problem, as `space.yaml:line: message`.
    """
    space = parse_space(text, FILE)
    document = read_yaml(text, FILE)
    if space.quality.corpus != "default":
        raise InvalidInput(
            "a submitted study trains on the default corpus: it cannot name files of the coordinator's",
            where=document.where(("quality", "corpus")),
        )
    try:
        _check_names(store, space, document)
    except UnknownName as error:
        # It is the text that is wrong, not the address that it was sent to.
        raise InvalidInput(error.message, where=error.where) from None
    return space


def check_earlier(store: Store, names: Iterable[str], study: str) -> None:
    """Raises `InvalidInput` where `study` cannot learn from all of `names`."""
    try:
        require_studies(store, names, study)
    except UnknownName as error:
        raise InvalidInput(error.message, where="warm_start") from None


def _check_names(store: Store, space: SearchSpace, document: Document) -> None:
    known = known_devices(store, own_attachments().read())
    for number, name in enumerate(space.devices):
        if name != LOCAL:
            find_name(name, known, where=document.where(("devices", number)))
    support_filter(space)
