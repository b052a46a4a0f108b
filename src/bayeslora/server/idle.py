"""How long the model has not been asked anything, after which a server may end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Idle:
    """Counts from the end of the last request, or from the start if there was none."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = time.monotonic()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """A request is under way inside the block."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long no request has been under way."""
        return 0.0 if self._inside else time.monotonic() - self._since

    async def reach(self, seconds: float) -> None:
        """Return as soon as it has lasted for so long."""
        while (left := seconds - self.seconds) > 0:
            await asyncio.sleep(left)
