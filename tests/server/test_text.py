"""Text over HTTP, read by OpenAI's own client, against the library's generation."""

from __future__ import annotations

import gc
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bayeslora.cli.ask import Generate
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.calibrate.confidence import ConfidenceModel
from bayeslora.predict.generation import Writing
from bayeslora.predict.generation.confidence import FEATURES, WrittenAnswer
from bayeslora.predict.generation.results import Generation, Token
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.engine import Engine
from bayeslora.server.limits import Limits
from bayeslora.server.pieces import Pieces
from server.live import ASKED, held_up, live, settled, wait_for
from tiers import some
from train.tiny import make_tokenizer

PROMPTS = ["the urn holds", "red", "a ball is drawn from the bag and"]
GREEDY: dict[str, Any] = {"model": "tiny-run", "temperature": 0}
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "red or blue"}]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def written(trained: TrainedModel, prompt: Any, tokens: int, top: int = 0, **settings: Any) -> Generation:
    samples = settings.pop("samples", trained.samples)
    model = replace(trained, samples=samples)
    return model.generate([prompt], Writing(max_new_tokens=tokens, **settings), top=top)[0]


def assert_confident(confidence: Any, want: Generation) -> None:
    for name in ("probability", "entropy", "aleatoric", "epistemic"):
        wanted = getattr(want, "probabilities" if name == "probability" else name)
        assert [token[name] for token in confidence["tokens"]] == pytest.approx(wanted, abs=1e-5)
    assert confidence["log_likelihood"] == pytest.approx(want.log_likelihood, abs=1e-4)
    assert confidence["mutual_information"] == pytest.approx(want.mutual_information, abs=1e-4)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny-run" and model.object == "model" and 0 < model.created <= time.time()
    assert client.models.retrieve("tiny-run") == model
    for other in ("gpt-4", "org/tiny-run"):
        with pytest.raises(openai.NotFoundError, match=f"model '{other}' does not exist; this server has") as missing:
            client.models.retrieve(other)
        assert missing.value.code == "model_not_found"


