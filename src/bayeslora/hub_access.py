"""Access to the hub: without a connection to it, the local cache is used at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

PATIENCE = 10.0
"""Seconds within which the hub must accept a connection."""


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """A block that reads from the hub, or without a connection from the local cache.

    The hub's own library tries again for half a minute before it looks there, for every file.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.is_offline_mode() or reachable(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except LocalEntryNotFoundError as error:  # which advises to undo what was set here
        raise ConnectionError("the hub cannot be reached, and it is not in the local cache") from error
    finally:
        constants.HF_HUB_OFFLINE = False


def reachable(address: str) -> bool:
    """Whether a server accepts connections. Behind a proxy it may, for all that can be seen from here."""
    from urllib.request import getproxies  # slow to import: a quick `predict` goes without it

    if {"all", "http", "https"} & getproxies().keys():
        return True
    parts = urlsplit(address)
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        socket.create_connection((parts.hostname or "", port), timeout=PATIENCE).close()
    except (OSError, ValueError):
        return False
    return True
