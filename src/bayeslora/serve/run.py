"""From a run's directory to a server that listens, and from a signal to its end."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from bayeslora.errors import InputError
from bayeslora.serve.app import create_app
from bayeslora.serve.engine import Engine
from bayeslora.serve.limits import Limits
from bayeslora.train.trained import TrainedModel

TOKEN_VARIABLE = "BAYESLORA_TOKEN"
CONNECTIONS = 1024


def read_token(file: Path | None) -> str | None:
    """The bearer token: from the file, or else from the environment; nothing if there is neither."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: the token cannot be read ({error}); give a text file that holds it") from error
    if not token:
        raise InputError(f"{file}: is empty; put a token in it, or leave --token-file out")
    return token


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on, had before the model is loaded so that a port in use costs no time."""
    if not 0 <= port <= 65535:
        raise InputError(f"port is {port}; give a number from 0 (any that is free) to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # with the protocol named, asyncio sends small answers at once; else each would wait 40 ms for the client's receipt
        taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise InputError(f"host is {host!r}, which is no address of this machine ({error}); try 127.0.0.1") from error
    try:
        if os.name != "nt":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(CONNECTIONS)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is in use; choose another with --port, or 0 for any") from error
        raise InputError(f"{host}:{port} cannot be listened on ({error.strerror}); choose another") from error
    return taken


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listening: socket.socket) -> str:
    """Where the server can be found."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(
    trained: TrainedModel,
    listening: socket.socket,
    limits: Limits,
    token: str | None,
    evaluation: Path | None,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was taken. ``ready`` is called when requests are answered."""
    app = create_app(Engine(trained, limits), trained.directory.path.resolve().name, token, evaluation)
    server = _Server(make_config(app, limits), ready)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises them again when it is done, and then all is well
    server.run(sockets=[listening])


def make_config(app: FastAPI, limits: Limits) -> uvicorn.Config:
    """How uvicorn runs it: without access log, and patient with requests under way when it is told to stop."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(limits.grace)),
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(list(sockets or ()))
        if self.started:
            self._ready()
