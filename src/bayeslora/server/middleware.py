"""Middleware, from the outermost to the innermost."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from contextlib import nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bayeslora.server.client import PROOF
from bayeslora.server.errors import GONE, Failure, busy, error_reply
from bayeslora.server.idle import Idle
from bayeslora.server.metrics import Metrics
from bayeslora.server.web import DOCS, FILES

log = logging.getLogger("bayeslora.server")

OPEN_PATHS = {"/healthz", "/openapi.json", PROOF, DOCS, *FILES}
"""Paths that need no token."""


class Measure:
    """Records the number, status and duration of requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, start = GONE, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.request(scope["path"], status, time.perf_counter() - start)


class Guard:
    """Logs unexpected errors, and sends the client status 500 without details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await error_reply(Failure(500, "internal server error; see the server log"))(scope, receive, send)


class RequireToken:
    """Refuses requests without the bearer token, before reading their body."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            return await self._app(scope, receive, send)
        failure = Failure(
            401,
            "missing or invalid token; send Authorization: Bearer TOKEN",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_reply(failure)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


class LimitWork:
    """Limits concurrent POST requests, so that connections remain for health checks and metrics."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most, self._inside = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        if self._inside >= self._most:
            return await error_reply(busy())(scope, receive, send)
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1


class NoteWork:
    """Notes when the model is asked something, for servers that end when it is not."""

    def __init__(self, app: ASGIApp, idle: Idle) -> None:
        self._app, self._idle = app, idle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        asked = scope["type"] == "http" and scope["method"] == "POST"
        with self._idle.interrupted() if asked else nullcontext():
            await self._app(scope, receive, send)


class LimitBody:
    """Reads the body, with limits on its size and on the time it takes."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except Failure as failure:
            return await error_reply(failure)(scope, receive, send)
        except TimeoutError:
            late = Failure(408, "the request body did not arrive in time", headers={"Connection": "close"})
            return await error_reply(late)(scope, receive, send)
        if body is None:
            return
        given = False

        async def replayed() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replayed, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; ``None`` if the client disconnected before it was complete."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._check(int(announced) if announced.isdigit() else 0)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, size: int) -> None:
        if size > self._most:
            raise Failure(413, f"the request body is larger than {self._most} bytes", headers={"Connection": "close"})
