"""What the server does when it is busy, asked nonsense, watched, or told to stop."""

from __future__ import annotations

import asyncio
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from bayeslora.metrics import accuracy_at_coverage, ece
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.bearer import read_token
from bayeslora.server.connections import Connection
from bayeslora.server.engine import Engine
from bayeslora.server.evaluation import POINTS, coverage_curve
from bayeslora.server.limits import Limits
from server.live import ASKED, NAME, connect, held_up, live, settled, value_of, wait_for
from train.tiny import bayeslora, read_json

TEXT = {"prompt": "red", "max_tokens": 400, "temperature": 0}


# Busy -------------------------------------------------------------------------------------------------------------


def test_a_full_queue_sends_away_and_recovers(trained: TrainedModel) -> None:
    with held_up(trained, queue=2) as (engine, worker, client), ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(client.post, "/v1/choices", json=ASKED)]
        assert engine.begun.wait(60)
        taken += [pool.submit(client.post, "/v1/choices", json=ASKED) for _ in range(2)]
        wait_for(lambda: worker.depth == 2)
        for path, body in (
            ("/v1/choices", ASKED),
            ("/v1/completions", TEXT),
            ("/v1/completions", {**TEXT, "stream": True}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert value_of(client.get("/metrics").text, "bayeslora_queue_depth") == 2
        many = client.post("/v1/completions", json={**TEXT, "prompt": ["red"] * 3})
        assert many.status_code == 400 and "3 prompts exceed the queue limit of 2" in many.text
        engine.go.set()
        assert [future.result().status_code for future in taken] == [200] * 3
        assert client.post("/v1/choices", json=ASKED).status_code == 200


def test_a_request_that_waits_too_long_is_given_up_and_never_begun(trained: TrainedModel) -> None:
    with held_up(trained, timeout=0.4) as (engine, _, client), ThreadPoolExecutor(4) as pool:
        late = [pool.submit(client.post, "/v1/choices", json=ASKED)]
        assert engine.begun.wait(60)
        late += [pool.submit(client.post, "/v1/choices", json=ASKED) for _ in range(2)]
        late += [pool.submit(client.post, "/v1/completions", json={**TEXT, "stream": True})]
        for future in late:
            assert future.result().status_code == 504
            assert "no answer within 0.4 s" in future.result().json()["error"]["message"]
        engine.go.set()
        tries: list[int] = []
        while 200 not in tries:
            tries.append(client.post("/v1/choices", json=ASKED).status_code)
        assert set(tries) <= {200, 504} and set(engine.log) == {("answer", 1)} and len(engine.log) <= 1 + len(tries)


def test_a_text_that_takes_too_long_is_ended(trained: TrainedModel) -> None:
    with held_up(trained, timeout=0.4) as (engine, _, client):
        engine.go.set()
        engine.delay = 0.05
        assert client.post("/v1/completions", json=TEXT).status_code == 504
        assert settled(engine.log) < 100


@pytest.mark.parametrize("path, body", [("/v1/choices", ASKED), ("/v1/completions", TEXT)])
def test_a_client_that_has_gone_is_forgotten(trained: TrainedModel, path: str, body: Any) -> None:
    with held_up(trained) as (engine, _, client), ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/v1/choices", json=ASKED)
        assert engine.begun.wait(60)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(client.base_url.join(path), json=body, timeout=0.5)
        wait_for(lambda: 'status="499"} 1' in client.get("/metrics").text)
        engine.go.set()
        assert first.result().status_code == 200
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        assert engine.log == [("answer", 1), ("answer", 1)]


def test_an_unexpected_failure_is_told_to_the_log_and_not_to_the_client(
    trained: TrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Engine):
        def answer(self, questions: Any, encoded: Any) -> Any:
            raise RuntimeError("a secret of the server")

        def write(self, texts: Any, lengths: Any, tell: Any) -> Any:
            raise RuntimeError("a secret of the server")

    with live(create_app(Broken(trained, Limits()), NAME)) as url, httpx.Client(base_url=url) as client:
        for path, body in (
            ("/v1/choices", ASKED),
            ("/v1/completions", TEXT),
            ("/v1/completions", {**TEXT, "stream": True}),
        ):
            got = client.post(path, json=body)
            assert got.status_code == 500 and "secret" not in got.text and got.json()["error"]["type"] == "server_error"
        assert client.get("/healthz").status_code == 200
        assert 'path="/v1/choices",status="500"} 1' in client.get("/metrics").text
    assert caplog.text.count("a secret of the server") >= 3


# Gates ------------------------------------------------------------------------------------------------------------


def test_a_token_is_needed_everywhere_but_for_health(trained: TrainedModel) -> None:
    token = "sesame-öffne-dich"
    with live(create_app(Engine(trained, Limits()), NAME, token)) as url, httpx.Client(base_url=url) as client:
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Basic {token}".encode()}):
            for path in ("/v1/models", "/v1/evaluation", "/metrics", "/v1/choices", "/v1/completions", "/v1/nothing"):
                got = client.request("POST" if "c" in path[4:5] else "GET", path, headers=wrong)
                assert got.status_code == 401 and got.headers["WWW-Authenticate"] == "Bearer"
                assert got.json()["error"]["code"] == "invalid_api_key"
        for path in ("/healthz", "/openapi.json", "/docs"):
            assert client.get(path).status_code == 200
        right = {"Authorization": f"Bearer {token}".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.post("/v1/choices", json=ASKED, headers=right).status_code == 200
    with live(create_app(Engine(trained, Limits()), NAME, "key")) as url:
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="key").models.list().data[0].id == NAME
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def test_a_body_is_bounded_whether_its_size_is_announced_or_not(trained: TrainedModel) -> None:
    with live(create_app(Engine(trained, Limits(max_body=1000)), NAME)) as url:
        for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
            got = httpx.post(f"{url}/v1/choices", content=content)
            assert got.status_code == 413 and "larger than 1000 bytes" in got.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/choices", json=ASKED).status_code == 200


def test_a_body_has_a_deadline(trained: TrainedModel) -> None:
    begun = b"POST /v1/choices HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with live(create_app(Engine(trained, Limits(timeout=0.5)), NAME)) as url, connect(url, begun) as slow:
        assert b" 408 " in slow.recv(4096)


def test_what_is_not_there(url: str) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/choices", 405), ("GET", "/redoc", 404)):
        got = httpx.request(method, f"{url}{path}")
        assert got.status_code == status and got.json()["error"]["message"]
    got = httpx.options(
        f"{url}/v1/choices", headers={"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    )
    assert not [name for name in got.headers if name.startswith("access-control")]


# Looking ----------------------------------------------------------------------------------------------------------


def test_health_can_be_checked_without_a_body(url: str) -> None:
    got = httpx.head(f"{url}/healthz")
    assert got.status_code == 200 and not got.content


def test_figures_for_prometheus(trained: TrainedModel) -> None:
    with live(create_app(Engine(trained, Limits()), NAME)) as url, httpx.Client(base_url=url) as client:
        for _ in range(3):
            client.post("/v1/choices", json=ASKED)
        client.post("/v1/choices", json={})
        client.get("/a-path-of-its-own")
        client.post("/v1/completions", json={"prompt": "red", "max_tokens": 4, "temperature": 0})
        got = client.get("/metrics")
    assert got.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = got.text.splitlines()
    assert got.text.endswith("\n") and all(
        re.fullmatch(r'(# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)+\})? -?[\d.e+-]+)', line) for line in lines
    )
    for line in (
        'bayeslora_requests_total{path="/v1/choices",status="200"} 3.0',
        'bayeslora_requests_total{path="/v1/choices",status="422"} 1.0',
        'bayeslora_requests_total{path="other",status="404"} 1.0',
        'bayeslora_request_seconds_count{path="/v1/choices"} 4.0',
        'bayeslora_request_seconds_bucket{le="+Inf",path="/v1/choices"} 4.0',
        'bayeslora_batch_size_bucket{kind="choices",le="1"} 3.0',
        'bayeslora_batch_size_sum{kind="choices"} 3.0',
        "bayeslora_answers_total 3.0",
        "bayeslora_written_tokens_total 4.0",
        "bayeslora_queue_depth 0.0",
    ):
        assert line in lines
    assert all(re.match("(# (HELP|TYPE) )?bayeslora_", line) for line in lines) and "_created" not in got.text
    counts = [
        float(line.rpartition(" ")[2]) for line in lines if "seconds_bucket" in line and 'path="/v1/choices"' in line
    ]
    assert len(counts) == 14  # as many as bounds, and one for all
    assert counts == sorted(counts) and len({line.partition(" ")[0] for line in lines if line[0] != "#"}) == len(
        [line for line in lines if line[0] != "#"]
    )


def test_the_api_is_described_on_a_page(url: str) -> None:
    """Every endpoint with every field of its own, without anything from other hosts."""
    got = httpx.get(f"{url}/docs")
    assert got.headers["content-type"].startswith("text/html")
    assert got.headers["content-security-policy"].startswith("default-src 'self';")
    assert not re.findall(r"https?://", got.text)
    openapi = httpx.get(f"{url}/openapi.json").json()
    for path, methods in openapi["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code>" in got.text for method in methods)
    for name in ("ChoicesRequest", "ClassifyRequest", "ChatRequest", "CompletionRequest", "ChoicesReply"):
        for field in openapi["components"]["schemas"][name]["properties"]:
            assert f"<td><code>{field}</code></td>" in got.text
    assert "<td><code>choices[].confidence.alternatives[].share</code></td><td>number</td>" in got.text
    assert "<td><code>temperature</code></td><td>number, ≥ 0, ≤ 2</td>" in got.text
    assert "<td><code>question</code></td><td>string</td><td>The question. Required.</td>" in got.text
    assert "&#x27;s" in got.text  # texts are escaped


def test_the_description_is_complete(url: str) -> None:
    described = httpx.get(f"{url}/openapi.json").json()
    assert described["paths"].keys() == {
        "/healthz",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/evaluation",
        "/v1/choices",
        "/v1/classify",
        "/v1/completions",
        "/v1/chat/completions",
    }
    choices = described["paths"]["/v1/choices"]["post"]
    errors = {status: reply for status, reply in choices["responses"].items() if status != "200"}
    assert errors.keys() >= {"400", "401", "404", "413", "422", "429", "500", "504"}
    for reply in errors.values():
        assert reply["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorReply")
    asked = described["components"]["schemas"]["ChoicesRequest"]
    assert asked["properties"]["choices"]["maxItems"] == 26 and asked["additionalProperties"] is False
    stream = described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert stream.keys() == {"application/json", "text/event-stream"}


def test_how_good_the_run_is(url: str, run: Path, trained: TrainedModel) -> None:
    got = httpx.get(f"{url}/v1/evaluation").json()
    result = read_json(run / "result.json")
    assert (got["model"], got["method"], got["samples"], got["split"]) == (NAME, "bayesian-lora", 3, "test")
    assert got["metrics"] == pytest.approx(result["metrics"]) and got["questions"] == 8 and got["chat"]
    assert got["calibration"]["threshold"] == trained.calibration.threshold and not got["as_served"]
    assert got["calibration"]["target"] == "coverage of at least 0.5"
    _, probabilities, gold = read_predictions(run / "predictions.jsonl.gz")
    bins = got["reliability"]
    gaps = [n * abs(a - c) for n, a, c in zip(bins["count"], bins["accuracy"], bins["confidence"], strict=True) if n]
    assert sum(gaps) / sum(bins["count"]) == pytest.approx(ece(probabilities, gold))
    curve = got["risk_coverage"]
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == gold
    assert curve[-1]["coverage"] == 1 and curve[-1]["accuracy"] == pytest.approx(correct.mean())
    for point in curve:
        assert point["coverage"] == pytest.approx((confidence >= point["threshold"]).mean())
        assert point["accuracy"] == pytest.approx(accuracy_at_coverage(confidence, correct, point["coverage"]))
        assert point["error_rate"] == pytest.approx(1 - point["accuracy"])


def test_a_long_curve_is_thinned_out() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(3), size=5000)
    curve = coverage_curve(probabilities, rng.integers(0, 3, 5000))
    assert len(curve) == POINTS and curve[-1].coverage == 1
    thresholds = [point.threshold for point in curve]
    assert thresholds == sorted(thresholds, reverse=True)


def test_a_run_without_results_is_served_all_the_same(trained: TrainedModel, tmp_path: Path, run: Path) -> None:
    """Through ASGI alone: no part of it needs a port."""
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    bare = replace(trained, directory=RunDirectory(tmp_path), calibration=Calibration())
    app = create_app(Engine(bare, Limits()), NAME)

    async def look() -> tuple[Any, Any]:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                seen = await client.get("/v1/evaluation")
                return seen.json(), (await client.post("/v1/choices", json={**ASKED, "level": 0.8})).json()

    seen, answer = asyncio.run(look())
    assert seen["metrics"] is seen["reliability"] is seen["risk_coverage"] is seen["calibration"] is None
    assert seen["intervals"] is None and answer["prediction_set"] is None and not answer["abstains"]


def test_small_answers_are_sent_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not held back until the client has confirmed the last one, which takes it 40 ms."""
    at_once: list[int] = []
    enter = Connection.connection_made

    def look(self: Connection, transport: asyncio.Transport) -> None:
        opened = transport.get_extra_info("socket")
        at_once.append(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        enter(self, transport)

    monkeypatch.setattr(Connection, "connection_made", look)
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert at_once == [1]


# The command line -----------------------------------------------------------------------------------------------------


def test_a_port_in_use(run: Path, free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        assert bayeslora("serve", run, "--port", free_port) == 2
    told = capsys.readouterr().err
    assert told == f"bayeslora: port {free_port} of 127.0.0.1 is in use; choose another with --port, or 0 for any\n"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--port", 70000], "port is 70000; give a number from 0"),
        (["--host", "256.1.1.1"], "host is '256.1.1.1', not an address of this machine"),
        (["--host", "a..b"], "host is 'a..b', not an address of this machine"),
        (["--token-file", "nowhere"], "nowhere: the token cannot be read"),
        (["--queue", 0], "queue is 0; give a finite number above 0"),
        (["--timeout", "nan"], "timeout is nan; give a finite number above 0"),
        (
            ["--port", 0, "--samples", 99],
            "samples is 99, and max-samples allows 16; raise --max-samples, or give fewer --samples",
        ),
    ],
)
def test_options_that_cannot_be(
    run: Path, options: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora("serve", run, "--quiet", *options) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_a_directory_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("serve", tmp_path, "--port", 0, "--quiet") == 2
    assert "holds no run that can be used; give a directory that bayeslora train" in capsys.readouterr().err


def test_without_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    found = importlib.util.find_spec
    for missing in ("fastapi", "uvicorn", "prometheus_client"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, it=missing: None if name == it else found(name))
        assert bayeslora("serve", run) == 2
        assert capsys.readouterr().err.endswith("run: pip install 'fastapi>=0.132' uvicorn prometheus-client\n")


def test_other_machines_are_warned_of(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BAYESLORA_TOKEN", raising=False)
    options = ["--host", "0.0.0.0", "--port", 0, "--samples", 99, "--quiet"]
    assert bayeslora("serve", run, *options) == 2
    assert "warning: everyone who can reach 0.0.0.0 can ask questions" in capsys.readouterr().err
    (tmp_path / "token").write_text("sesame\n")
    assert bayeslora("serve", run, *options, "--token-file", tmp_path / "token") == 2
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "token").write_text("\n")
    assert bayeslora("serve", run, *options, "--token-file", tmp_path / "token") == 2
    assert "is empty; write a token to it" in capsys.readouterr().err


def test_white_space_around_a_token_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    monkeypatch.setenv("BAYESLORA_TOKEN", " sesame\n")
    assert read_token(None) == read_token(tmp_path / "token") == "sesame"
    monkeypatch.setenv("BAYESLORA_TOKEN", "\n")
    assert read_token(None) is None
