"""The FastAPI application and its endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from peft.utils import CONFIG_NAME
from pydantic import BaseModel

import bayeslora
from bayeslora.predict.generation import Prompt, Writing
from bayeslora.server.announcement import Announcement
from bayeslora.server.client import PROOF
from bayeslora.server.dispatcher import Dispatcher
from bayeslora.server.engine import Engine, Question, Text, Written
from bayeslora.server.errors import Failure, as_failure, described, error_body, install_handlers
from bayeslora.server.evaluation import evaluate_run
from bayeslora.server.hosts import Hosts, KnowHost
from bayeslora.server.idle import Idle
from bayeslora.server.limits import LOOKS, SEEDS
from bayeslora.server.metrics import CONTENT_TYPE, Metrics
from bayeslora.server.middleware import Guard, LimitBody, LimitWork, Measure, NoteWork, RequireToken
from bayeslora.server.openai_schemas import ChatCompletion, ChatRequest, Completion, CompletionRequest, TextRequest
from bayeslora.server.replies import ChatReply, CompletionReply, Reply
from bayeslora.server.schemas import (
    AnswerRequest,
    ChoicesReply,
    ChoicesRequest,
    ClassifyRequest,
    Evaluation,
    Health,
    Model,
    ModelList,
    Proof,
)
from bayeslora.server.web import DOCS, page_routes
from bayeslora.server.worker import ModelWorker
from bayeslora.tasks import Item, make_item
from bayeslora.tasks.answers import only_question

log = logging.getLogger("bayeslora.server")

WORK_ERRORS = described(400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)
LOOK_ERRORS = described(401, 403, 500)
STREAM: dict[int | str, dict[str, Any]] = {  # OpenAPI 3.1 has no schema for single events
    200: {"content": {"text/event-stream": {"schema": {}}}}
}
COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of ``/v1/completions``, as in OpenAI's API."""


