"""A client of a server that was announced. It needs the standard library only, so that it starts at once."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any

from bayeslora.server.announcement import Announcement

PROOF = "/v1/proof"
"""Path at which a server proves that it has written its announcement."""

CONNECT_SECONDS = 10.0
"""Timeout of the proof, for which a server needs no model."""

ANSWER_SECONDS = 3600.0
"""Timeout of an answer; servers have one of their own."""


class Gone(Exception):
    """Where the server was, there is nobody, or somebody else."""


def is_live(server: Announcement) -> bool:
    """Whether a server still runs. The announcement of one that has ended is removed."""
    try:
        _connect(server).close()
    except Gone:
        server.remove()
        return False
    except (OSError, HTTPException, ValueError):
        return False
    return True


def ask(server: Announcement, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The server's reply to a request; ``None`` if it gives none, for whatever reason."""
    try:
        with closing(_connect(server)) as connection:
            if connection.sock is None:
                return None
            connection.sock.settimeout(ANSWER_SECONDS)
            headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
            if server.token is not None:
                headers["Authorization"] = f"Bearer {server.token}".encode()
            status, reply = _exchange(connection, "POST", path, json.dumps(body).encode(), headers)
    except Gone:
        server.remove()
        return None
    except (OSError, HTTPException, ValueError):
        return None
    return reply if status == 200 else None


def _connect(server: Announcement) -> HTTPConnection:
    """A connection whose other end has proven that it wrote the announcement; it is never opened again.

    Raises:
        Gone: nobody listens there, or somebody else does.
    """
    connection = HTTPConnection(server.host, server.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        connection.auto_open = 0
        challenge = secrets.token_hex(32)
        status, reply = _exchange(connection, "GET", f"{PROOF}?challenge={challenge}")
        if status >= 500:
            raise ConnectionError(f"{server.url} cannot answer now")
        if not hmac.compare_digest(str(reply.get("proof")).encode(), server.proof(challenge).encode()):
            raise Gone
    except ConnectionRefusedError:
        raise Gone from None
    except BaseException:
        connection.close()
        raise
    return connection


def _exchange(
    connection: HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str | bytes] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of the reply to a request."""
    connection.request(method, path, body, dict(headers or {}))
    response = connection.getresponse()
    reply = json.loads(response.read())
    return response.status, reply if isinstance(reply, dict) else {}
