"""Output that nobody reads any longer, as of ``bayeslora --help | head -3``: the process ends silently."""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO

CLOSED_PIPE = 141
"""Exit code of a command whose reader has left: the one that shells report for processes that SIGPIPE ends."""


def reader_left() -> bool:
    """Whether the pipe behind stdout or stderr is closed, for a process in which writing to some pipe has failed.

    What is still to be written there is dropped, also when the interpreter ends.
    """
    left = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_closed(stream)]
    for stream in left:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    return bool(left)


def _is_closed(stream: TextIO) -> bool:
    """Whether nobody can read what is written. A stream without a buffer says so only if it is asked for its state."""
    try:
        stream.flush()
        watch = select.poll()
        watch.register(stream.fileno(), 0)  # only what is always reported: errors and a closed end
        return bool(watch.poll(0))
    except BrokenPipeError:
        return True
    except (OSError, AttributeError):  # no file of the system, or a system without poll
        return False
