"""Answers over HTTP are those of the library, alone and in batches."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bayeslora import load_model, load_run
from bayeslora.predict.generation import Writing
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.engine import Engine, Question, Text
from bayeslora.server.limits import Limits
from bayeslora.server.metrics import Metrics
from bayeslora.server.worker import ModelWorker, QueuedRequest
from bayeslora.tasks import make_item
from bayeslora.train import TrainingConfig, train
from remote.conftest import random_run
from server.live import ASKED, held_up, wait_for
from train import tiny

QUESTIONS = [
    {"question": "Is 3 even?", "choices": ["yes", "no", "who knows"]},
    {"question": "What is the colour of a ball that was drawn from the second urn?", "choices": ["red", "blue"]},
    {"question": "Is it?", "choices": ["yes", "no"], "passage": "It is said that all of them are even. " * 3},
    {"question": "So many", "choices": list("abcdefgh"), "bare": True},
]


def post(url: str, body: Any, path: str = "/v1/choices") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


@pytest.mark.parametrize("asked", QUESTIONS, ids=range(len(QUESTIONS)))
@pytest.mark.parametrize("samples", [None, 0, 1, 5])
def test_an_answer_is_that_of_the_library(
    url: str, trained: TrainedModel, asked: dict[str, Any], samples: int | None
) -> None:
    got = post(url, {**asked, "level": 0.8, "deterministic": True} | ({} if samples is None else {"samples": samples}))
    assert got.status_code == 200, got.text
    model = trained if samples is None else replace(trained, samples=samples)
    item = make_item(asked["question"], asked["choices"], asked.get("passage", ""), bare=asked.get("bare", False))
    predictions = model.predict([item])
    (want,) = model.answers(predictions, 0.8)
    reply = got.json()
    assert reply["probabilities"] == pytest.approx(list(want.probabilities), abs=1e-7)
    assert predictions.draws is not None
    assert reply["draws"] == [pytest.approx(row) for row in predictions.draws[:, 0].tolist()]
    for name in ("confidence", "entropy", "aleatoric", "epistemic", "agreement", "semantic_entropy"):
        assert reply[name] == pytest.approx(getattr(want, name), abs=1e-7)
    assert (reply["answer"], reply["abstains"]) == (want.answer, want.abstains)
    assert reply["prediction_set"] == list(want.prediction_set or ()) and reply["choices"] == list(want.choices)
    mean = replace(trained, samples=0).predict([item]).probabilities[0].tolist()
    assert reply["deterministic"] == pytest.approx(mean, abs=1e-7)
    assert reply["level"] == 0.8 and reply["model"] == "tiny-run"
    assert (reply["distance"], reply["unfamiliar"]) == (want.distance, want.unfamiliar) and want.distance is not None


def test_a_reply_has_the_posterior_mean_only_if_asked(url: str) -> None:
    assert post(url, ASKED).json()["deterministic"] is None


def test_some_answers_are_withheld(url: str) -> None:
    asked = [{name: tiny.question(k)[name] for name in ("question", "choices")} for k in range(12, 18)]
    replies = [post(url, body).json() for body in asked]
    assert {reply["abstains"] for reply in replies} == {True, False}
    assert all((reply["answer"] is None) == reply["abstains"] for reply in replies)


def test_questions_that_wait_are_answered_together_as_if_alone(trained: TrainedModel) -> None:
    """Levels and the wish for the mean may differ; numbers of draws may not."""
    extras = [{"level": 0.5}, {"deterministic": True}, {}, {"samples": 2}]
    bodies = [{**asked, **extra} for asked, extra in itertools.product(QUESTIONS, extras)]
    with held_up(trained) as (engine, worker, client), ThreadPoolExecutor(32) as pool:
        first = pool.submit(client.post, "/v1/choices", json=ASKED)
        assert engine.begun.wait(20)
        waiting = [pool.submit(client.post, "/v1/choices", json=body) for body in bodies]
        wait_for(lambda: worker.depth == len(bodies))
        engine.go.set()
        together = [future.result().json() for future in waiting]
        assert first.result().status_code == 200
        assert sorted(engine.log) == [("answer", 1), ("answer", 4), ("answer", 12)]
        alone = [client.post("/v1/choices", json=body).json() for body in bodies]
        assert engine.log[3:] == [("answer", 1)] * len(bodies)
    for got, want in zip(together, alone, strict=True):
        assert got["probabilities"] == pytest.approx(want["probabilities"], abs=1e-5)
        assert np.array(got["draws"]) == pytest.approx(np.array(want["draws"]), abs=1e-5)
        assert got["deterministic"] == (want["deterministic"] and pytest.approx(want["deterministic"], abs=1e-5))
        assert [got[name] for name in ("answer", "prediction_set")] == [
            want[name] for name in ("answer", "prediction_set")
        ]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits long for requests that it expects."""
    monkeypatch.setattr("bayeslora.server.worker.GATHER_SHARE", 1e9)
    monkeypatch.setattr("bayeslora.server.worker.GATHER_SECONDS", 30.0)


