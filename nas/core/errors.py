"""The exception tree.

    NasError                     exit code 1
      InvalidInput               3   a file, flag or layout the user gave cannot be used
        UnknownName              3   an unknown name; suggests the nearest valid one
        Unsupported              3   understood, but this runtime, device or build cannot carry it
        StudyChanged             3   a study cannot be resumed with other inputs than it began with
      CandidateFailed            1   the candidate's own fault; recorded as its result, never retried
      InfrastructureFailed       4   the host, device, network or store; a retry can help
        StudyBusy                4   another live process holds the study or device
        NotTrusted               3   a device and its agent do not trust each other; of
        `nas.measure.devices.transports.base`
      PluginConflict             3   an installed plug-in adds a name that hilnas or another plug-in has

A message says what went wrong, where, and what would have been valid.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

FailureReason = Literal[
    "out_of_memory",
    "timeout",
    "crash",
    "garbage_output",
    "not_finite",
    "export",
    "gate",
    "diverged",
    "over_limit",
    "unmeasured",
]


class NasError(Exception):
    """Base of every error that hilnas raises deliberately."""

    exit_code: ClassVar[int] = 1


class InvalidInput(NasError, ValueError):
    """The user's input cannot be used.

    Args:
        message: what is wrong and what would be valid.
        where: `file:line` or the flag that carried it.
    """

    exit_code = 3

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.where = where


class UnknownName(InvalidInput):
    """An unknown name; the message suggests the nearest valid one."""

    def __init__(self, what: str, name: str, valid: Iterable[str], *, where: str | None = None) -> None:
        choices = sorted(valid)
        super().__init__(f"unknown {what} {name!r}{nearest(name, choices)}", where=where)
        self.name = name


class Unsupported(InvalidInput):
    """Valid, but not supported by this runtime, device or build."""


class StudyChanged(InvalidInput):
    """A study cannot be resumed: an input of its results is another one than it began with. Its state is kept."""


class CandidateFailed(NasError):
    """The candidate's own failure: stored as its result and not retried."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


class InfrastructureFailed(NasError):
    """The host, a device, the network or the store failed. Never the candidate's fault; a retry can help."""

    exit_code = 4


class StudyBusy(InfrastructureFailed):
    """Another live process holds the study."""


class PluginConflict(NasError):
    """An installed plug-in adds what there is already. It is in no part of a user's file, so no `InvalidInput`."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}: update or uninstall one of them")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory did not suffice; torch, which raises a plain RuntimeError on a CPU, is not imported."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` where one choice is close, else the list of valid names, else nothing."""
    names = list(choices)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""
