"""What a device says, made fit to be stored and shown."""

from __future__ import annotations

from nas.core.device import TOLD_LENGTH


def plain(text: str) -> str:
    """One line of printable characters, cut where it is too long (see `nas.core.device.Told`).

    Control characters, those that turn text around, and the zeros at the end of device tree strings become spaces.
    """
    shown = "".join(character if character.isprintable() else " " for character in text[: 4 * TOLD_LENGTH])
    return " ".join(shown.split())[:TOLD_LENGTH].strip()
