"""Parts of pages that look the same to every visitor: rendered once for all who look at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from markupsafe import Markup

MOST = 256
"""Parts that are kept, some 100 kB each at most."""


class SharedParts:
    """The parts that were rendered last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[object, Markup]] = OrderedDict()

    def part(self, key: Hashable, shows: object, render: Callable[[], Markup]) -> Markup:
        """A part: as it was rendered before, as long as it `shows` the very same object.

        Args:
            key: which part, with everything else that it depends on.
            shows: what it is rendered from.
            render: does so.
        """
        with self._lock:
            kept = self._kept.get(key)
        if kept is None or kept[0] is not shows:
            kept = shows, render()
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            if len(self._kept) > MOST:
                self._kept.popitem(last=False)
        return kept[1]
