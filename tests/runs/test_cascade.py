"""Cascades: who answers what, what that is worth, and a second model behind an endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from bayeslora import load_run
from bayeslora.cli.cascade import Cascade
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.remote.endpoint import Endpoint
from bayeslora.remote.expert import Expert, letter_question, read_letter
from bayeslora.runs.cascade import cascade_curve, run_cascade, second_run
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, make_item, require_gold
from bayeslora.tasks.choices import choice_candidate
from tasks.cases import write_lines
from train.tiny import bayeslora, finished, question


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return load_run(finished())


@pytest.fixture(scope="module")
def items(model: TrainedModel) -> tuple[Item, ...]:
    return model.find_task().load("test").items


def knowing(items: Any) -> list[int | None]:
    """A second model that knows every answer."""
    return [item.gold for item in items]


@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_the_sure_answers_are_its_own(model: TrainedModel, items: tuple[Item, ...], quantile: float) -> None:
    predictions, gold = model.predict(items), np.array(require_gold(items))
    confidence = predictions.probabilities.max(1)
    threshold = float(np.quantile(confidence, quantile))
    asked: list[Item] = []

    def second(passed: Any) -> list[int | None]:
        asked.extend(passed)
        return [item.gold if k % 2 else None for k, item in enumerate(passed)]

    result = run_cascade(model, items, second, threshold)
    sure = confidence >= threshold
    assert asked == [item for item, own in zip(items, sure, strict=True) if not own]
    right = predictions.choices == gold
    rescued = len(asked) // 2
    assert result.answered == sure.mean() and result.alone == right.mean()
    assert result.accuracy == pytest.approx((right[sure].sum() + rescued) / len(items))
    assert result.first_accuracy == pytest.approx(right[sure].mean())
    assert result.second_accuracy == (pytest.approx(rescued / len(asked)) if asked else None)
    assert result.seconds == pytest.approx(
        result.first_seconds + (len(asked) / len(items)) * (result.second_seconds or 0)
    )


def test_another_run_answers_the_rest(model: TrainedModel, items: tuple[Item, ...]) -> None:
    other = replace(model, samples=0)
    result = run_cascade(model, items, second_run(other), 1.0)
    assert result.answered == 0
    assert result.accuracy == np.mean(other.predict(items).choices == np.array(require_gold(items)))


def test_a_second_that_leaves_answers_out_is_refused(model: TrainedModel, items: tuple[Item, ...]) -> None:
    with pytest.raises(InputError, match="the second model gave 0 answers to"):
        run_cascade(model, items, lambda items: [], 1.0)
    with pytest.raises(InputError, match="threshold is 2"):
        run_cascade(model, items, knowing, 2)


def test_a_calibrated_threshold_may_exceed_1_by_rounding(model: TrainedModel, items: tuple[Item, ...]) -> None:
    threshold = Calibration(threshold=1 + 1e-7).threshold
    assert threshold is not None and run_cascade(model, items, knowing, threshold).accuracy == 1


def test_the_curve_goes_from_the_second_to_the_first() -> None:
    rng = np.random.default_rng(0)
    confidence, right, other = rng.random(20), rng.random(20) < 0.5, rng.random(20) < 0.8
    share, accuracy = cascade_curve(confidence, right, other)
    assert share[0] == 0 and share[-1] == 1 and accuracy[0] == other.mean() and accuracy[-1] == right.mean()
    for count in (1, 7, 19):
        sure = confidence >= np.sort(confidence)[-count]
        assert accuracy[count] == pytest.approx((right[sure].sum() + other[~sure].sum()) / 20)


# Behind an endpoint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, number",
    [
        ("B", 1),
        (" (C).", 2),
        ("The answer is A.", 0),
        ("**B** is right", 1),
        ("D", None),
        ("", None),
        ("none", None),
        ("I think B", 1),
        ("OK: C", 2),
    ],
)
def test_the_first_letter_counts(said: str, number: int | None) -> None:
    assert read_letter(said, 3) == number


@contextmanager
def chat_server(
    reply: Any, status: int = 200, nonsense: bytes | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A chat endpoint that answers with ``reply(content)`` or nonsense, and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append({"path": self.path, "key": self.headers["Authorization"], **body})
            answer = reply(body["messages"][-1]["content"])
            content = nonsense or json.dumps({"choices": [{"index": 0, "message": answer}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()


def test_a_chat_model_is_asked_for_the_letter(items: tuple[Item, ...]) -> None:
    by_question = {letter_question(item): "ABCDEF"[item.gold or 0] for item in items}
    with chat_server(lambda content: {"role": "assistant", "content": by_question[content]}) as (url, bodies):
        found = Expert(Endpoint(f"{url}/v1", "secret"), "large")(items)
    assert found == [item.gold for item in items]
    first = bodies[0]
    assert first["path"] == "/v1/chat/completions" and first["key"] == "Bearer secret"
    assert first["model"] == "large" and first["temperature"] == 0
    for item in items:
        assert all(
            f"{letter}. {option.strip()}" in letter_question(item)
            for letter, option in zip("ABCDEF", item.options, strict=False)
        )


def test_options_are_listed_once_by_letters_alone() -> None:
    """Whatever labels the prompt of the run itself has: the reply could mean either otherwise."""
    item = choice_candidate("x", "Which?", ["a hen", "a cow"], ["B", "A"], 1, "A farm.").item
    told = "Passage: A farm.\nQuestion: Which?\n\nA. a hen\nB. a cow\n\nReply with the letter of the right option and nothing"
    assert letter_question(item).startswith(told)
    bare = make_item("It lays", ["eggs", "bricks"], bare=True)
    assert letter_question(bare).startswith("It lays\n\nA. eggs\nB. bricks\n\nReply")


def test_more_options_than_letters_are_refused_before_anything_is_asked(items: tuple[Item, ...]) -> None:
    many = choice_candidate("many", "Which?", [f"it {k}" for k in range(27)], list(map(str, range(27))), 0).item
    with (
        chat_server(lambda content: {"role": "assistant", "content": "A"}) as (url, bodies),
        pytest.raises(InputError, match=r"'many' has 27 options, and an expert .* at most 26"),
    ):
        Expert(Endpoint(url), "large")([*items, many])
    assert not bodies


@pytest.mark.parametrize(
    "status, content, reason",
    [
        (200, b'"two\\nlines \\u001b[31m"', r"it has no choices: 'two\\nlines \\x1b\[31m'; give the url"),
        (200, b"<html>", "it is not JSON: '<html>'"),
        (200, b'{"choices": [{"index": true, "message": {"content": "A"}}]}', "it has 1 choices, and one for each"),
        (401, b"{}", "give the server's key as api_key, or on the command line in OPENAI_API_KEY"),
        (
            404,
            b'{"error": "no such\\nmodel"}',
            "404 Not Found: no such model; give the url of the server, and a model that",
        ),
    ],
)
def test_nonsense_of_an_endpoint_is_one_line(items: tuple[Item, ...], status: int, content: bytes, reason: str) -> None:
    with chat_server(lambda asked: {}, status, content) as (url, _), pytest.raises(InputError, match=reason) as told:
        Expert(Endpoint(url), "large")(items[:1])
    assert str(told.value).isprintable()


def test_a_reply_without_text_is_refused(items: tuple[Item, ...]) -> None:
    with (
        chat_server(lambda content: {"role": "assistant", "content": None}) as (url, _),
        pytest.raises(InputError, match=r"it has no message with a text.*OpenAI-style chat endpoint"),
    ):
        Expert(Endpoint(url), "large")(items[:1])


# On the command line --------------------------------------------------------------------------------------------------


def test_the_verb(items: tuple[Item, ...], capsys: pytest.CaptureFixture[str]) -> None:
    run = finished()
    words = ("cascade", run, "--quiet", "--threshold", 1.0)
    assert bayeslora(*words, "--second", finished("lora"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["questions"] == len(items) and told["answered"] == 0
    with chat_server(lambda content: {"role": "assistant", "content": "A"}) as (url, bodies):
        assert bayeslora(*words, "--url", url, "--url-model", "large", "--max-questions", 3) == 0
    out = capsys.readouterr().out
    assert "3 questions; the first model answers if its confidence is at least 1.000" in out and "passed on" in out
    assert len(bodies) == 3


def test_its_questions_may_have_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (question(k) for k in range(20))
    rows = [{"query": it["question"], "options": it["choices"], "key": it["answer"]} for it in asked]
    words = ("cascade", finished(), "--second", finished("lora"), "--threshold", 0.5, "--quiet", "--json")
    task = ("--task", write_lines(tmp_path / "mine.jsonl", rows))
    assert bayeslora(*words, *task, "--columns", "question=query", "choices=options", "answer=key") == 0
    assert json.loads(capsys.readouterr().out)["questions"] == 4


@pytest.mark.parametrize(
    "words, reason",
    [
        ((), "give one second model"),
        (("--second", "x", "--url", "http://a", "--url-model", "m"), "give one second model"),
        (("--url", "http://a"), "--url and --url-model belong together"),
        (("--second", "x", "--max-questions", 0), "max-questions is 0"),
        (("--url", "http://a", "--url-model", "m"), "has no threshold; give --threshold, or first run"),
    ],
)
def test_what_is_refused(words: tuple[object, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("cascade", finished(), *words, "--quiet") == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, reason",
    [
        (("--second", "x", "--threshold", 0.5), "x: no such directory; give that of a run"),
        (("--second", "x", "--threshold", 2), "threshold is 2.0; give a finite number"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    words: tuple[object, ...], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cascade, "loaded", lambda self, **how: pytest.fail("the run is loaded"))
    assert bayeslora("cascade", finished(), *words, "--quiet") == 2
    assert reason in capsys.readouterr().err