def test_a_model_of_the_hub_is_found_by_its_name(trained: TrainedModel) -> None:
    with live(create_app(Engine(trained, Limits()), "org/tiny-run")) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert client.models.retrieve("org/tiny-run").id == "org/tiny-run"
        assert "{name" not in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    "prompt, samples",
    some(
        [(prompt, samples) for prompt in PROMPTS for samples in (None, 0, 2)],
        [(PROMPTS[0], 2), (PROMPTS[1], 0), (PROMPTS[2], None)],
    ),
)
def test_a_completion(client: openai.OpenAI, trained: TrainedModel, prompt: str, samples: int | None) -> None:
    extra = {} if samples is None else {"samples": samples}
    got = client.completions.create(prompt=prompt, max_tokens=6, **GREEDY, extra_body=extra)
    want = written(trained, prompt, 6, **extra)
    assert got.object == "text_completion" and got.model == "tiny-run" and got.id.startswith("cmpl-")
    (choice,) = got.choices
    assert choice.text == want.text and choice.finish_reason == ("stop" if want.ended else "length")
    assert choice.logprobs is None and got.usage is not None
    assert got.usage.completion_tokens == len(want.token_ids)
    assert got.usage.prompt_tokens == len(trained.loaded.tokenizer(prompt).input_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert_confident(choice.confidence, want)  # type: ignore[attr-defined]


def test_several_prompts(client: openai.OpenAI, trained: TrainedModel) -> None:
    got = client.completions.create(prompt=PROMPTS, max_tokens=6, **GREEDY)
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert [choice.text for choice in got.choices] == [written(trained, prompt, 6).text for prompt in PROMPTS]
    bold = client.completions.create(prompt=PROMPTS, max_tokens=6, temperature=1.5, seed=3, model="tiny-run")
    want = [written(trained, prompt, 6, temperature=1.5, seed=3).text for prompt in PROMPTS]
    assert [choice.text for choice in bold.choices] == want


def test_sampling_and_its_seed(client: openai.OpenAI, trained: TrainedModel) -> None:
    def sample(**settings: Any) -> Any:
        return client.completions.create(model="tiny-run", prompt="red", max_tokens=12, **settings).choices[0]

    given = sample(temperature=0.8, top_p=0.9, seed=5)
    assert given.text == written(trained, "red", 12, temperature=0.8, top_p=0.9, seed=5).text
    free = [sample() for _ in range(3)]
    assert len({choice.text for choice in free}) > 1
    again = sample(seed=free[0].confidence["seed"])
    assert again.text == free[0].text


def test_log_probabilities_of_the_average(client: openai.OpenAI, trained: TrainedModel) -> None:
    want = written(trained, "red", 5, top=3)
    tokenizer = trained.loaded.tokenizer
    words = [tokenizer.decode([token]) for token in want.token_ids]
    values = pytest.approx([math.log(p) for p in want.probabilities], abs=1e-5)
    (choice,) = client.completions.create(prompt="red", max_tokens=5, logprobs=3, **GREEDY).choices
    assert choice.logprobs is not None and choice.logprobs.tokens == words and choice.logprobs.token_logprobs == values
    for found, ranked in zip(choice.logprobs.top_logprobs or [], want.top, strict=True):
        best = {tokenizer.decode([token]): value for token, value in reversed(ranked)}
        assert found == pytest.approx(best, abs=1e-5)
    lengths = [len(word) for word in words]
    assert choice.logprobs.text_offset == [sum(lengths[:k]) for k in range(5)]

    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, **GREEDY)
    want = written(trained, MESSAGES, 5, top=2)
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [token.logprob for token in content] == pytest.approx([math.log(p) for p in want.probabilities], abs=1e-5)
    for token, ranked in zip(content, want.top, strict=True):
        assert [top.logprob for top in token.top_logprobs] == pytest.approx([v for _, v in ranked], abs=1e-5)
        assert bytes(token.bytes or []).decode(errors="replace") == token.token


def test_a_chat(client: openai.OpenAI, trained: TrainedModel) -> None:
    got = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=6, **GREEDY)
    want = written(trained, MESSAGES, 6)
    (choice,) = got.choices
    assert choice.message.content == want.text and choice.message.role == "assistant"
    assert got.object == "chat.completion" and got.usage is not None and got.usage.completion_tokens == 6
    assert_confident(choice.confidence, want)  # type: ignore[attr-defined]
    parts: Any = [*MESSAGES[:1], {"role": "user", "content": [{"type": "text", "text": "red or blue"}]}]
    assert client.chat.completions.create(messages=parts, max_tokens=6, **GREEDY).choices == got.choices


