"""Serves a run until a signal to stop."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.announcement import Announcement
from bayeslora.server.app import create_app
from bayeslora.server.descriptors import room_for
from bayeslora.server.engine import Engine
from bayeslora.server.hosts import Hosts
from bayeslora.server.limits import Limits
from bayeslora.server.server import BACKLOG, Server
from bayeslora.server.trial import require_sound
from bayeslora.server.worker import ModelWorker


def bind(host: str, port: int) -> socket.socket:
    """Bind the socket to listen on, before the model is loaded, so that a port in use is reported early."""
    if not 0 <= port <= 65535:
        raise InputError(f"port is {port}; give a number from 0 (any free port) to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # with an explicit protocol, asyncio sets TCP_NODELAY; otherwise small responses wait 40 ms for the client's ACK
        taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # the latter for labels that no name can have
        raise InputError(f"host is {host!r}, not an address of this machine ({error}); try 127.0.0.1") from error
    try:
        if os.name != "nt":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is in use; choose another with --port, or 0 for any") from error
        raise InputError(f"cannot listen on {host}:{port} ({error.strerror}); choose another address") from error
    return taken


def url_of(listening: socket.socket) -> str:
    """URL of the server."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(
    trained: TrainedModel,
    name: str,
    listening: socket.socket,
    limits: Limits,
    token: str | None,
    evaluation: Path | None,
    hosts: Hosts,
    ready: Callable[[], None],
    announcement: Announcement | None = None,
    idle: float | None = None,
) -> bool:
    """Serve until SIGTERM, SIGINT or the end of ``idle``, then drain accepted requests.

    Args:
        trained: the run.
        name: by which clients know the model.
        listening: socket from :func:`bind`.
        limits: of requests and connections.
        token: bearer token that requests must send, if any.
        evaluation: directory written by ``bayeslora evaluate --out``; its metrics replace the run's own.
        hosts: accepted ``Host`` headers.
        ready: called when the server accepts requests.
        announcement: of which the server gives proof, if it is announced.
        idle: seconds without a question or text after which the server ends.

    Returns:
        whether the worker's thread has ended.
    """
    require_sound(trained)
    limits = replace(limits, connections=room_for(limits.connections))
    app = create_app(Engine(trained, limits), name, token, evaluation, hosts, announcement)
    server = Server(app, limits, ready, idle)

    def told(*_: object) -> None:
        """Handle signals before uvicorn does, and those that uvicorn raises again after shutdown."""
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)
    worker: ModelWorker = app.state.worker
    try:
        server.run(sockets=[listening])
    finally:
        worker.stop()
        ended = worker.join()
    return ended
