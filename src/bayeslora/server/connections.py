"""Connections: how many there may be, and how long they may wait for their clients.

The server waits for a client that has not sent all of a request yet, or does not read its answer. Whoever is waited for too
long is cut off. When there is no more room, a new connection takes the place of the one that has been waited for longest;
when all of them are at work, it is refused.
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
"""Seconds between two lines of the log about connections for which there is no room."""

_BODY = json.dumps(error_body(503, "there are too many connections; try again later")).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Door:
    """Who is inside, and who has to leave for others.

    Args:
        most: connections at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # those that wait for their clients, longest first
        self._turned_away = 0
        self._told = -QUIET

    def enter(self, connection: Connection) -> bool:
        """Let it in, if need be in place of one that waits for its client; whether there was room."""
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
        """It is over."""
        self._inside.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: Connection) -> None:
        """It waits for its client, from now on or still."""
        self._waiting.setdefault(connection)

    def work(self, connection: Connection) -> None:
        """It has all it needs from its client."""
        self._waiting.pop(connection, None)

    def _turn_away(self) -> None:
        self._turned_away += 1
        if (now := time.monotonic()) - self._told >= QUIET:
            log.warning(
                "all %d connections are in use; %d new ones were refused, or took the place of one that waited for its client",
                self._most,
                self._turned_away,
            )
            self._told, self._turned_away = now, 0


class Connection(H11Protocol):
    """One connection.

    Args:
        door: where it enters.
        seconds: that it waits for headers, and for its client to read.
    """

    def __init__(self, *args: Any, door: Door, seconds: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._door, self._seconds = door, seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enter, or be refused."""
        super().connection_made(transport)
        if self._door.enter(self):
            self._follow()
        else:
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave."""
        self._door.leave(self)
        self._set_deadline(wanted=False)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Something has come from the client."""
        super().handle_events()
        self._follow()

    def on_response_complete(self) -> None:
        """An answer is complete; the next request may come."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._follow()

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._follow()

    def cut(self) -> None:
        """End it at once; what was not sent yet is lost."""
        self.transport.abort()

    def _follow(self) -> None:
        """Note whether it waits for its client. Bodies have a deadline of their own, that of the request."""
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
        """A deadline that is set stays as it is for as long as it is wanted: single bytes put nothing off."""
        if not wanted and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif wanted and self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self.cut)