def test_a_message_is_taken_back_as_the_client_gave_it(client: openai.OpenAI, trained: TrainedModel, url: str) -> None:
    """With the fields that OpenAI's client adds and leaves empty, in whichever way it is written down."""
    said = client.chat.completions.create(messages=MESSAGES, max_tokens=6, **GREEDY).choices[0].message
    again = {"role": "user", "content": "and green"}
    want = written(trained, [*MESSAGES, {"role": "assistant", "content": said.content}, again], 4)
    empty = {
        "refusal": "I am not sure",
        "annotations": [],
        "tool_calls": [],
        "audio": None,
        "function_call": None,
        "parsed": None,
    }
    for back in (said, said.model_dump(), said.to_dict(), said.model_dump() | empty):
        talk: Any = [*MESSAGES, back, again]
        got = client.chat.completions.create(messages=talk, max_tokens=4, **GREEDY)
        assert got.choices[0].message.content == want.text
    plain = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 6, "temperature": 0})
    raw = [*MESSAGES, plain.json()["choices"][0]["message"], again]
    assert httpx.post(f"{url}/v1/chat/completions", json={"messages": raw, "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize(
    "extra",
    [
        {"annotations": [{"type": "url_citation"}]},
        {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"audio": {"id": "1"}},
        {"parsed": {"answer": 1}},
        {"content": None},
        {"anything": None},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_what_a_message_holds_and_cannot_be_honoured_is_refused(url: str, extra: dict[str, Any]) -> None:
    talk = [*MESSAGES, {"role": "assistant", "content": "red", **extra}]
    got = httpx.post(f"{url}/v1/chat/completions", json={"messages": talk, "max_tokens": 2})
    assert got.status_code == 422 and got.json()["error"]["message"].startswith(f"messages.2.{next(iter(extra))}")


def test_a_chat_without_bounds_is_bounded(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert got.usage is not None and got.usage.completion_tokens <= 64


def test_a_stop(client: openai.OpenAI, trained: TrainedModel) -> None:
    whole = written(trained, PROMPTS[0], 12).text
    stop = whole[3:5]
    for given in (stop, [stop, "never"]):
        got = client.completions.create(prompt=PROMPTS[0], max_tokens=12, stop=given, **GREEDY).choices[0]
        assert got.text == whole[: whole.index(stop)] and got.finish_reason == "stop"


@pytest.mark.parametrize(
    "settings, stop",
    some(
        [
            (settings, stop)
            for settings in ({"temperature": 0}, {"temperature": 1.5, "seed": 3})
            for stop in (False, True)
        ],
        [({"temperature": 0}, False), ({"temperature": 1.5, "seed": 3}, True)],
    ),
)
def test_a_stream_of_completions(
    client: openai.OpenAI, trained: TrainedModel, settings: dict[str, Any], stop: bool
) -> None:
    wholes = [written(trained, prompt, 12, **settings) for prompt in PROMPTS]
    stops = (wholes[0].text[3:5],) if stop else ()
    wants = [written(trained, prompt, 12, stop=stops, **settings) for prompt in PROMPTS]
    stream = client.completions.create(
        model="tiny-run",
        prompt=PROMPTS,
        max_tokens=12,
        stop=list(stops),
        logprobs=1,
        stream=True,
        stream_options={"include_usage": True},
        **settings,
    )
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sum(len(want.token_ids) for want in wants)
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks[:-1])
    for index, want in enumerate(wants):
        own: list[Any] = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == want.text
        ends = ["stop" if want.ended else "length"]
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ends
        tokens = [token for choice in own for token in choice.confidence["tokens"]]
        assert_confident(own[-1].confidence | {"tokens": tokens}, want)
        told = [value for choice in own for value in choice.logprobs.token_logprobs]
        assert told == pytest.approx([math.log(p) for p in want.probabilities], abs=1e-5)


def test_a_stream_of_chat(client: openai.OpenAI, trained: TrainedModel, url: str) -> None:
    want = written(trained, MESSAGES, 6)
    chunks: Any = list(client.chat.completions.create(messages=MESSAGES, max_tokens=6, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[-1].usage is None
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True, "temperature": 0}
    raw = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = raw.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])


@pytest.mark.parametrize(
    "change, status, message",
    [
        ({"n": 9}, 422, "n: Input should be less than or equal to 8"),
        ({"top_k": -1}, 422, "top_k: Input should be greater than or equal to 0"),
        ({"min_p": 2}, 422, "min_p: Input should be less than or equal to 1"),
        ({"best_of": 2}, 422, "best_of: Input should be 1"),
        ({"echo": True}, 422, "echo: Input should be False"),
        ({"max_tokens": 0}, 422, "max_tokens: Input should be greater than or equal to 1"),
        ({"stream": "true"}, 422, "stream: Input should be a valid boolean"),
        ({"max_tokens": 65}, 400, "max_tokens is 65; this server allows at most 64"),
        ({"temperature": -1}, 422, "temperature: Input should be greater than or equal to 0"),
        ({"top_p": 0}, 422, "top_p: Input should be greater than 0"),
        ({"stop": ""}, 422, "stop: String should have at least 1 character"),
        ({"stop": [""]}, 422, "stop.0: String should have at least 1 character"),
        ({"stop": ["a"] * 5}, 422, "stop: List should have at most 4 items"),
        ({"stop": 5}, 422, "stop: Input should be a valid string"),
        ({"logprobs": 21}, 422, "logprobs: Input should be less than or equal to 20"),
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": [1, 2, 3]}, 422, "prompt.0: Input should be a valid string"),
        ({"prompt": ["red"] * 17}, 422, "prompt: List should have at most 16 items"),
        ({"suffix": "blue"}, 422, "suffix: not supported; leave it out"),
        ({"prompt": "word " * 10_000}, 400, "tokens; at most 4096 are allowed"),
        ({"prompt": "word " * 20_000}, 400, "the text has 100000 bytes; at most 65536 are allowed"),
        (
            {"prompt": "abcdefgh" * 62, "max_tokens": 60},
            400,
            "but the context length is 512; shorten",
        ),
        ({"presence_penalty": 1.0}, 422, "presence_penalty: Input should be less than or equal to 0"),
        ({"logit_bias": {"five": 1}}, 422, "logit_bias.five"),
        ({"logit_bias": {"5": 101}}, 422, "logit_bias.5: Input should be less than or equal to 100"),
        ({"logit_bias": {str(k): 1 for k in range(301)}}, 422, "logit_bias: Dictionary should have at most 300 items"),
        ({"logit_bias": {"999999": 1}}, 400, "logit_bias has token 999999; the model has"),
        ({"model": "gpt-4"}, 404, "model 'gpt-4' does not exist"),
        ({"samples": 99}, 400, "samples is 99; this server allows at most 16"),
        ({"seed": 2**63}, 422, "seed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_cannot_be(url: str, change: dict[str, Any], status: int, message: str, stream: bool) -> None:
    """In a stream, too, they have a status."""
    body = {"prompt": "red", "max_tokens": 2, "temperature": 0, "stream": stream} | change
    got = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert (got.status_code, message in got.json()["error"]["message"]) == (status, True), got.text


def test_errors_as_the_client_knows_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="red")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="allows at most 64"):
        client.completions.create(prompt="red", max_tokens=100, **GREEDY)
    with pytest.raises(openai.UnprocessableEntityError, match="tools: not supported; leave it out"):
        client.chat.completions.create(messages=MESSAGES, tools=[{"type": "function"}], **GREEDY)  # type: ignore
    with pytest.raises(openai.BadRequestError, match="top_logprobs requires logprobs"):
        client.chat.completions.create(messages=MESSAGES, top_logprobs=2, **GREEDY)


def test_a_part_of_a_message_that_is_no_text_is_told(url: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    got = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]})
    assert got.status_code == 422
    assert got.json()["error"]["message"] == "messages.0.content.0.type: Input should be 'text'"
    assert got.json()["error"]["param"] == "messages.0.content.0.type"


def test_a_chat_without_bounds_fits_a_short_context(trained: TrainedModel) -> None:
    with held_up(trained) as (engine, _, client):  # the limit of 512 tokens is the model's whole context
        engine.go.set()
        got = client.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": 0})
        assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] <= 256


