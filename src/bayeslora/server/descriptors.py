"""The number of connections that the limit on open files allows."""

from __future__ import annotations

import os
import sys

from bayeslora.errors import InputError
from bayeslora.server.limits import LOOKS

ACCEPTED = 8
"""Connections accepted per iteration of the event loop."""

SPARE = 64
"""File descriptors kept free for libraries, and for accepted connections that are not counted yet, which takes a few
iterations of the event loop."""

ASSUMED = 32
"""Number of open files assumed if the system does not report it."""


def room_for(wanted: int) -> int:
    """At most ``wanted`` connections; fewer if the limit on open files requires it."""
    limit = open_files_limit()
    if limit is None:
        return wanted
    taken = open_files()
    room = min(wanted, limit - taken - SPARE)
    if room <= LOOKS:
        raise InputError(
            f"the limit on open files is {limit} and {taken} are open, which leaves none for connections; raise it to "
            f"{taken + SPARE + 8 * LOOKS} or more (ulimit -n)"
        )
    return room


def open_files_limit() -> int | None:
    """Limit on open files of this process; ``None`` if unlimited."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def open_files() -> int:
    """Approximate number of open files of this process."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return ASSUMED
