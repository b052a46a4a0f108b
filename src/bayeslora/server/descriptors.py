"""How many connections the limit of open files leaves room for."""

from __future__ import annotations

import os
import sys

from bayeslora.errors import InputError
from bayeslora.server.limits import LOOKS

ACCEPTED = 8
"""Connections that are accepted in one turn of the event loop."""

SPARE = 64
"""Files that are left to others: to libraries, and to connections that are accepted but not yet counted, for which it
takes some turns."""

ASSUMED = 32
"""Files that are open, where the system does not tell."""


def room_for(wanted: int) -> int:
    """At most so many connections; fewer where the limit of open files wants it."""
    limit = open_files_limit()
    if limit is None:
        return wanted
    taken = open_files()
    room = min(wanted, limit - taken - SPARE)
    if room <= LOOKS:
        raise InputError(
            f"the limit of open files is {limit}, and {taken} are open: that leaves no room for connections; raise it to "
            f"{taken + SPARE + 8 * LOOKS} or more (ulimit -n)"
        )
    return room


def open_files_limit() -> int | None:
    """How many files this process may open; nothing where there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def open_files() -> int:
    """How many files this process has open, about."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return ASSUMED
