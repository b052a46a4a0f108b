"""A served run answers as the run itself, and a server that does not is not believed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.export import export_run
from bayeslora.remote import RemoteModel, endpoint, requests
from bayeslora.remote.endpoint import Endpoint
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import load_task
from bayeslora.train import AdapterConfig, DataConfig
from remote.conftest import SAMPLES, random_run
from remote.server import Completions, Reply, Trouble, always, at_first, changed, dripping, serving, slow
from train import tiny
from train.tiny import read_json

ASK = ("Is 3 even?", ["yes", "no", "who knows"])
KEY = "s3cret-key"


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between attempts, nor asks a proxy."""
    monkeypatch.setattr(endpoint, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def url(completions: Completions) -> Iterator[str]:
    with serving(completions) as found:
        yield found


@pytest.fixture
def model(url: str, export: Path) -> RemoteModel:
    return RemoteModel(url, export)


@pytest.fixture(params=["next tokens", "echo"])
def way(request: pytest.FixtureRequest, completions: Completions) -> str:
    """How the server is asked: as it can be."""
    completions.knows_tokens = request.param == "next tokens"
    return request.param


def found_way(url: str, export: Path, completions: Completions, **settings: Any) -> RemoteModel:
    """A model that has been asked before, which nobody remembers."""
    model = RemoteModel(url, export, **settings)
    model.ask(*ASK)
    completions.asked.clear()
    return model


# Equality -------------------------------------------------------------------------------------------------------------


def test_remote_predictions_are_local_ones(
    way: str, model: RemoteModel, trained: TrainedModel, completions: Completions
) -> None:
    items = load_task(tiny.task_directory()).test
    assert len({len(item.options) for item in items}) > 1
    found, expected = model.predict(items), trained.predict(items)
    assert np.abs(found.probabilities - expected.probabilities).max() < 1e-5
    assert np.abs(found.draws - expected.draws).max() < 1e-5
    assert found.choices.tolist() == expected.choices.tolist() and found.items == expected.items
    asked = completions.asked[1:]  # the first one is to learn how to ask
    assert sorted(request["model"] for request in asked) == [f"sample-00{k}" for k in range(SAMPLES)]
    assert all(("echo" in request) == (way == "echo") for request in asked)


def test_remote_answers_are_local_ones(model: RemoteModel, trained: TrainedModel) -> None:
    items = load_task(tiny.task_directory()).validation
    found, expected = model.answers(model.predict(items)), trained.answers(trained.predict(items))
    assert {it.abstains for it in expected} == {True, False}  # there is something to get wrong
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.answer, ours.choices, ours.abstains) == (theirs.answer, theirs.choices, theirs.abstains)
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)
        assert [ours.confidence, ours.entropy, ours.epistemic] == pytest.approx(
            [theirs.confidence, theirs.entropy, theirs.epistemic], abs=1e-5
        )
    for passage in ("Three is odd.", "Three is odd. " * 90):  # which is cut to the model's context
        asked = model.ask(*ASK, passage=passage)
        assert asked.probabilities == pytest.approx(trained.ask(*ASK, passage=passage).probabilities, abs=1e-5)


def test_a_long_question_without_a_passage_is_kept_whole_where_it_fits_the_model(
    url: str, export: Path, trained: TrainedModel, tmp_path: Path
) -> None:
    values = read_json(export / "manifest.json") | {"max_tokens": 48}
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    long = (f"Is it {'very ' * 30}even?", ["yes", "no"])
    assert RemoteModel(url, tmp_path).ask(*long).probabilities == pytest.approx(
        trained.ask(*long).probabilities, abs=1e-5
    )
    (tmp_path / "manifest.json").write_text(json.dumps({name: it for name, it in values.items() if name != "context"}))
    with pytest.raises(InputError, match="at most 48 are allowed"):  # an export of an earlier version
        RemoteModel(url, tmp_path).ask(*long)


def test_letters_and_heads_are_served_too(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=2, targets=("q_proj", "lm_head"))
    trained = random_run(data=DataConfig(scoring="letter"), adapter=adapter, samples=2)
    export_run(trained, 2, tmp_path / "out")
    items = load_task(tiny.task_directory()).test
    completions = Completions(tiny.model_directory(), tmp_path / "out")
    with serving(completions) as url:
        found = RemoteModel(url, tmp_path / "out").predict(items)
        completions.knows_tokens = False
        with pytest.raises(InputError, match="may lack what these adapters do to the output head"):
            RemoteModel(url, tmp_path / "out").predict(items)
    assert np.abs(found.probabilities - trained.predict(items).probabilities).max() < 1e-5


