"""Python's garbage collector in a command that answers and ends.

Importing torch and transformers creates hundreds of thousands of objects that stay. The collector looks through them again and
again while they come, and once more when the process ends, which takes a second or two.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector inside the block."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def spare_collector_at_exit() -> None:
    """Let the collector pass over everything when the process ends, as its memory is given back anyway."""
    atexit.unregister(gc.freeze)  # once is enough
    atexit.register(gc.freeze)
