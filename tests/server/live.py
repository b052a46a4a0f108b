"""A server as people meet it: uvicorn on a port of this machine, in a thread, with a model that can be held up."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.engine import Answered, Engine, Piece, Question, Text, Written
from bayeslora.server.limits import Limits
from bayeslora.server.run import bind, url_of
from bayeslora.server.server import Server
from bayeslora.tasks import EncodedItem

NAME = "tiny-run"
ASKED = {"question": "Is 3 even?", "choices": ["yes", "no", "who knows"]}


class HeldUp(Engine):
    """Answers and writes as the real one does, once it is let go; notes what was done together."""

    def __init__(self, trained: TrainedModel, limits: Limits) -> None:
        super().__init__(trained, limits)
        self.go = threading.Event()
        self.begun = threading.Event()
        self.log: list[tuple[str, int]] = []
        self.delay = 0.0

    def answer(self, questions: Sequence[Question], encoded: Sequence[EncodedItem]) -> list[Answered]:
        self._note("answer", len(questions))
        return super().answer(questions, encoded)

    def write(
        self, texts: Sequence[Text], lengths: Sequence[int], tell: Callable[[Mapping[int, Piece]], None]
    ) -> list[Written]:
        self._note("write", len(texts))

        def slowly(pieces: Mapping[int, Piece]) -> None:
            time.sleep(self.delay)
            self.log.append(("token", len(pieces)))
            tell(pieces)

        return super().write(texts, lengths, slowly)

    def _note(self, what: str, count: int) -> None:
        self.log.append((what, count))
        self.begun.set()
        assert self.go.wait(60)


@contextmanager
def live(app: FastAPI, limits: Limits | None = None) -> Iterator[str]:
    """The url, for as long as the block lasts."""
    server = Server(app, limits or Limits(grace=2), ready=lambda: None)
    with bind("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextmanager
def held_up(trained: TrainedModel, **limits: Any) -> Iterator[tuple[HeldUp, Any, httpx.Client]]:
    """An engine that waits, the worker, and a client."""
    bounds = Limits(**{"grace": 2, **limits})
    engine = HeldUp(trained, bounds)
    app = create_app(engine, NAME)
    with live(app, bounds) as url, httpx.Client(base_url=url, timeout=60) as client:
        try:
            yield engine, app.state.worker, client
        finally:
            engine.go.set()


@contextmanager
def process(
    run: Path, *options: object, quiet: bool = True, files: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``bayeslora serve`` as people start it, and its url. ``files`` is the limit of open files."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    words = [sys.executable, "-m", "bayeslora", "serve", run, "--port", 0, "--json", *options, *["--quiet"] * quiet]
    started = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    )
    try:
        assert started.stdout is not None
        yield started, json.loads(started.stdout.readline())["url"]
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def connect(url: str, sent: bytes = b"") -> socket.socket:
    """A connection that has sent so much; it waits for a minute at most."""
    address = httpx.URL(url)
    opened = socket.create_connection((address.host, address.port or 0), timeout=60)
    opened.sendall(sent)
    return opened


def is_cut(connection: socket.socket) -> bool:
    """Whether the server has ended it, or does so while we wait."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def settled(log: Sequence[object]) -> int:
    """How long it is, once nothing more is added."""
    length = -1
    while length != len(log):
        length = len(log)
        time.sleep(0.3)
    return length


def value_of(metrics: str, name: str) -> float:
    """One figure of a text for Prometheus."""
    return next((float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(f"{name} ")), 0.0)
