"""Limits on the number of connections, and on the time that they wait for their clients.

A connection waits for its client while a request is incomplete or a response is not read; after a timeout it is closed. At
the maximum number of connections, a new one replaces the one that has waited longest. If all of them process requests, the
new one is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from bayeslora.server.errors import error_body

log = logging.getLogger("bayeslora.server")

QUIET = 60.0
"""Minimum seconds between two warnings about too many connections."""

_BODY = json.dumps(error_body(503, "too many connections; try again later")).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Door:
    """Limits the number of connections; closes those that wait for their clients to make room.

    Args:
        most: maximum number of connections.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # waiting for their clients, longest first
        self._turned_away = 0
        self._told = -QUIET

    def enter(self, connection: Connection) -> bool:
        """Add a connection, if necessary in place of a waiting one; returns whether there was room."""
        if len(self._inside) >= self._most:
            self._turn_away()
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            self.leave(longest)
            longest.cut()
        self._inside.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a connection."""
        self._inside.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: Connection) -> None:
        """Mark a connection as waiting for its client; one that waits already keeps its position."""
        self._waiting.setdefault(connection)

    def work(self, connection: Connection) -> None:
        """Mark a connection as not waiting for its client."""
        self._waiting.pop(connection, None)

    def _turn_away(self) -> None:
        self._turned_away += 1
        if (now := time.monotonic()) - self._told >= QUIET:
            log.warning(
                "all %d connections are in use; %d new ones were refused or replaced one waiting for its client",
                self._most,
                self._turned_away,
            )
            self._told, self._turned_away = now, 0


class Connection(H11Protocol):
    """An HTTP connection with a timeout for its client.

    Args:
        door: limits the number of connections.
        seconds: timeout for receiving headers, and for the client to read.
    """

    def __init__(self, *args: Any, door: Door, seconds: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._door, self._seconds = door, seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, or refuse it."""
        super().connection_made(transport)
        if self._door.enter(self):
            self._follow()
        else:
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        self._door.leave(self)
        self._set_deadline(wanted=False)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Process data from the client."""
        super().handle_events()
        self._follow()

    def on_response_complete(self) -> None:
        """Wait for the next request after a complete response."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """Start the timeout when the client stops reading."""
        super().pause_writing()
        self._follow()

    def resume_writing(self) -> None:
        """Update the timeout when the client reads again."""
        super().resume_writing()
        self._follow()

    def cut(self) -> None:
        """Close the connection immediately; unsent data is lost."""
        self.transport.abort()

    def _follow(self) -> None:
        """Update whether the connection waits for its client. Bodies have a separate deadline, that of the request."""
        if self.transport.is_closing():
            return
        between = self.cycle is None or self.cycle.response_complete
        stuck = between or self.flow.write_paused
        if stuck or self.cycle.more_body:
            self._door.wait(self)
        else:
            self._door.work(self)
        self._set_deadline(wanted=stuck)

    def _set_deadline(self, *, wanted: bool) -> None:
        """Set or cancel the deadline. One that is set is not extended, so that single bytes cannot postpone it."""
        if not wanted and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif wanted and self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self.cut)