def create_app(
    engine: Engine,
    name: str,
    token: str | None = None,
    evaluation: Path | None = None,
    hosts: Hosts | None = None,
    announcement: Announcement | None = None,
) -> FastAPI:
    """Create the ASGI application; its lifespan starts and stops the worker.

    Args:
        engine: computes the answers.
        name: of the model.
        token: bearer token that requests must send, if any.
        evaluation: directory written by ``bayeslora evaluate --out``; its metrics replace the run's own.
        hosts: accepted ``Host`` headers; by default local ones only.
        announcement: of which the server gives proof, if it is announced.
    """
    limits = engine.limits
    told = evaluate_run(engine.trained, name, limits.max_samples, evaluation)
    server = _Endpoints(engine, name, told, wants_token=token is not None)
    if announcement is not None:
        server.router.add_api_route(PROOF, _prover(announcement), include_in_schema=False)
    paths = {route.path for route in server.router.routes if hasattr(route, "path") and "{" not in route.path}
    metrics = Metrics(sorted(paths | {"/", "/openapi.json", DOCS}))
    worker = ModelWorker(engine, limits.queue, metrics)
    metrics.depth.set_function(lambda: worker.depth)
    server.metrics, server.worker, server.dispatcher = metrics, worker, Dispatcher(worker, limits.timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()  # accepted requests were drained before
        await asyncio.to_thread(worker.join)

    app = FastAPI(
        title="bayeslora",
        version=bayeslora.__version__,
        description="A fine-tuned language model that knows what it does not know.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    install_handlers(app)
    app.include_router(server.router)
    app.include_router(page_routes(app.openapi))
    app.state.worker, app.state.idle = worker, Idle()
    app.add_middleware(NoteWork, idle=app.state.idle)
    app.add_middleware(LimitWork, most=limits.connections - LOOKS)
    app.add_middleware(LimitBody, most=limits.max_body, seconds=limits.timeout)
    if token is not None:
        app.add_middleware(RequireToken, token=token)
    app.add_middleware(KnowHost, hosts=hosts or Hosts())
    app.add_middleware(Guard)
    app.add_middleware(Measure, metrics=metrics)
    return app


def _prover(announcement: Announcement) -> Callable[[str], Awaitable[Proof]]:
    async def prove(challenge: str) -> Proof:
        """Prove that this server has written its announcement."""
        return Proof(proof=announcement.proof(challenge))

    return prove


class _Endpoints:
    def __init__(self, engine: Engine, name: str, evaluation: Evaluation, *, wants_token: bool) -> None:
        self.name = name
        self.limits = engine.limits
        self.trained = engine.trained
        self.samples = engine.trained.samples
        self.chat_tokens = engine.chat_tokens
        self.calibration = engine.trained.calibration
        self.dispatcher: Dispatcher
        self.metrics: Metrics
        self.worker: ModelWorker
        self.evaluation = evaluation
        directory = engine.trained.directory
        self.created = int(
            (directory.adapter / CONFIG_NAME if directory.is_adapter else directory.config).stat().st_mtime
        )
        self.router = self._routes(wants_token=wants_token)

    def _routes(self, *, wants_token: bool) -> APIRouter:
        """Register the routes. Tokens are only declared for OpenAPI here; :class:`RequireToken` checks them."""
        router = APIRouter()
        bearer = [Depends(HTTPBearer(auto_error=False))] if wants_token else []
        look: dict[str, Any] = {"methods": ["GET"], "dependencies": bearer, "responses": LOOK_ERRORS}
        work: dict[str, Any] = {"methods": ["POST"], "dependencies": bearer}
        router.add_api_route("/healthz", self.health, methods=["GET"], responses=described(403, 503))
        router.add_api_route("/healthz", self.health, methods=["HEAD"], include_in_schema=False)
        router.add_api_route("/metrics", self.prometheus, response_class=Response, **look)
        router.add_api_route("/v1/models", self.models, **look)
        missing = {**look, "responses": LOOK_ERRORS | described(404)}
        router.add_api_route("/v1/models/{name:path}", self.model, **missing)  # a name on the hub has a slash
        router.add_api_route("/v1/evaluation", self.evaluated, **look)
        router.add_api_route("/v1/choices", self.choices, responses=WORK_ERRORS, **work)
        router.add_api_route("/v1/classify", self.classify, responses=WORK_ERRORS, **work)
        streamed = WORK_ERRORS | STREAM
        router.add_api_route("/v1/completions", self.complete, response_model=Completion, responses=streamed, **work)
        router.add_api_route(
            "/v1/chat/completions", self.chat, response_model=ChatCompletion, responses=streamed, **work
        )
        return router

    async def health(self) -> Health:
        """Health check: whether the server is up and the model can predict."""
        if (trouble := self.worker.trouble) is not None:
            raise Failure(503, trouble)
        return Health(status="ok")

    async def prometheus(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self) -> ModelList:
        """List the served model."""
        return ModelList(data=[self._served])

    async def model(self, name: str) -> Model:
        """The served model, by its name."""
        self._require_model(name)
        return self._served

    async def evaluated(self) -> Evaluation:
        """Configuration, calibration and metrics of the run."""
        return self.evaluation

    async def choices(self, request: Request, body: ChoicesRequest) -> ChoicesReply:
        """Probabilities over the choices of a question, and whether the model abstains."""
        self._require_model(body.model)
        self.limits.require_readable([body.question, *body.choices, body.passage])
        item = make_item(body.question, body.choices, body.passage, bare=body.bare)
        return await self._answer(request, item, body)

    async def classify(self, request: Request, body: ClassifyRequest) -> ChoicesReply:
        """Probabilities over the labels of a text, for runs that were trained on texts with labels."""
        self._require_model(body.model)
        self.limits.require_readable([body.text])
        (item,) = self.trained.labelled([body.text])
        return await self._answer(request, item, body)

    async def _answer(self, request: Request, item: Item, body: AnswerRequest) -> ChoicesReply:
        question = Question(item, self._samples(body.samples), body.level, body.deterministic, body.alone)
        answered = await self.dispatcher.ask(request, question)
        answer = answered.answer
        return ChoicesReply(
            model=self.name,
            answer=answer.answer,
            confidence=answer.confidence,
            choices=list(answer.choices),
            probabilities=list(answer.probabilities),
            entropy=answer.entropy,
            aleatoric=answer.aleatoric,
            epistemic=answer.epistemic,
            abstains=answer.abstains,
            agreement=answer.agreement,
            semantic_entropy=answer.semantic_entropy,
            prediction_set=None if answer.prediction_set is None else list(answer.prediction_set),
            distance=answer.distance,
            unfamiliar=answer.unfamiliar,
            draws=answered.draws,
            level=body.level,
            deterministic=answered.deterministic,
        )

    async def complete(self, request: Request, body: CompletionRequest) -> Any:
        """Complete prompts with tokens from the distribution averaged over the posterior samples."""
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        wanted = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        texts = self._texts(prompts, body, wanted, body.logprobs or 0)
        reply = CompletionReply(
            self.name, texts, self.calibration, copies=body.n or 1, logprobs=body.logprobs is not None
        )
        return await self._reply(request, body, texts, reply)

    async def chat(self, request: Request, body: ChatRequest) -> Any:
        """Complete a chat."""
        if body.top_logprobs is not None and not body.logprobs:
            raise Failure(400, "top_logprobs requires logprobs; set logprobs to true")
        given = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
        messages = [message.plain for message in body.messages]
        texts = self._texts([messages], body, given[0] if given else self.chat_tokens, body.top_logprobs or 0)
        reply = ChatReply(self.name, texts, self.calibration, copies=body.n or 1, logprobs=bool(body.logprobs))
        return await self._reply(request, body, texts, reply)

    def _texts(self, prompts: Sequence[Prompt], body: TextRequest, wanted: int, top: int) -> list[Text]:
        self._require_model(body.model)
        if wanted > self.limits.max_tokens:
            raise Failure(400, f"max_tokens is {wanted}; this server allows at most {self.limits.max_tokens}")
        for prompt in prompts:
            self.limits.require_readable([prompt] if isinstance(prompt, str) else [m["content"] for m in prompt])
        temperature = 1.0 if body.temperature is None else body.temperature
        default = random.getrandbits(31) if temperature > 0 else self.trained.config.seed
        writing = Writing(
            max_new_tokens=wanted,
            temperature=temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            min_p=body.min_p or 0.0,
            logit_bias=body.biases,
            stop=body.stops,
            seed=default if body.seed is None else body.seed,
        )
        texts = [self._text(prompt, writing, body, top) for prompt in prompts]
        seeds = [(writing.seed + k) % SEEDS for k in range(body.n or 1)]
        return [replace(text, writing=replace(writing, seed=seed)) for text in texts for seed in seeds]

    def _text(self, prompt: Prompt, writing: Writing, body: TextRequest, top: int) -> Text:
        """A text to write. With agreement, a chat of one question is asked as ``bayeslora generate --confidence`` asks it."""
        agreement = self.calibration.confidence is not None if body.agreement is None else body.agreement
        question = agreement and not isinstance(prompt, str) and only_question(prompt) is not None
        asked = self.trained.asked(prompt) if question else prompt
        return Text(asked, writing, self._samples(body.samples), top, agreement, question)

    async def _reply(self, request: Request, body: TextRequest, texts: Sequence[Text], reply: Reply) -> Any:
        if not body.stream:
            return reply.whole(await self.dispatcher.write(request, texts))
        events = await self.dispatcher.stream(request, texts)
        usage = body.stream_options is not None and body.stream_options.include_usage
        sent = _sent(_pieces(events, reply, usage=usage))
        return StreamingResponse(sent, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _samples(self, wanted: int | None) -> int:
        samples = self.samples if wanted is None else wanted
        if samples > self.limits.max_samples:
            raise Failure(400, f"samples is {samples}; this server allows at most {self.limits.max_samples}")
        return samples

    @property
    def _served(self) -> Model:
        return Model(id=self.name, created=self.created)

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise Failure(404, f"model {name!r} does not exist; this server has {self.name!r}", code="model_not_found")


async def _pieces(events: AsyncIterator[Any], reply: Reply, *, usage: bool) -> AsyncIterator[BaseModel]:
    done: dict[int, Written] = {}
    for piece in reply.opening():
        yield piece
    async for event in events:
        if isinstance(event.news, Written):
            done[event.index] = event.news
            yield reply.closing(event.index, event.news)
        else:
            yield reply.piece(event.index, event.news)
    if usage:
        yield reply.usage_piece(reply.usage([done[index] for index in sorted(done)]))


async def _sent(pieces: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    """Encode pieces as server-sent events. An error is an event, too, since the status was sent before."""
    try:
        async for piece in pieces:
            yield f"data: {piece.model_dump_json()}\n\n"
    except Exception as error:
        failure = as_failure(error)
        if failure is None:
            log.exception("a stream failed")
            failure = Failure(500, "internal server error; see the server log")
        yield f"data: {json.dumps(error_body(failure.status, failure.message))}\n\n"
        return
    yield "data: [DONE]\n\n"
