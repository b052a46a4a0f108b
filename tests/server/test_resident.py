"""Predictions by a server that has the model in memory already: they are those of the process itself, and come from no other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from bayeslora import load_run
from bayeslora.errors import InputError
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.announcement import Announcement, Served, announced, directory, private_directory
from bayeslora.server.app import create_app
from bayeslora.server.client import PROOF, ask, is_live
from bayeslora.server.engine import Engine
from bayeslora.server.idle import Idle
from bayeslora.server.limits import Limits
from bayeslora.server.resident import ensure_resident
from bayeslora.server.run import bind
from bayeslora.server.server import Server
from server.live import ASKED, NAME, held_up, live, process, wait_for
from tasks.cases import write_lines
from train.tiny import bayeslora, options

QUESTION = ["--question", "Is 3 even?", "--choice", "yes", "--choice", "no", "--choice", "who knows"]
CPU = ["--device", "cpu"]
TOKEN = "sesame-öffne-dich"


class Loaded(Exception):
    """The model would be loaded."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers of a test are announced."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / "bayeslora"


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a run is told by an exception."""

    def load(*_: object, **__: object) -> None:
        raise Loaded

    monkeypatch.setattr("bayeslora.runs.load.load_run", load)


def served(run: Path, **changes: Any) -> Served:
    settings = {"raw": False, "draw_layers": None, "device": "cpu", "trust_remote_code": False, **changes}
    return Served.of(RunDirectory(run), None, **settings)


def announcement(what: Served, **changes: Any) -> Announcement:
    settings: dict[str, Any] = {"place": "cpu", "samples": 3, "host": "127.0.0.1", "port": 1, "token": TOKEN}
    return Announcement(served=what, **{**settings, **changes})


@contextmanager
def resident(
    trained: TrainedModel, what: Served, limits: Limits | None = None, idle: float | None = None
) -> Iterator[Announcement]:
    """A server of this process that has announced itself."""
    limits = limits or Limits(grace=2)
    own = announcement(what, samples=trained.config.prediction.samples, idle=idle)
    app = create_app(Engine(trained, limits), NAME, TOKEN, announcement=own)
    with live(app, limits) as url:
        own = replace(own, port=urlsplit(url).port)
        own.write()
        try:
            yield own
        finally:
            own.remove()


@contextmanager
def stranger(proof: str = "") -> Iterator[tuple[int, list[Any]]]:
    """A port on which another program listens, and what it is told."""
    told: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            told.append((self.command, self.path, dict(self.headers)))
            body = json.dumps({"proof": proof, "answer": "no"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _reply

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, told
        finally:
            server.shutdown()
            thread.join()


# The same answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [[], ["--json"]])
@pytest.mark.parametrize(
    "asked",
    [
        QUESTION,
        [*QUESTION, "--samples", "0", "--level", "0.8"],
        [*QUESTION, "--samples", "5", "--passage", "It is said that all of them are."],
        ["--question", "So many", "--choice", "a", "--choice", "ü", "--bare"],
    ],
    ids=range(4),
)
def test_a_server_says_what_the_process_would(
    run: Path,
    trained: TrainedModel,
    asked: list[str],
    output: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["predict", run, *asked, *CPU, *output, "--quiet"]
    assert bayeslora(*words) == 0
    want = capsys.readouterr()
    monkeypatch.setattr("bayeslora.runs.load.load_run", None)  # which cannot be called
    with resident(trained, served(run)):
        assert bayeslora(*words) == 0
    assert capsys.readouterr() == want and want.out


def test_a_text_is_classified_as_by_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"the number {k}", "label": ["even", "odd"][k % 2]} for k in range(40)]
    task, run = write_lines(tmp_path / "mine.jsonl", rows), tmp_path / "run"
    assert bayeslora(*options(run, "--task", task)) == 0
    capsys.readouterr()
    trained = load_run(run, device="cpu")
    for words in (["--text", "the  number 7"], ["--text", "the number 8", "--json"]):
        with monkeypatch.context() as patched:
            assert bayeslora("predict", run, *words, *CPU, "--quiet") == 0
            want = capsys.readouterr()
            patched.setattr("bayeslora.runs.load.load_run", None)
            with resident(trained, served(run)) as server:
                assert bayeslora("predict", run, *words, *CPU, "--quiet") == 0
        assert capsys.readouterr() == want and want.out
    with resident(trained, served(run)) as server:
        reply = ask(server, "/v1/classify", {"text": "the number 7", "deterministic": True, "samples": 2})
        assert reply is not None and reply["choices"] == ["even", "odd"] and len(reply["draws"]) == 2
        assert len(reply["deterministic"]) == 2


def test_only_runs_on_labels_classify(url: str) -> None:
    refused = httpx.post(f"{url}/v1/classify", json={"text": "x"})
    assert refused.status_code == 400 and "not trained to classify" in refused.text


def test_what_is_asked_alone_is_in_no_batch(trained: TrainedModel) -> None:
    with held_up(trained) as (engine, worker, client), ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.post, "/v1/choices", json=ASKED)
        assert engine.begun.wait(20)
        bodies = [{**ASKED, "alone": alone} for alone in (True, True, False, False)]
        waiting = [pool.submit(client.post, "/v1/choices", json=body) for body in bodies]
        wait_for(lambda: worker.depth == len(bodies))
        engine.go.set()
        assert all(future.result().status_code == 200 for future in [first, *waiting])
        assert sorted(engine.log) == [("answer", 1)] * 3 + [("answer", 2)]


# Others are not asked -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    "more", [["--raw"], ["--draw-layers", "last:1"], ["--device", "auto"], ["--model", "."], ["--trust-remote-code"]]
)
def test_a_server_with_other_settings_is_not_asked(run: Path, trained: TrainedModel, more: list[str]) -> None:
    with resident(trained, served(run)), pytest.raises(Loaded):
        bayeslora("predict", run, *QUESTION, *CPU, *more)


@pytest.mark.usefixtures("unloadable")
def test_a_server_with_the_same_settings_is_asked(run: Path, trained: TrainedModel, place: Path) -> None:
    """By whatever path the run is named, with the device by its name or as it was given to the server."""
    link = place.parent / "link"
    link.symlink_to(run)
    what = served(run, device="auto", raw=True, draw_layers="last:1")
    with resident(trained, what):
        for device in ("auto", "cpu"):
            words = ["--raw", "--draw-layers", "last:1", "--device", device]
            assert bayeslora("predict", link, *QUESTION, *words) == 0


@pytest.mark.usefixtures("unloadable")
def test_threads_and_devices_of_the_server_are_those_of_the_process(
    run: Path, trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with resident(trained, served(run)):
        monkeypatch.setenv("OMP_NUM_THREADS", "77")
        with pytest.raises(Loaded):
            bayeslora("predict", run, *QUESTION, *CPU)


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("name", ["calibration", "config"])
def test_a_server_of_an_older_state_is_not_asked(name: str, run: Path, trained: TrainedModel, tmp_path: Path) -> None:
    """After ``calibrate``, or with settings changed by hand. It stays announced, so that ``--stop`` finds it."""
    copy = tmp_path / "copy"
    copy.symlink_to(run)
    changed: Path = getattr(RunDirectory(run), name)
    before = changed.read_text()
    with resident(trained, served(copy)) as server:
        assert bayeslora("predict", run, *QUESTION, *CPU) == 0
        try:
            changed.write_text(f"{before} ")
            with pytest.raises(Loaded):
                bayeslora("predict", run, *QUESTION, *CPU)
        finally:
            changed.write_text(before)
        assert server.path.exists()
        assert bayeslora("predict", run, *QUESTION, *CPU) == 0


def test_what_a_server_refuses_is_told_by_the_process(
    run: Path, trained: TrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", run, *QUESTION, *CPU, "--level", "0.9999", "--quiet"]
    assert bayeslora(*words) == 2
    want = capsys.readouterr()
    with resident(trained, served(run)) as server:
        assert bayeslora(*words) == 2
        assert server.path.exists()
    assert capsys.readouterr() == want
    few = Limits(grace=2, max_samples=3)
    with resident(trained, served(run), few):
        assert bayeslora("predict", run, *QUESTION, *CPU, "--samples", 4, "--json", "--quiet") == 0


# Announcements that cannot be trusted ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("unloadable")
def test_a_server_that_has_died_is_forgotten(run: Path, free_port: int) -> None:
    own = announcement(served(run), port=free_port)
    own.write()
    with pytest.raises(Loaded):
        bayeslora("predict", run, *QUESTION, *CPU)
    assert not own.path.exists()


@pytest.mark.usefixtures("unloadable")
def test_another_program_at_the_port_is_told_nothing(run: Path) -> None:
    """Neither the token nor the question."""
    with stranger() as (port, told):
        own = announcement(served(run), port=port)
        own.write()
        with pytest.raises(Loaded):
            bayeslora("predict", run, *QUESTION, *CPU)
    assert not own.path.exists()
    assert [(method, path.partition("?")[0]) for method, path, _ in told] == [("GET", PROOF)]
    assert "sesame" not in str(told) and own.secret not in str(told) and "Authorization" not in str(told)


def test_a_proof_cannot_be_used_again(run: Path) -> None:
    own = announcement(served(run))
    with stranger(own.proof("of an earlier challenge")) as (port, told):
        assert not is_live(replace(own, port=port)) and len(told) == 1


def test_a_server_proves_its_announcement_only(run: Path, trained: TrainedModel, url: str) -> None:
    with resident(trained, served(run)) as server:
        assert is_live(server) and ask(server, "/v1/choices", ASKED) is not None
        assert ask(replace(server, token="wrong"), "/v1/choices", ASKED) is None and server.path.exists()
        assert not is_live(replace(server, secret="another"))
        reply = httpx.get(f"{server.url}{PROOF}", params={"challenge": "x"})  # needs no token
        assert reply.json() == {"proof": server.proof("x")} and server.secret not in reply.text
    assert httpx.get(f"{url}{PROOF}", params={"challenge": "x"}).status_code == 404  # has announced nothing
    assert PROOF not in httpx.get(f"{url}/openapi.json").json()["paths"]


def link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    "spoil",
    [
        link,
        pipe,
        lambda path: path.chmod(0o640),
        lambda path: path.chmod(0o602),
        lambda path: path.rename(path.with_name("other-1.json")),
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(path.read_text().replace('"port": ', '"port": "x", "p": ')),
        lambda path: path.write_text(path.read_text().replace('"host": "127.0.0.1"', '"host": 7')),
        lambda path: path.parent.chmod(0o750),
        lambda path: link(path.parent),
    ],
    ids=range(11),
)
def test_an_announcement_of_doubtful_origin_is_ignored(
    run: Path, trained: TrainedModel, spoil: Callable[[Path], object]
) -> None:
    with resident(trained, served(run)) as server:
        assert bayeslora("predict", run, *QUESTION, *CPU) == 0
        spoil(server.path)
        with pytest.raises(Loaded):
            bayeslora("predict", run, *QUESTION, *CPU)


@pytest.mark.usefixtures("unloadable")
def test_an_announcement_of_another_user_is_ignored(
    run: Path, trained: TrainedModel, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with resident(trained, served(run)) as server:
        assert list(announced()) == [server]
        found = os.getuid()
        with monkeypatch.context() as patched:
            patched.setattr(os, "getuid", lambda: found + 1)
            patched.setattr("bayeslora.server.announcement.directory", lambda: place)
            assert not list(announced())
            with pytest.raises(InputError, match="is not a private directory of this user"):
                private_directory()
            patched.setattr("bayeslora.server.announcement._is_ours", lambda place: True)
            assert not list(announced())  # the file alone is another's


def test_a_directory_of_others_is_not_written_to(run: Path, place: Path) -> None:
    place.mkdir(mode=0o755)
    with pytest.raises(InputError, match=r"bayeslora: is not a private directory of this user; remove it"):
        announcement(served(run)).write()
    place.rmdir()
    place.symlink_to(place.parent)
    with pytest.raises(InputError, match="is not a private directory of this user"):
        announcement(served(run)).write()


def test_a_file_is_for_this_user_alone(run: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = announcement(served(run))
    old = os.umask(0)
    try:
        own.write()
    finally:
        os.umask(old)
    assert own.path.stat().st_mode & 0o777 == 0o600 and place.stat().st_mode & 0o777 == 0o700
    assert list(announced()) == [own] and TOKEN not in repr(own) and own.secret not in repr(own)
    monkeypatch.setenv("BAYESLORA_CACHE", str(place.parent / "cache"))
    place.parent.chmod(0o700)
    for elsewhere in ("", str(place / "nowhere"), __file__):
        monkeypatch.setenv("XDG_RUNTIME_DIR", elsewhere)
        assert directory() == place.parent / "cache" / "servers" and not list(announced())


# Idle servers ---------------------------------------------------------------------------------------------------------


def test_idleness_counts_from_the_end_of_the_last_request() -> None:
    idle = Idle()

    async def work() -> float:
        start = time.monotonic()
        ending = asyncio.create_task(idle.reach(0.3))
        with idle.interrupted():
            with idle.interrupted():
                await asyncio.sleep(0.4)
            assert idle.seconds == 0
            await asyncio.sleep(0.1)
        await asyncio.wait_for(ending, 10)
        return time.monotonic() - start

    took = asyncio.run(work())
    assert 0.8 <= took < 5 and idle.seconds >= 0.3


def test_a_server_that_nobody_asks_ends(trained: TrainedModel) -> None:
    """Looking at it does not count; what is asked does."""
    app = create_app(Engine(trained, Limits()), NAME)
    server = Server(app, Limits(grace=2), lambda: None, idle=1.0)
    with bind("127.0.0.1", 0) as listening:
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        time.sleep(0.6)
        assert httpx.post(f"{url}/v1/choices", json=ASKED, timeout=60).status_code == 200
        asked = time.monotonic()
        while thread.is_alive() and time.monotonic() < asked + 60:
            with suppress(httpx.HTTPError):
                httpx.get(f"{url}/healthz")
            time.sleep(0.05)
        assert 0.9 <= time.monotonic() - asked < 50


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*QUESTION, "--stay", "0"], "stay is 0.0; give a finite number above 0"),
        (["--input", "x.jsonl", "--stay", "1"], "--stay is for single questions"),
    ],
)
def test_what_cannot_stay(run: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("predict", run, *words) == 2
    assert told in capsys.readouterr().err


def test_a_server_with_no_time_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("serve", run, "--idle", 0) == 2
    assert "idle is 0.0; give a finite number above 0" in capsys.readouterr().err


def test_without_its_libraries_nothing_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert bayeslora("predict", run, *QUESTION, "--stay", 1) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install" in line and "uvicorn" in line


def test_a_server_that_ends_sooner_is_not_replaced_but_told(
    run: Path, trained: TrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("predict", run, *QUESTION, *CPU, "--stay")
    with resident(trained, served(run), idle=5.0):
        assert bayeslora(*words, 5) == 0 and not capsys.readouterr().err
        assert bayeslora(*words, 60) == 0
        said = (
            f"in memory already, for 5 minutes and not 60; to change that, end it first: bayeslora serve {run} --stop"
        )
        assert said in capsys.readouterr().err
    with resident(trained, served(run)):
        assert bayeslora(*words, 60) == 0 and not capsys.readouterr().err


def test_there_may_be_nothing_to_stop(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("serve", run, "--stop") == 0
    assert capsys.readouterr().out == "no server of this run was found\n"
    assert bayeslora("serve", run, "--stop", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"ended": []}


QUICK = """
import sys
from bayeslora.cli import main
try: main(sys.argv[1:])
except SystemExit as end: assert not end.code
heavy = {"torch", "transformers", "peft", "fastapi", "uvicorn", "pydantic", "httpx", "urllib.request"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


@pytest.mark.system
def test_a_model_that_stays_answers_the_next_predictions(run: Path, place: Path) -> None:
    """It is started once by two commands at the same time, found by the next, and ended by ``--stop``."""

    def predict(*more: object) -> str:
        words = ["predict", run, *QUESTION, *CPU, "--json", *more]
        done = subprocess.run(
            [sys.executable, "-c", QUICK, *map(str, words)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: predict("--stay", 5), range(2))
    (server,) = announced()
    try:
        assert first == second == predict() == predict("--stay", 1)
        assert list(announced()) == [server] and server.token is not None and server.host == "127.0.0.1"
        listed = subprocess.run(["ps", "-eww", "-o", "pid,sid,args"], capture_output=True, text=True, check=True).stdout
        (line,) = (it for it in listed.splitlines() if str(run) in it)
        assert line.split()[:2] == [str(server.pid)] * 2  # a session of its own
        assert server.token not in listed and server.secret not in listed
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert all(file.stat().st_mode & 0o077 == 0 for file in place.iterdir())
    finally:
        assert bayeslora("serve", run, "--stop") == 0
    assert not list(announced()) and not is_live(server)
    trained = load_run(run, device="cpu")
    assert json.loads(first)["probabilities"] == pytest.approx(
        list(trained.ask("Is 3 even?", ["yes", "no", "who knows"]).probabilities), abs=1e-6
    )


@pytest.mark.system
def test_a_server_that_was_started_by_hand_is_asked_and_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    words = ["predict", run, *QUESTION, *CPU, "--quiet"]
    assert bayeslora(*words) == 0
    want = capsys.readouterr()
    with process(run, "--device", "cpu") as (server, url):
        monkeypatch.setattr("bayeslora.runs.load.load_run", None)
        assert bayeslora(*words) == 0
        assert capsys.readouterr() == want
        assert bayeslora("serve", run, "--stop", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"ended": [url]}
        assert server.wait(60) == 0


@pytest.mark.system
def test_a_server_that_is_not_asked_ends_by_itself(run: Path, place: Path) -> None:
    with process(run, "--idle", 1 / 60) as (server, _):
        assert len(list(announced())) == 1
        assert server.wait(60) == 0
        assert server.stderr is not None and server.stderr.read() == ""
    assert not list(place.iterdir())


@pytest.mark.system
def test_a_killed_server_is_forgotten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(run) as (server, _):
        server.send_signal(signal.SIGKILL)
        server.wait(60)
        assert len(list(announced())) == 1
        assert bayeslora("serve", run, "--stop") == 0
    assert capsys.readouterr().out == "no server of this run was found\n" and not list(announced())


@pytest.mark.system
def test_a_server_serves_though_it_cannot_be_announced(run: Path, place: Path) -> None:
    place.mkdir(mode=0o755)
    with process(run) as (server, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        server.terminate()
        assert server.wait(60) == 0
        assert server.stderr is not None
        (line,) = server.stderr.read().splitlines()
    assert (
        "warning: bayeslora predict will not find this server" in line
        and "is not a private directory of this user" in line
    )


@pytest.mark.system
def test_why_a_server_could_not_start_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text((run / "config.json").read_text())
    assert bayeslora("predict", tmp_path / "run", *QUESTION, "--stay", 1) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no adapter yet" in line
    assert not list(announced())


def test_what_ends_without_a_word_has_not_started(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(OSError, match=r"the server could not start: no message, exit code 1 \(see .*\.log\)"):
        ensure_resident(served(run), [str(run)], 1)


def test_an_interrupted_start_leaves_no_server(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nexec sleep 1000\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            ensure_resident(served(run), [str(run)], 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
