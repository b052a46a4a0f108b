"""uvicorn that accepts a few connections at a time, with a deadline for shutdown."""

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
from bayeslora.server.idle import Idle
from bayeslora.server.limits import Limits
from bayeslora.server.worker import ModelWorker

log = logging.getLogger("bayeslora.server")

BACKLOG = 1024
"""Connections that the system queues until they are accepted."""

LAST_WORDS = 0.5
"""Seconds to send error responses for requests cancelled at shutdown."""


class Server(uvicorn.Server):
    """Serves until a signal to stop, then drains accepted requests, for at most the grace period.

    Args:
        app: from :func:`bayeslora.server.app.create_app`.
        limits: number of connections, timeouts and grace period.
        ready: called when the server accepts requests.
        idle: seconds without a question or text after which it ends in the same way.
    """

    def __init__(self, app: FastAPI, limits: Limits, ready: Callable[[], None], idle: float | None = None) -> None:
        super().__init__(_config(app, limits))
        self._worker: ModelWorker = app.state.worker
        self._app, self._idle = app, idle
        self._grace = limits.grace
        self._ready = ready

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Start listening, and restore the backlog, which asyncio sets to the connections accepted per iteration."""
        await super().startup(list(sockets or ()))
        for listening in sockets or ():
            listening.listen(BACKLOG)
        if self.started:
            self._ready()
            if self._idle is not None:
                self._ending = asyncio.create_task(self._end_when_idle(self._app.state.idle, self._idle))

    async def _end_when_idle(self, idle: Idle, seconds: float) -> None:
        await idle.reach(seconds)
        self.should_exit = True

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept nothing more, drain accepted requests, and cancel the rest when the grace period is over."""
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
    """Settings of uvicorn: our own connections, no WebSockets, which would bypass their limits, and no log line per request,
    valid or not."""
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
        timeout_graceful_shutdown=math.ceil(limits.grace + 2 * LAST_WORDS),  # fallback; normally not reached
    )