@pytest.mark.usefixtures("patient")
def test_clients_that_ask_again_at_once_are_answered_together_and_do_not_take_turns(trained: TrainedModel) -> None:
    with held_up(trained) as (engine, worker, client), ThreadPoolExecutor(4) as pool:

        def ask(times: int) -> None:
            for _ in range(times):
                assert client.post("/v1/choices", json=ASKED).status_code == 200

        clients = [pool.submit(ask, 3)]
        assert engine.begun.wait(20)
        clients += [pool.submit(ask, 2) for _ in range(3)]
        wait_for(lambda: worker.depth == 3)
        engine.go.set()
        for one in clients:
            one.result()
        assert engine.log == [("answer", 1), ("answer", 4), ("answer", 4)]


def test_a_client_that_does_not_ask_again_is_not_waited_for_long(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the first batch is long, so the other limit counts."""
    monkeypatch.setattr("bayeslora.server.worker.GATHER_SHARE", 1e9)
    with held_up(trained) as (engine, worker, client), ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/v1/choices", json=ASKED)
        assert engine.begun.wait(20)
        second = pool.submit(client.post, "/v1/choices", json=ASKED)
        wait_for(lambda: worker.depth == 1)
        start = time.monotonic()
        engine.go.set()
        assert [it.result().status_code for it in (first, second)] == [200, 200]
        assert time.monotonic() - start < 30 and engine.log == [("answer", 1)] * 2


@pytest.mark.usefixtures("patient")
def test_a_client_alone_waits_for_no_other(trained: TrainedModel) -> None:
    with held_up(trained) as (engine, _, client):
        engine.go.set()
        start = time.monotonic()
        for _ in range(3):
            client.post("/v1/choices", json=ASKED)
        assert time.monotonic() - start < 25 and engine.log == [("answer", 1)] * 3


@pytest.mark.parametrize("method", ["lora", "blob", "mc-dropout", "laplace", "c-lora"])
def test_batches_change_nothing_for_other_methods(method: str) -> None:
    run = random_run(method)
    engine = Engine(run, Limits())
    questions = [Question(make_item(f"Is {k} even or what?" * (k + 1), ["yes", "no"]), 3) for k in range(4)]
    encoded = [engine.encode(question) for question in questions]
    assert engine.batches
    together = engine.answer(questions, encoded)
    for got, question, tokens in zip(together, questions, encoded, strict=True):
        (alone,) = engine.answer([question], [tokens])
        assert got.answer.probabilities == pytest.approx(alone.answer.probabilities, abs=1e-5)
        assert np.array(got.draws) == pytest.approx(np.array(alone.draws), abs=1e-5)


def test_adapters_of_pefts_own_are_not_batched() -> None:
    assert not Engine(random_run("pvera"), Limits()).batches


def test_a_run_that_kept_its_trunk(tmp_path: Any) -> None:
    """The server does not keep it, and says the same."""
    config = tiny.run_config(
        adapter=replace(tiny.run_config().adapter, layers="last:1"),
        training=TrainingConfig(epochs=1, batch_size=4, cache_trunk=True),
    )
    with tiny.without_intervals():
        train(config, tmp_path / "run")
    model = load_run(tmp_path / "run", loaded=load_model(config.model))
    want = model.ask("Is 3 even?", ["yes", "no"])
    engine = Engine(model, Limits())
    question = Question(make_item("Is 3 even?", ["yes", "no"]), 3)
    (got,) = engine.answer([question], [engine.encode(question)])
    assert got.answer.probabilities == pytest.approx(want.probabilities, abs=1e-6)


def test_one_that_cannot_be_asked_costs_no_other(trained: TrainedModel) -> None:
    long = {"question": "Is it? " * 2000, "choices": ["yes", "no"]}
    with held_up(trained) as (engine, worker, client), ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(client.post, "/v1/choices", json=ASKED)]
        assert engine.begun.wait(20)
        futures += [pool.submit(client.post, "/v1/choices", json=body) for body in (ASKED, long, ASKED)]
        wait_for(lambda: worker.depth == 3)
        engine.go.set()
        assert [future.result().status_code for future in futures] == [200, 200, 400, 200]
        assert "tokens" in futures[2].result().json()["error"]["message"]
        assert engine.log == [("answer", 1), ("answer", 2)]


def test_a_batch_that_fails_is_answered_one_by_one(trained: TrainedModel) -> None:
    class Spoilt(Engine):
        def answer(self, questions: Any, encoded: Any) -> Any:
            if any("spoilt" in question.item.prompt.text for question in questions):
                raise RuntimeError("a secret of the server")
            return super().answer(questions, encoded)

    worker = ModelWorker(Spoilt(trained, Limits()), 8, Metrics([]))
    jobs: list[Any] = [QueuedRequest(Question(make_item(text, ["yes", "no"]), 3)) for text in ("one", "spoilt", "two")]
    for job in jobs:
        worker.ask(job)
    worker.start()
    worker.close()
    assert worker.join(20)
    assert isinstance(jobs[1].future.exception(), RuntimeError)
    assert all(jobs[k].future.result().answer.probabilities for k in (0, 2))


def test_a_batch_of_texts_that_fails_is_not_told_twice(trained: TrainedModel) -> None:
    """What was told is over; what was not is written alone."""

    class Spoilt(Engine):
        def write(self, texts: Any, lengths: Any, tell: Any) -> Any:
            def spoil(pieces: Any) -> None:
                tell(pieces)
                if len(texts) > 1:
                    raise RuntimeError("spoilt")

            return super().write(texts, lengths, spoil)

    worker = ModelWorker(Spoilt(trained, Limits()), 8, Metrics([]))
    told: list[Any] = []
    text = Text("red", Writing(max_new_tokens=3), 3)
    jobs: list[Any] = [QueuedRequest(text, told.append), QueuedRequest(text)]
    worker.write(jobs)
    worker.start()
    worker.close()
    assert worker.join(20) and worker.trouble
    assert isinstance(jobs[0].future.exception(), RuntimeError) and len(told) == 1
    assert jobs[1].future.result().generation == trained.generate(["red"], text.writing)[0]


def test_texts_are_written_in_parts_that_fit_the_memory(trained: TrainedModel) -> None:
    engine = Engine(trained, Limits())
    text = Text("red", Writing(max_new_tokens=60), 4)
    assert engine.rows_at_once(text, 40) == 16384 // 400 and engine.rows_at_once(text, 10**6) == 1


@pytest.mark.parametrize(
    "change, status, message",
    [
        ({"choices": ["yes"]}, 422, "choices: List should have at least 2 items"),
        ({"choices": ["yes"] * 27}, 422, "choices: List should have at most 26 items"),
        ({"choices": "yes"}, 422, "choices: Input should be a valid list"),
        ({"choices": ["yes", "yes"]}, 400, "two choices are equal: 'yes'; give each once"),
        ({"choices": ["yes", " "]}, 400, "the question cannot be used"),
        ({"question": ""}, 422, "question: String should have at least 1 character"),
        ({"question": "a" * 200_001}, 422, "question: String should have at most 200000 characters"),
        ({"question": None}, 422, "question: Input should be a valid string"),
        ({"qestion": "what?"}, 422, "qestion: Extra inputs are not permitted"),
        ({"samples": 17}, 400, "samples is 17; this server allows at most 16"),
        ({"samples": -1}, 422, "samples: Input should be greater than or equal to 0"),
        ({"level": 0.7}, 400, "level is 0.7; give one that prediction sets have: 0.5, 0.8, 0.9"),
        ({"level": 1.5}, 422, "level: Input should be less than 1"),
        ({"model": "gpt-4"}, 404, "model 'gpt-4' does not exist; this server has 'tiny-run'"),
        ({"bare": True, "passage": "text"}, 400, "a bare question has no passage"),
        ({"question": "word " * 30_000}, 400, "are allowed"),
        ({"choices": [f"even so {k} " * 40 for k in range(26)], "bare": True}, 400, "at most 4096 are allowed"),
    ],
)
def test_questions_that_cannot_be_asked(url: str, change: dict[str, Any], status: int, message: str) -> None:
    got = post(url, {**ASKED, **change})
    assert (got.status_code, message in got.json()["error"]["message"]) == (status, True), got.text
    assert got.json().keys() == {"error"} and got.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_level_that_no_prediction_set_has_is_refused_without_calibration_too(run: Path) -> None:
    with held_up(load_run(run, raw=True)) as (engine, _, client):
        engine.go.set()
        known, unknown = (client.post("/v1/choices", json={**ASKED, "level": level}) for level in (0.99, 0.33))
    assert known.json()["level"] == 0.99 and known.json()["prediction_set"] is None and unknown.status_code == 400
    want = "level is 0.33; give one that prediction sets have: 0.5, 0.8, 0.9, 0.95, 0.99"
    assert unknown.json()["error"]["message"] == want


@pytest.mark.parametrize(
    "content, status",
    [
        (b"{", 400),
        (b"", 422),
        (b"[]", 422),
        (b'{"question": "a", "choices": ["b", "c"], "level": NaN}', 422),
        (b'{"question": "\\ud800", "choices": ["b", "c"]}', 422),
        (b'{"question": "a", "choices": ["b", "c"], "\\ud800": 1}', 422),
        (b'{"question": "\x00", "choices": ["\x00", "c"]}', 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
        (b'{"question": "\xff", "choices": ["b", "c"]}', 400),
    ],
)
def test_bodies_that_are_no_questions(url: str, content: bytes, status: int) -> None:
    got = httpx.post(f"{url}/v1/choices", content=content, headers={"Content-Type": "application/json"})
    assert got.status_code == status, got.text
    error = got.json()["error"]
    assert error["message"] and "Traceback" not in got.text
    assert error["message"].startswith("the body is not valid JSON: ") is (status == 400)


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {}])
def test_a_body_that_is_not_said_to_be_json(url: str, headers: dict[str, str]) -> None:
    got = httpx.post(f"{url}/v1/choices", content=b'{"question": "Q", "choices": ["a", "b"]}', headers=headers)
    assert got.status_code == 422 and "Content-Type: application/json" in got.json()["error"]["message"]
