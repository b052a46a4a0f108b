"""Servers that keep the model of a run in memory for other commands: ask one, start one, end them."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from filelock import FileLock

from bayeslora.errors import InputError
from bayeslora.runs.directory import RunDirectory
from bayeslora.server.announcement import Announcement, Served, announced, private_directory, real_path
from bayeslora.server.bearer import TOKEN_VARIABLE
from bayeslora.server.client import ask, is_live
from bayeslora.server.libraries import require_libraries

GENEROUS = ("--max-samples", "100000", "--max-prompt-tokens", "1000000", "--timeout", "3600")
"""Limits of a server that answers its own user only."""

END_SECONDS = 60.0
"""Timeout for servers to end."""


def ask_resident(wanted: Served, samples: int | None, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The reply of a server that answers as wanted; ``None`` if there is none.

    Args:
        wanted: what answers depend on.
        samples: number of draws; by default the run's own.
        path: of the endpoint.
        body: of the request.
    """
    for server in _matching(wanted):
        drawn = server.samples if samples is None else samples
        reply = ask(server, path, {**body, "samples": drawn})
        if reply is not None:
            return reply
    return None


def ensure_resident(wanted: Served, words: Sequence[str], minutes: float) -> float:
    """Start a server that answers as wanted, unless one runs; returns when it is ready, with the minutes that it stays.

    Args:
        wanted: what answers depend on.
        words: options of ``bayeslora serve`` for such answers.
        minutes: without a question after which it ends.
    """
    if (stays := _stays(wanted)) is not None:
        return stays
    require_libraries()
    place = private_directory() / f"{socket.gethostname()}-{hashlib.sha256(wanted.run.encode()).hexdigest()[:16]}"
    with FileLock(f"{place}.lock", mode=0o600):  # of two commands that begin at the same time, one starts it
        if (stays := _stays(wanted)) is None:
            _start([*words, "--idle", str(minutes)], place.with_name(f"{place.name}.log"))
    return minutes if stays is None else stays


def _stays(wanted: Served) -> float | None:
    """The longest that a server which answers as wanted stays without a question, in minutes; ``None`` if there is none."""
    live = [server for server in _matching(wanted) if is_live(server)]
    return max((inf if server.idle is None else server.idle for server in live), default=None)


def end_residents(run: RunDirectory) -> list[str]:
    """End this user's servers of a run, whatever their settings; returns their urls."""
    servers = [server for server in announced() if server.served.run == real_path(run) and is_live(server)]
    for server in servers:
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    for server in servers:
        while server.path.exists():
            if time.monotonic() > deadline:
                raise OSError(
                    f"the server at {server.url} (process {server.pid}) has not ended within {END_SECONDS:g} s"
                )
            time.sleep(0.05)
    return [server.url for server in servers]


def _matching(wanted: Served) -> list[Announcement]:
    return [server for server in announced() if server.answers(wanted)]


def _start(words: Sequence[str], log: Path) -> None:
    """Start a server in a session of its own, and wait until it is ready. Its token is in its environment only."""
    command = [sys.executable, "-P", "-m", "bayeslora", "serve", *words, "--port", "0", *GENEROUS, "--quiet", "--json"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(log, flags, 0o600), "wb") as complaints:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            env={**os.environ, TOKEN_VARIABLE: secrets.token_urlsafe()},
        )
    assert server.stdout is not None
    try:
        with server.stdout as told:
            ready = told.readline()  # its url
    except BaseException:
        server.terminate()
        server.wait()
        raise
    if not ready:
        _fail(server.wait(), log)
    server.returncode = 0  # it outlives this process


def _fail(code: int, log: Path) -> None:
    """Raise what a server that could not start has said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = lines[-1].removeprefix("bayeslora: ") if lines else f"no message, exit code {code}"
    raise InputError(reason) if code == 2 else OSError(f"the server could not start: {reason} (see {log})")