def test_many_questions_are_divided_into_requests(
    way: str, url: str, export: Path, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = found_way(url, export, completions)
    items = load_task(tiny.task_directory()).validation
    whole = model.predict(items).probabilities
    completions.asked.clear()
    monkeypatch.setattr(requests, "REQUEST_TOKENS", 100)
    monkeypatch.setattr(requests, "TOKENS_ASKED", 4)
    assert np.array_equal(model.predict(items).probabilities, whole)
    sizes = [sum(map(len, request["prompt"])) for request in completions.asked]
    assert len(sizes) > 3 * SAMPLES and max(sizes) <= 100
    assert all(len(request.get("logprob_token_ids", [])) <= 4 for request in completions.asked)


def test_no_more_requests_are_under_way_than_there_are_workers(
    way: str, url: str, export: Path, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "REQUEST_TOKENS", 1)
    under_way, most = 0, 0

    def count(number: int, request: dict[str, Any], reply: Reply) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.02)
        under_way -= 1
        return reply

    completions.trouble = count
    RemoteModel(url, export, workers=2).ask(*ASK)
    assert len(completions.asked) > 2 * SAMPLES and most == 2


def test_servers_that_echo_and_generate_nothing_will_do(url: str, export: Path, completions: Completions) -> None:
    completions.knows_tokens = False
    model = found_way(url, export, completions)
    expected = model.ask(*ASK)

    def shorten(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"].pop()
        answer["choices"].reverse()  # their order is told by their index

    completions.trouble = changed(shorten)
    assert model.ask(*ASK) == expected


def test_servers_that_refuse_words_they_do_not_know_are_asked_by_echo(
    model: RemoteModel, trained: TrainedModel, completions: Completions
) -> None:
    def refuse(number: int, request: dict[str, Any], reply: Reply) -> Reply:
        return (400, b"logprob_token_ids: unknown") if "logprob_token_ids" in request else reply

    completions.trouble = refuse
    assert model.ask(*ASK).probabilities == pytest.approx(trained.ask(*ASK).probabilities, abs=1e-5)


def test_texts_of_tokens_are_not_taken_for_their_ids(
    model: RemoteModel, trained: TrainedModel, completions: Completions
) -> None:
    def rename(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            *before, last = choice["logprobs"]["top_logprobs"]
            choice["logprobs"]["top_logprobs"] = [*before, {name.removeprefix("token_id:"): -1.0 for name in last}]

    completions.trouble = changed(rename)
    assert model.ask(*ASK).probabilities == pytest.approx(trained.ask(*ASK).probabilities, abs=1e-5)
    assert completions.asked[-1]["echo"]


def test_a_tokenizer_may_be_given(url: str, export: Path, tmp_path: Path, model: RemoteModel) -> None:
    values = read_json(export / "manifest.json") | {"base_model": str(tmp_path / "elsewhere")}
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="no such directory"):
        RemoteModel(url, tmp_path)
    moved = RemoteModel(url, tmp_path / "manifest.json", tiny.make_tokenizer())
    assert moved.ask(*ASK) == model.ask(*ASK)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_urls_with_and_without_version(end: str, url: str, export: Path, model: RemoteModel) -> None:
    assert RemoteModel(url + end, export).endpoint.completions == model.endpoint.completions


def test_the_key_is_sent_and_never_shown(url: str, export: Path, completions: Completions) -> None:
    model = RemoteModel(url, export, api_key=KEY)
    model.ask(*ASK)
    assert {headers["Authorization"] for headers in completions.headers} == {f"Bearer {KEY}"}
    completions.trouble = always(401, {"error": {"message": "wrong key"}})
    with pytest.raises(
        InputError, match="HTTP 401 Unauthorized: wrong key; give the server's key as api_key"
    ) as caught:
        model.ask(*ASK)
    assert KEY not in str(caught.value) and KEY not in repr(model.endpoint)


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import bayeslora.remote, sys; sys.exit(any(m in sys.modules for m in ('torch', 'peft', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Troubles that pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        always(500, {"error": {"message": "busy"}}),
        always(503, b"<html>no</html>"),
        always(429, {"error": {"message": "too many requests"}}),
        lambda number, request, reply: None,
        pytest.param(slow(6), marks=pytest.mark.system),
    ],
    ids=["500", "503", "429", "hang up", "slow"],
)
def test_what_passes_is_tried_again(trouble: Trouble, url: str, export: Path, completions: Completions) -> None:
    model = found_way(url, export, completions, workers=1)
    expected = model.ask(*ASK)
    completions.asked.clear()
    model.endpoint = Endpoint(url, timeout=3)
    completions.trouble = at_first(2, trouble)
    assert model.ask(*ASK) == expected
    assert len(completions.asked) == SAMPLES + 2


def test_waits_between_attempts_double(
    url: str, export: Path, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(endpoint.time, "sleep", waits.append)
    model = RemoteModel(url, export, workers=1)
    completions.trouble = at_first(3, always(500, b""))
    model.ask(*ASK)
    assert waits == [0.001, 0.002, 0.004]


# Troubles that stay ---------------------------------------------------------------------------------------------------


def failure(kind: type[Exception], model: RemoteModel) -> str:
    with pytest.raises(kind) as caught:
        model.ask(*ASK)
    said = str(caught.value)
    assert model.endpoint.completions in said and "'sample-00" in said and "\n" not in said
    return said


def test_an_endpoint_that_is_down(free_port: int, export: Path) -> None:
    model = RemoteModel(f"http://127.0.0.1:{free_port}", export, retries=1)
    said = failure(OSError, model)
    assert "Connection refused" in said and "attempts: 2" in said


def test_a_server_that_always_fails(url: str, export: Path, completions: Completions) -> None:
    model = found_way(url, export, completions)
    completions.trouble = always(500, {"object": "error", "message": "out of\n\x1b[31m memory"})
    said = failure(OSError, model)
    assert "HTTP 500 Internal Server Error: out of [31m memory" in said and "attempts: 4" in said
    assert len(completions.asked) == 4 * SAMPLES


def test_a_server_that_never_answers(url: str, export: Path, completions: Completions) -> None:
    completions.trouble = slow(0.5)
    assert "no answer within 0.1 s" in failure(OSError, RemoteModel(url, export, timeout=0.1, retries=1))


HEAD = b"HTTP/1.1 200 OK\r\nX-Long: "
ENDLESS = b"HTTP/1.1 %d Busy\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    "start, said",
    [
        (b"", "no answer within 0.4 s"),
        (HEAD, "no answer within 0.4 s"),
        (ENDLESS % 200, "no answer within 0.4 s"),
        (ENDLESS % 503, "HTTP 503 Busy"),
    ],
    ids=["status", "header", "body", "error"],
)
def test_an_answer_that_drips_is_not_waited_for(start: bytes, said: str) -> None:
    with dripping(start) as url:
        began = time.monotonic()
        with pytest.raises(OSError, match=said):
            Endpoint(url, timeout=0.4, retries=0).chat("m", [], 1)
    assert 0.3 < time.monotonic() - began < 3


def test_an_unknown_model_is_told_and_not_tried_again(
    url: str, export: Path, tmp_path: Path, completions: Completions
) -> None:
    values = read_json(export / "manifest.json")
    values["adapters"] = [{"name": "sample-009", "path": "sample-009"}]
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    said = failure(InputError, RemoteModel(url, tmp_path))
    assert "HTTP 404 Not Found: The model `sample-009` does not exist." in said
    assert len(completions.asked) == 1


def test_a_failure_stops_what_is_not_under_way(
    url: str, export: Path, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = found_way(url, export, completions, workers=1)
    monkeypatch.setattr(requests, "REQUEST_TOKENS", 1)
    completions.trouble = always(400, {"detail": "too long"})
    assert "HTTP 400 Bad Request: too long" in failure(InputError, model)
    assert len(completions.asked) < 3 * SAMPLES


def test_redirections_are_told_and_not_followed(model: RemoteModel, completions: Completions) -> None:
    completions.trouble = always(307, b"")
    assert "it has moved to http://127.0.0.1:9/elsewhere" in failure(InputError, model)


@pytest.mark.parametrize(
    "trouble, reason",
    [
        (always(200, b"<html>hello</html>"), "it is not JSON: '<html>hello"),
        (always(200, b"\xff\xfe"), "it is not JSON"),
        (always(200, b"[" * 100_000), "it is not JSON"),
        (always(200, [1]), "it has no choices"),
        (always(200, {"choices": [1]}), "it has no choices"),
        (always(200, {"choices": []}), "it has 0 choices, and one for each of 1 prompts"),
        (changed(lambda answer: answer["choices"][0].update(index=1)), "one for each of 1 prompts"),
        (changed(lambda answer: answer["choices"][0].update(index=[])), "one for each of 1 prompts"),
    ],
)
def test_nonsense_is_not_believed(trouble: Trouble, reason: str, model: RemoteModel, completions: Completions) -> None:
    completions.trouble = trouble
    assert reason in failure(InputError, model)
    assert len(completions.asked) == 1


def logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]["logprobs"]


def next_scores(value: Any) -> Trouble:
    """The same for all tokens that may come next."""

    def spoil(answer: dict[str, Any]) -> None:
        (scores,) = logprobs(answer)["top_logprobs"]
        scores.update(dict.fromkeys(scores, value))

    return changed(spoil)


@pytest.mark.parametrize(
    "trouble, reason",
    [
        (changed(lambda answer: answer["choices"].pop()), "choices, and one for each of"),
        (changed(lambda answer: answer["choices"][0].update(logprobs=None)), "a log-probability is None"),
        (changed(lambda answer: logprobs(answer).update(top_logprobs=[])), "a log-probability is None"),
        (changed(lambda answer: logprobs(answer)["top_logprobs"][0].clear()), "a log-probability is None"),
        (next_scores(float("nan")), "a log-probability is nan"),
        (next_scores(float("-inf")), "a log-probability is -inf"),
        (next_scores("-1"), "a log-probability is '-1'"),
        (next_scores(True), "a log-probability is True"),
        (next_scores(10**400), "which is no finite number"),
        (next_scores(4.5), "a log-probability is 4.5, which is no finite number of at most 0"),  # a logit
    ],
)
def test_next_tokens_that_make_no_sense_are_not_believed(
    trouble: Trouble, reason: str, url: str, export: Path, completions: Completions
) -> None:
    model = found_way(url, export, completions)
    completions.trouble = trouble
    assert reason in failure(InputError, model)
    assert len(completions.asked) <= SAMPLES


def echoed(change: Callable[[list[Any]], object]) -> Trouble:
    """The log-probabilities of the first prompt changed."""
    return changed(lambda answer: change(logprobs(answer)["token_logprobs"]))


@pytest.mark.parametrize(
    "trouble, reason",
    [
        (changed(lambda answer: answer["choices"].pop()), "it has 2 choices, and one for each of 3 prompts"),
        (changed(lambda answer: answer["choices"][0].update(logprobs=None)), "it has no log-probabilities"),
        (echoed(lambda values: values.append(-1.0)), "log-probabilities for a prompt of"),
        (echoed(lambda values: values.__delitem__(slice(2, None))), "it has 2 log-probabilities for a prompt of"),
        (echoed(lambda values: values.__setitem__(-2, float("nan"))), "a log-probability is nan"),
        (echoed(lambda values: values.__setitem__(-2, None)), "a log-probability is None"),
    ],
)
def test_echoes_that_make_no_sense_are_not_believed(
    trouble: Trouble, reason: str, url: str, export: Path, completions: Completions
) -> None:
    completions.knows_tokens = False
    model = found_way(url, export, completions)
    completions.trouble = trouble
    assert reason in failure(InputError, model)
    assert len(completions.asked) <= SAMPLES


def test_an_endless_answer_is_not_read(
    model: RemoteModel, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RESPONSE_BYTES", 1000)
    completions.trouble = always(200, b" " * 2000)
    assert "longer than 1000 bytes" in failure(InputError, model)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda export: RemoteModel("127.0.0.1:8000", export), "give one such as http://"),
        (lambda export: RemoteModel("file:///etc/passwd", export), "give one such as http://"),
        (lambda export: RemoteModel("http://127.0.0.1:x", export), "give one such as http://"),
        (lambda export: RemoteModel("http://", export), "give one such as http://"),
        (lambda export: RemoteModel("http://a..b", export), "give one such as http://"),
        (lambda export: RemoteModel("http://host/ü", export), "write its path in ASCII"),
        (lambda export: RemoteModel("http://me:pass@host", export), "give a key as api_key"),
        (lambda export: RemoteModel("http://host", export, api_key="a\nb"), "no header can hold"),
        (lambda export: RemoteModel("http://host", export, timeout=0), "timeout is 0"),
        (
            lambda export: RemoteModel("http://host", export, timeout=1e300),
            "give a finite number above 0 and of at most",
        ),
        (lambda export: RemoteModel("http://host", export, retries=-1), "retries is -1"),
        (lambda export: RemoteModel("http://host", export, workers=0), "workers is 0"),
        (lambda export: RemoteModel("http://host", export, workers=2.5), "workers is 2.5; give a whole number"),
        (lambda export: RemoteModel("http://host", export / "mean"), "cannot be read"),
        (lambda export: RemoteModel("http://host", export).predict([]), "no questions"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(make: Callable[[Path], Any], reason: str, export: Path) -> None:
    with pytest.raises(InputError, match=reason):
        make(export)
