"""uvicorn, told to accept a few connections at a time, and with one deadline for its end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from bayeslora.server.connections import Connection, Door
from bayeslora.server.descriptors import ACCEPTED
from bayeslora.server.limits import Limits
from bayeslora.server.worker import ModelWorker

log = logging.getLogger("bayeslora.server")

BACKLOG = 1024
"""Connections that the system keeps until they are accepted."""

LAST_WORDS = 0.5
"""Seconds in which clients whose requests were given up are told so."""


class Server(uvicorn.Server):
    """Serves until it is told to stop, and then finishes what was taken, but not for longer than the grace.

    Args:
        app: of :func:`bayeslora.server.app.create_app`.
        limits: how many connections, and the grace.
        ready: called when requests are answered.
    """

    def __init__(self, app: FastAPI, limits: Limits, ready: Callable[[], None]) -> None:
        super().__init__(_config(app, limits))
        self._worker: ModelWorker = app.state.worker
        self._grace = limits.grace
        self._ready = ready

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Listen. The event loop has made the system keep as few connections as are accepted in one turn."""
        await super().startup(list(sockets or ()))
        for listening in sockets or ():
            listening.listen(BACKLOG)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Take nothing more, finish what was taken, and give up the rest when the grace is over."""
        self._worker.close()
        ending = asyncio.create_task(self._give_up_in_time())
        try:
            await super().shutdown(list(sockets or ()))
        finally:
            ending.cancel()

    async def _give_up_in_time(self) -> None:
        await asyncio.sleep(self._grace)
        log.warning("some requests were not finished within %g s", self._grace)
        self._worker.stop()
        await asyncio.sleep(LAST_WORDS)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.cut()


def _config(app: FastAPI, limits: Limits) -> uvicorn.Config:
    """How uvicorn runs it: with connections of our own, without web sockets, which would escape their bounds, and without a
    line in the log for every request, be it good or no HTTP at all."""
    protocol: Any = partial(Connection, door=Door(limits.connections), seconds=limits.client_timeout)
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=protocol,
        ws="none",
        backlog=ACCEPTED,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.grace + 2 * LAST_WORDS),  # never needed, if all is well
    )
