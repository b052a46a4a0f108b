"""How the server ends: when all that was taken is answered, and when the grace is over, whatever is under way then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from bayeslora.runs.trained import TrainedModel
from bayeslora.server.engine import Engine, Question
from bayeslora.server.interrupt import Interrupted, interruptible
from bayeslora.server.limits import Limits
from bayeslora.server.metrics import Metrics
from bayeslora.server.worker import Closed, ModelWorker, QueuedRequest
from bayeslora.tasks import make_item
from server.live import ASKED, connect, held_up, process, wait_for

TEXT: dict[str, Any] = {"prompt": "red", "max_tokens": 400, "temperature": 0}
STOPPING = {"message": "the server is shutting down", "type": "server_error", "param": None, "code": None}


def last_event(reply: httpx.Response) -> Any:
    return json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))


def asked() -> QueuedRequest[Question, Any]:
    return QueuedRequest(Question(make_item("Is it?", ["yes", "no"]), 1))


# The server -----------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_what_takes_longer_than_the_grace_is_told_so(trained: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text, a stream that has begun, and a text that waits for both; and a request that never comes to its end is cut off."""
    monkeypatch.setattr("bayeslora.server.server.LAST_WORDS", 3)
    with ThreadPoolExecutor(4) as pool:
        with held_up(trained, grace=0.5) as (engine, worker, client):
            engine.go.set()
            engine.delay = 0.05
            place = client.base_url.join("/v1/completions")

            def ask(**changes: Any) -> httpx.Response:
                return httpx.post(place, json={**TEXT, **changes}, timeout=60)

            stream = pool.submit(ask, stream=True)
            wait_for(lambda: ("token", 1) in engine.log)
            whole, waiting = pool.submit(ask, seed=1), pool.submit(ask, temperature=1, stream=True)
            wait_for(lambda: worker.depth == 2)
            endless = connect(
                str(client.base_url), b"POST /v1/choices HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
            )
            start = time.monotonic()
        took = time.monotonic() - start
    with endless:
        assert endless.recv(1) == b""
    assert took > 0.5 and worker.join(0)
    assert stream.result().status_code == 200 and last_event(stream.result()) == {"error": STOPPING}
    for reply in (whole.result(), waiting.result()):
        assert reply.status_code == 503 and reply.json() == {"error": STOPPING}
    with pytest.raises(Closed):
        worker.ask(asked())


def test_nothing_to_wait_for_takes_no_grace(trained: TrainedModel) -> None:
    with held_up(trained, grace=50) as (engine, worker, client):
        engine.go.set()
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        with connect(str(client.base_url), b"GET /healthz HTTP/1.1\r\n"):
            start = time.monotonic()
    assert time.monotonic() - start < 40 and worker.join(0)


# The worker -----------------------------------------------------------------------------------------------------------


def test_a_worker_stops_in_the_middle_of_a_forward_pass(trained: TrainedModel) -> None:
    """Whoever waits is told at once, and the thread ends before the next module computes."""
    begun: list[str] = []

    def slow(module: nn.Module, args: Any) -> None:
        begun.append(type(module).__name__)
        time.sleep(0.2)

    leaves = [module for module in trained.model.modules() if not any(module.children())]
    handles = [module.register_forward_pre_hook(slow) for module in leaves]
    worker = ModelWorker(Engine(trained, Limits()), 8, Metrics([]))
    jobs: list[Any] = [asked() for _ in range(2)]
    try:
        for job in jobs:
            worker.ask(job)
        worker.start()
        wait_for(lambda: bool(begun))
        worker.stop()
        assert all(isinstance(job.future.exception(timeout=0), Closed) for job in jobs)
        assert worker.join(60) and len(begun) < len(leaves) / 2
    finally:
        for handle in handles:
            handle.remove()


def test_a_stopped_worker_leaves_the_model_as_it_was(trained: TrainedModel) -> None:
    before = [len(module._forward_pre_hooks) for module in trained.model.modules()]
    want = trained.ask("Is it?", ["yes", "no"])
    worker = ModelWorker(Engine(trained, Limits()), 8, Metrics([]))
    worker.start()
    worker.stop()
    assert worker.join(5)
    assert [len(module._forward_pre_hooks) for module in trained.model.modules()] == before
    assert trained.ask("Is it?", ["yes", "no"]) == want


def test_a_pass_is_ended_only_if_that_is_wanted() -> None:
    model, wanted = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())), [False]
    with interruptible(model, lambda: wanted[0]):
        model(torch.zeros(2))
        wanted[0] = True
        with pytest.raises(Interrupted):
            model(torch.zeros(2))
    model(torch.zeros(2))


# The process ----------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_when_all_that_was_taken_is_answered(
    run: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAYESLORA_TOKEN", "sesame")
    with process(run) as (server, url), ThreadPoolExecutor(2) as pool:
        assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer sesame"}, timeout=60) as client:
            body = {"prompt": "red", "max_tokens": 300, "temperature": 0}
            text = pool.submit(client.post, "/v1/completions", json=body)
            wait_for(lambda: 'batch_size_count{kind="texts"} 1' in client.get("/metrics").text)
            server.send_signal(number)
            assert text.result().status_code == 200 and text.result().json()["usage"]["completion_tokens"] > 1
        assert server.wait(20) == 0
        assert server.stderr is not None and server.stderr.read() == ""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")


@pytest.mark.system
def test_a_process_ends_though_work_takes_longer_than_the_grace(run: Path) -> None:
    with process(run, "--grace", 1) as (server, url), ThreadPoolExecutor(4) as pool:
        body = {"prompt": "red", "max_tokens": 500, "temperature": 1, "samples": 16}
        settings = [{"seed": 0, "stream": True}, *({"seed": seed} for seed in range(1, 4))]
        replies = [
            pool.submit(httpx.post, f"{url}/v1/completions", json={**body, **some}, timeout=60) for some in settings
        ]
        wait_for(lambda: 'batch_size_count{kind="texts"} 1' in httpx.get(f"{url}/metrics").text)
        server.terminate()
        given_up = [future.result() for future in replies]
        assert server.wait(60) == 0
        assert server.stderr is not None and server.stderr.read() == ""
    assert all(reply.status_code in (200, 503) for reply in given_up) and given_up[-1].status_code == 503
    assert all(reply.json() == {"error": STOPPING} for reply in given_up if reply.status_code == 503)


STUCK = """
import sys, time
from bayeslora.server.engine import Engine
Engine.answer = lambda self, questions, encoded: time.sleep(1000)
from bayeslora.cli import main
main(sys.argv[1:])
"""


@pytest.mark.system
def test_a_process_ends_though_its_worker_does_not(run: Path) -> None:
    words = [sys.executable, "-c", STUCK, "serve", str(run), "--port", "0", "--json", "--quiet", "--grace", "0.5"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(httpx.post, f"{url}/v1/choices", json=ASKED, timeout=60)
            wait_for(lambda: 'batch_size_count{kind="choices"} 1' in httpx.get(f"{url}/metrics").text)
            os.kill(server.pid, signal.SIGTERM)
            assert reply.result().status_code == 503
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
