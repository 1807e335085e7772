"""Languages of texts, by py3langid: naive Bayes over byte n-grams, with a model of 139 languages in its package.

Needs the extra `languages`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from nas.core.errors import InvalidInput, UnknownName

_WHERE = "filters.languages"
_NO_LANGUAGE = "zxx"
"""The library's class of numbers, markup and identifiers."""
_LEAST_BYTES = 20
_LEAST_CONFIDENCE = 0.5


def detector_version() -> str:
    """Returns the version of py3langid, whose model other versions change.

    Raises:
        InvalidInput: it is not installed.
    """
    return str(_library().__version__)


def check_languages(codes: Iterable[str]) -> None:
    """Checks codes of languages, ISO 639.

    Raises:
        UnknownName: a code is unknown.
        InvalidInput: py3langid is not installed.
    """
    labels = set(_identifier().labels) - {_NO_LANGUAGE}
    for code in codes:
        if code not in labels:
            raise UnknownName("language", code, labels, where=_WHERE)


def language_of(text: str) -> str | None:
    """Returns the code of the language of a text; None: it cannot be said.

    That is where letters have fewer than 20 bytes of UTF-8, the likeliest language has less than half of the
    probability, or the text is none of a language.
    """
    if sum(len(letter.encode()) for letter in text if letter.isalpha()) < _LEAST_BYTES:
        return None
    code, confidence = _identifier().classify(text)
    return None if confidence < _LEAST_CONFIDENCE or code == _NO_LANGUAGE else str(code)


@cache
def _identifier() -> Any:
    _library()
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _library() -> Any:
    try:
        import py3langid
    except ImportError as error:
        raise InvalidInput("needs py3langid, of the extra 'languages'", where=_WHERE) from error
    return py3langid
