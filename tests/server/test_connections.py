"""Connections that send nothing, or not all, or do not read: they cost the others nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.server import descriptors
from bayeslora.server.app import create_app
from bayeslora.server.descriptors import open_files, room_for
from bayeslora.server.engine import Engine
from bayeslora.server.limits import LOOKS, Limits
from bayeslora.server.metrics import Metrics
from bayeslora.server.worker import ModelWorker
from server.live import ASKED, NAME, connect, held_up, is_cut, live, process, wait_for

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"  # complete with one more line
BODY = b"POST /v1/choices HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


@contextmanager
def served(trained: TrainedModel, token: str | None = None, **limits: Any) -> Iterator[str]:
    bounds = Limits(**{"grace": 2, **limits})
    with live(create_app(Engine(trained, bounds), NAME, token), bounds) as url:
        yield url


@contextmanager
def held(url: str, count: int, sent: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """So many connections that have sent no more than one of these."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect(url, sent[k % len(sent)])) for k in range(count)]


def drip(connection: socket.socket, seconds: float = 60) -> bool:
    """Send byte after byte; whether the server has put an end to it in time."""
    end = time.monotonic() + seconds
    connection.settimeout(0.05)
    while time.monotonic() < end:
        try:
            connection.sendall(b"x")
            if connection.recv(65536) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


# Too many -------------------------------------------------------------------------------------------------------------


def test_connections_that_are_held_make_room_for_others(
    trained: TrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they have sent nothing, or not all of their headers, or not all of a body; their time is not over yet."""
    bounds = {"connections": 12, "client_timeout": 200, "timeout": 200}
    kinds = [b"", HEAD, BODY]
    with served(trained, **bounds) as url, held(url, 3, kinds) as first:
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200  # what they have sent is read by then
        with held(url, 39, kinds) as others:
            for _ in range(3):
                assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
            assert httpx.post(f"{url}/v1/choices", json=ASKED, timeout=60).status_code == 200
            assert all(map(is_cut, first))  # those that were waited for longest
            for last in others[-3:]:
                last.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    last.recv(1)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and "all 12 connections are in use" in told[0].getMessage()


def test_work_leaves_connections_to_those_who_ask_after_the_health(trained: TrainedModel) -> None:
    with held_up(trained, connections=LOOKS + 3) as (engine, _, client), ThreadPoolExecutor(LOOKS) as pool:
        url = str(client.base_url)
        taken = [pool.submit(httpx.post, f"{url}/v1/choices", json=ASKED, timeout=60) for _ in range(6)]
        wait_for(lambda: sum(future.done() for future in taken) == 3)
        for path in ("healthz", "metrics", "v1/models"):
            assert httpx.get(f"{url}/{path}", timeout=60).status_code == 200
        engine.go.set()
        replies = [future.result() for future in taken]
        for _ in range(4):  # what is done makes room
            assert httpx.post(f"{url}/v1/choices", json=ASKED, timeout=60).status_code == 200
    assert sorted(reply.status_code for reply in replies) == [200] * 3 + [429] * 3
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.headers["Retry-After"] == "1" and refused.json()["error"]["type"] == "rate_limit_error"


def test_without_any_that_could_go_a_new_connection_is_refused(
    trained: TrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    app, go, inside = FastAPI(), threading.Event(), []
    app.state.worker = ModelWorker(Engine(trained, Limits()), 1, Metrics([]))

    @app.get("/")
    async def slow() -> None:
        inside.append(1)
        while not go.is_set():
            await asyncio.sleep(0.01)

    with live(app, Limits(connections=LOOKS + 1)) as url, ThreadPoolExecutor(LOOKS + 1) as pool:
        taken = [pool.submit(httpx.get, url, timeout=60) for _ in range(LOOKS + 1)]
        wait_for(lambda: len(inside) == LOOKS + 1)
        for _ in range(3):
            with connect(url) as refused:
                head, _, body = refused.recv(4096).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ") and b'"type": "server_error"' in body and is_cut(refused)
        go.set()
        assert {future.result().status_code for future in taken} == {200}
        assert httpx.get(url).status_code == 200
    assert len(caplog.records) == 1


@pytest.mark.system
def test_a_few_files_are_enough(run: Path) -> None:
    """More connections than the process may have files, several times over, and one line in the log."""
    with process(run, quiet=False, files=128) as (server, url):
        for sent in (HEAD, BODY):
            for count in (150, 500):
                with held(url, count, [sent]):
                    assert httpx.get(f"{url}/healthz", timeout=60).json() == {"status": "ok"}
        server.terminate()
        _, told = server.communicate(timeout=60)
    assert server.returncode == 0 and told.count("connections are in use") == 1 and "Error" not in told
    assert len(told) < 2000


def test_what_is_no_http_is_refused_without_a_word(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", told.append)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [handler])
    for rubbish in (b"\x16\x03\x01" * 20, b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000):
        with connect(url, rubbish) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    asked = httpx.get(f"{url}/v1/models", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    assert asked.status_code == 200 and not told


# Too slow -------------------------------------------------------------------------------------------------------------


def test_headers_have_a_deadline_that_single_bytes_do_not_put_off(trained: TrainedModel) -> None:
    """On a new connection, on one that was used, and behind a body that nobody reads because it came without a token."""
    begun = b"GET / HTTP/1.1\r\nX: "
    with served(trained, token="sesame", client_timeout=1) as url, ThreadPoolExecutor(3) as pool:
        with connect(url, begun) as new, connect(url, HEAD + b"\r\n") as used, connect(url, BODY[:-1]) as refused:
            for connection, status in ((used, b"200"), (refused, b"401")):
                assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)
            used.sendall(begun)
            assert all(pool.map(drip, (new, used, refused)))
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_client_that_does_not_read_is_cut_off(trained: TrainedModel) -> None:
    """With more to read than the buffers of the system hold."""
    with served(trained, client_timeout=0.5) as url, connect(url) as connection:
        connection.settimeout(0.2)
        end, cut = time.monotonic() + 60, False
        while not cut and time.monotonic() < end:
            try:
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
            except TimeoutError:
                continue
            except ConnectionError:
                cut = True
        assert cut and httpx.get(f"{url}/healthz").status_code == 200


@pytest.mark.system
def test_a_slow_but_steady_client_is_served(trained: TrainedModel) -> None:
    with served(trained, client_timeout=3) as url, connect(url) as connection:
        for _ in range(3):
            for part in (HEAD[:10], HEAD[10:], b"\r\n"):
                time.sleep(0.4)
                connection.sendall(part)
            got = b""
            while b'{"status":"ok"}' not in got:
                more = connection.recv(4096)
                assert more
                got += more


# Files ----------------------------------------------------------------------------------------------------------------


def test_the_limit_of_open_files_bounds_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "open_files", lambda: 20)
    for limit, room in ((None, 512), (100_000, 512), (128, 44)):
        monkeypatch.setattr(descriptors, "open_files_limit", lambda limit=limit: limit)
        assert room_for(512) == room
    monkeypatch.setattr(descriptors, "open_files_limit", lambda: 64)
    with pytest.raises(InputError, match=r"limit on open files is 64 and 20 are open, .*raise it to 148 or more"):
        room_for(512)


def test_open_files_are_counted() -> None:
    before = open_files()
    with socket.socket(), socket.socket():
        assert open_files() == before + 2


def test_some_connections_are_always_kept() -> None:
    with pytest.raises(InputError, match="connections is 8; give at least 9"):
        Limits(connections=8)