def test_tokens_keep_the_space_before_them(trained: TrainedModel) -> None:
    """Where a tokenizer strips it from the beginning of a text, as that of Llama 2."""
    bare = Tokenizer(models.BPE(unk_token="?"))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    learning = trainers.BpeTrainer(special_tokens=["?"], initial_alphabet=[":"], show_progress=False)
    bare.train_from_iterator(["the pool is open"] * 3, learning)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="?")
    engine = Engine(replace(trained, loaded=replace(trained.loaded, tokenizer=tokenizer)), Limits())
    token = Token(tokenizer("pool").input_ids[-1], 0.5, 0.0, 0.0, 0.0)
    assert tokenizer.decode([token.id]) == "pool" and engine._piece(token, "").word.text == " pool"


def test_a_model_without_a_template_does_not_chat(trained: TrainedModel) -> None:
    tokenizer = make_tokenizer()
    plain = replace(trained, loaded=replace(trained.loaded, tokenizer=tokenizer))
    with held_up(plain) as (engine, _, client):
        engine.go.set()
        for stream in (False, True):
            got = client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream})
            assert got.status_code == 400 and "has no chat template" in got.json()["error"]["message"]


# Confidence -----------------------------------------------------------------------------------------------------------


def calibrated(trained: TrainedModel, threshold: float) -> TrainedModel:
    """Its confidence in texts is 1 / (1 + e) where one draw of two agrees, and more where both do."""
    weights = tuple(float(name == "agreement") for name in FEATURES)
    means, scales = tuple(0.5 * weight for weight in weights), (0.5,) * len(FEATURES)
    confidence = ConfidenceModel(FEATURES, means, scales, weights, -1.0)
    return replace(trained, calibration=Calibration(confidence=confidence, threshold=threshold))


def assert_compared(confidence: Any, want: WrittenAnswer) -> None:
    assert confidence["value"] == pytest.approx(want.confidence, abs=1e-5)
    assert confidence["agreement"] == want.agreement.share and confidence["abstains"] == want.abstains
    assert confidence["semantic_entropy"] == pytest.approx(want.agreement.semantic_entropy)
    assert [(it["text"], it["share"]) for it in confidence["alternatives"]] == list(want.alternatives)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_is_compared_with_those_of_the_draws(client: openai.OpenAI, trained: TrainedModel, prompt: str) -> None:
    got: Any = client.completions.create(prompt=prompt, max_tokens=6, extra_body={"agreement": True}, **GREEDY)
    [want] = trained.answer_writer(Writing(max_new_tokens=6))([prompt])
    assert_compared(got.choices[0].confidence, want)
    assert got.choices[0].confidence["calibrated"] is False and not want.abstains
    plain: Any = client.completions.create(prompt=prompt, max_tokens=6, **GREEDY)
    assert plain.choices[0].text == got.choices[0].text
    assert all(plain.choices[0].confidence[name] is None for name in ("value", "abstains", "agreement", "alternatives"))


QUESTION = "red or blue"


@pytest.fixture
def ends(trained: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the question ends by itself after at most six tokens, which the tiny model does not learn."""
    asked = calibrated(trained, 0.5).asked(QUESTION)
    monkeypatch.setattr(
        trained.loaded.model.generation_config, "eos_token_id", written(trained, asked, 6).token_ids[-1]
    )


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("threshold, quiet", [(0.001, False), (0.999, True)])
def test_a_chat_says_when_it_is_not_sure(trained: TrainedModel, threshold: float, quiet: bool) -> None:
    """A run whose confidence is calibrated tells it unasked, also at the end of a stream, and asks as calibration did."""
    model = calibrated(trained, threshold)
    with held_up(model) as (engine, _, http):
        engine.go.set()
        client = openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": QUESTION}]
        got: Any = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
        choice = got.choices[0]
        want = model.answer(QUESTION, max_new_tokens=8)
        assert_compared(choice.confidence, want)
        assert choice.finish_reason == "stop" and want.text != written(model, messages, 8).text.strip()
        assert choice.confidence["abstains"] is quiet and choice.confidence["calibrated"] is True
        assert choice.message.content == want.generation.text
        said = f"I am not sure: confidence {want.confidence:.2f}, below 1.00."
        assert choice.message.refusal == (said if quiet else None)
        chunks: Any = list(client.chat.completions.create(messages=messages, max_tokens=8, stream=True, **GREEDY))
        assert_compared(chunks[-1].choices[0].confidence, want)
        assert chunks[-1].choices[0].confidence["calibrated"] is True
        assert chunks[-1].choices[0].delta.refusal == choice.message.refusal
        talk = [*messages, choice.message, {"role": "user", "content": "sure"}]
        assert client.chat.completions.create(messages=talk, max_tokens=2, **GREEDY).choices


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    "change",
    [
        {"messages": MESSAGES},
        {"messages": [{"role": "system", "content": QUESTION}]},
        {"prompt": QUESTION},
        {"temperature": 1.0, "seed": 1},
        {"max_tokens": 1},
        {"stop": "no such text"},
        {"logit_bias": {"5": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_calibration_is_not_of_other_texts(trained: TrainedModel, change: dict[str, Any]) -> None:
    """Their confidence is their own probability, and the model does not abstain."""
    settings = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0} | change
    body, path = settings, "/v1/chat/completions"
    if "prompt" in change:
        path = "/v1/completions"
        del body["messages"]
    with held_up(calibrated(trained, 0.999)) as (engine, _, client):
        engine.go.set()
        choice = client.post(path, json=body).json()["choices"][0]
    confidence = choice["confidence"]
    assert (confidence["calibrated"], confidence["abstains"]) == (False, False)
    assert confidence["agreement"] is not None and confidence["alternatives"] is not None
    assert math.log(confidence["value"]) == pytest.approx(confidence["log_likelihood"], rel=0.2)
    assert choice.get("message", {}).get("refusal") is None


def test_a_question_needs_no_template_where_calibration_needed_none(trained: TrainedModel) -> None:
    plain = replace(calibrated(trained, 0.5), loaded=replace(trained.loaded, tokenizer=make_tokenizer()))
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6, "temperature": 0}
    with held_up(plain) as (engine, _, client):
        engine.go.set()
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == written(plain, f"Question: {QUESTION}\nAnswer:", 6).text


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    "tokens, stop, told",
    [
        (8, (), "(calibrated)"),
        (1, (), "(not calibrated for texts"),
        (8, ("no such text",), "(not calibrated for texts"),
    ],
)
def test_the_command_line_calls_the_same_texts_calibrated(
    trained: TrainedModel, capsys: pytest.CaptureFixture[str], tokens: int, stop: tuple[str, ...], told: str
) -> None:
    model = calibrated(trained, 0.5)
    answer = model.answer(QUESTION, max_new_tokens=tokens, stop=stop)
    generate = Generate(directory=trained.directory.path, prompt=QUESTION, confidence=True, stop=stop)
    generate._print_answer(answer, model.calibration)
    assert told in capsys.readouterr().out


def test_a_question_that_is_not_compared_is_a_chat_as_it_is(trained: TrainedModel) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "agreement": False}
    with held_up(calibrated(trained, 0.5)) as (engine, _, client):
        engine.go.set()
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] == written(trained, messages, 6).text


def test_greedy_texts_have_the_seed_of_the_run(trained: TrainedModel) -> None:
    """As they have on the command line, and as choices have on the server."""
    seeded = replace(trained, config=replace(trained.config, seed=5))
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "agreement": True}
    with held_up(seeded) as (engine, _, client):
        engine.go.set()
        confidence = client.post("/v1/chat/completions", json=body).json()["choices"][0]["confidence"]
    [want] = seeded.answer([MESSAGES], max_new_tokens=6)
    assert confidence["seed"] == 5 and want.generation == seeded.generate([MESSAGES], max_new_tokens=6)[0]
    assert_confident(confidence, want.generation)
    assert_compared(confidence, want)


def test_several_texts_of_a_prompt(client: openai.OpenAI, trained: TrainedModel) -> None:
    """Each is what its own seed gives, and the prompt is counted once."""
    settings: dict[str, Any] = {"temperature": 1.5, "seed": 7, "model": "tiny-run"}
    got = client.completions.create(prompt=PROMPTS[:2], n=3, max_tokens=6, **settings)
    want = [written(trained, prompt, 6, temperature=1.5, seed=7 + k) for prompt in PROMPTS[:2] for k in range(3)]
    assert [choice.text for choice in got.choices] == [one.text for one in want]
    lengths = [len(trained.loaded.tokenizer(prompt).input_ids) for prompt in PROMPTS[:2]]
    assert got.usage is not None and got.usage.prompt_tokens == sum(lengths)
    assert got.usage.completion_tokens == sum(len(one.token_ids) for one in want)
    chat = client.chat.completions.create(messages=MESSAGES, n=2, max_tokens=6, **settings)
    told = [written(trained, MESSAGES, 6, temperature=1.5, seed=7 + k).text for k in range(2)]
    assert [choice.message.content for choice in chat.choices] == told
    usage = {"include_usage": True}
    stream: Any = client.chat.completions.create(
        messages=MESSAGES, n=2, max_tokens=6, stream=True, stream_options=usage, **settings
    )
    *chunks, last = list(stream)
    for index in range(2):
        own = [chunk.choices[0].delta for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].role == "assistant" and "".join(delta.content for delta in own) == told[index]
    assert last.usage == chat.usage


def test_what_is_sampled_can_be_limited(client: openai.OpenAI, trained: TrainedModel) -> None:
    def sample(**settings: Any) -> str:
        known = {name: settings.pop(name) for name in ("top_k", "min_p") if name in settings}
        given = {"temperature": 1.5, "seed": 2, "model": "tiny-run"} | settings
        return client.completions.create(prompt="red", max_tokens=8, extra_body=known, **given).choices[0].text

    greedy = written(trained, "red", 8, seed=2).text
    free = sample()
    assert free != greedy and sample(top_k=1) == greedy and sample(min_p=1.0) == greedy
    assert sample(top_k=0, min_p=0.0) == free
    for settings in ({"top_k": 3}, {"min_p": 0.5}):
        assert sample(**settings) == written(trained, "red", 8, temperature=1.5, seed=2, **settings).text
    first = written(trained, "red", 1).token_ids[0]
    for temperature in (0, 1.5):
        without: Any = client.completions.create(
            model="tiny-run", prompt="red", max_tokens=1, temperature=temperature, seed=0, logit_bias={str(first): -100}
        )
        forced: Any = client.completions.create(
            model="tiny-run", prompt="red", max_tokens=1, temperature=temperature, logit_bias={"5": 100}
        )
        word = trained.loaded.tokenizer.decode([first])
        assert without.choices[0].confidence["tokens"][0]["token"] != word
        token = forced.choices[0].confidence["tokens"][0]
        assert token["token"] == trained.loaded.tokenizer.decode([5]) and token["probability"] < 0.9  # before the bias


# Side by side -------------------------------------------------------------------------------------------------------


def test_greedy_texts_are_written_together_and_sampled_ones_alone(trained: TrainedModel) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": 5, "temperature": 0} for prompt in PROMPTS]
    bodies += [{"prompt": "red", "max_tokens": 5, "temperature": 1.5, "seed": 3}] * 2
    bodies += [{"prompt": "red", "max_tokens": 4, "temperature": 0}]
    with held_up(trained) as (engine, worker, client), ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.post, "/v1/choices", json=ASKED)
        assert engine.begun.wait(20)
        waiting = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
        wait_for(lambda: worker.depth == len(bodies))
        engine.go.set()
        together = [future.result().json()["choices"][0] for future in waiting]
        assert first.result().status_code == 200
        assert sorted(count for what, count in engine.log if what == "write") == [1, 1, 1, 3]
    for got, body in zip(together, bodies, strict=True):
        settings = {name: body[name] for name in ("temperature", "seed") if name in body}
        want = written(trained, body["prompt"], body["max_tokens"], **settings)
        assert got["text"] == want.text
        assert_confident(got["confidence"], want)


def test_questions_are_answered_between_tokens(trained: TrainedModel) -> None:
    """A long text does not keep them waiting, and they do not change it."""
    with held_up(trained) as (engine, _, client), ThreadPoolExecutor(2) as pool:
        engine.go.set()
        engine.delay = 0.02
        alone = client.post("/v1/choices", json=ASKED).json()
        body = {"prompt": "red", "max_tokens": 40, "temperature": 1.5, "seed": 3}
        text = pool.submit(client.post, "/v1/completions", json=body)
        wait_for(lambda: ("token", 1) in engine.log)
        for _ in range(3):
            assert client.post("/v1/choices", json=ASKED).json() == alone
        assert not text.done()
        assert text.result().json()["choices"][0]["text"] == written(trained, "red", 40, temperature=1.5, seed=3).text


def test_questions_are_answered_while_every_draw_writes_by_itself(trained: TrainedModel) -> None:
    """To compare a text with theirs takes as long as the text."""
    with held_up(trained) as (engine, _, client), ThreadPoolExecutor(2) as pool:
        engine.go.set()
        engine.delay = 0.02
        alone = client.post("/v1/choices", json=ASKED).json()
        body = {"prompt": "red", "max_tokens": 20, "temperature": 0, "agreement": True}
        want = client.post("/v1/completions", json=body).json()["choices"]
        engine.log.clear()
        text = pool.submit(client.post, "/v1/completions", json=body)
        wait_for(lambda: ("token", 0) in engine.log)
        assert client.post("/v1/choices", json=ASKED).json() == alone
        assert not text.done()
        assert text.result().json()["choices"] == want


def test_a_stream_whose_client_has_gone_is_given_up(trained: TrainedModel) -> None:
    with held_up(trained) as (engine, _, client):
        engine.go.set()
        engine.delay = 0.05
        body = {"prompt": "red", "max_tokens": 400, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        before = len(engine.log)
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        wait_for(lambda: engine.log[-1][0] == "answer" or len(engine.log) > before)
        assert settled(engine.log) < 200


def test_a_client_that_has_gone_leaves_nothing_in_the_log(
    trained: TrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with held_up(trained) as (engine, _, client):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": "red", "temperature": 0}, timeout=0.2)
        wait_for(lambda: 'status="499"} 1' in client.get("/metrics").text)
        engine.go.set()
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        gc.collect()
    assert [it.getMessage() for it in caplog.records if it.name == "asyncio"] == []


def test_a_stream_that_takes_too_long_says_so(trained: TrainedModel) -> None:
    with held_up(trained, timeout=0.5) as (engine, _, client):
        engine.go.set()
        engine.delay = 0.05
        body = {"prompt": "red", "max_tokens": 400, "temperature": 0, "stream": True}
        events = client.post("/v1/completions", json=body).text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
        reader = openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match=r"no answer within 0\.5 s"):
            list(reader.completions.create(model="tiny-run", prompt="red", max_tokens=400, temperature=0, stream=True))


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["aäößé 😀 end", "stop here, or sto p", "aaab", "😀😀"])
@pytest.mark.parametrize("stop", [(), ("stop",), ("aab", "end")])
def test_pieces_make_the_whole(text: str, stop: tuple[str, ...]) -> None:
    """Characters of several tokens, and beginnings of stops that were none, are held back and not lost."""
    tokenizer = make_tokenizer()
    pieces, told = Pieces(tokenizer, stop), ""
    for token in tokenizer(text).input_ids:
        if not pieces.stopped:
            told += pieces.add(token)
            assert text.startswith(told)
    places = [text.index(word) for word in stop if word in text]
    want = text[: min(places)] if places else text
    assert want.startswith(told) and pieces.stopped == bool(places)
    held = want[len(told) :]
    assert not held or any(word.startswith(held) for word in stop)
