"""Queues requests for the worker and waits for the results, with a timeout and until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from bayeslora.server.engine import Answered, Piece, Question, Text, Written
from bayeslora.server.errors import GONE, Failure, busy
from bayeslora.server.worker import STOPPING, Closed, Full, ModelWorker, QueuedRequest, TextJob


@dataclass(frozen=True)
class Event:
    """Progress of one of several texts: a new piece, or the complete text."""

    index: int
    news: Piece | Written


class Dispatcher:
    """Queues requests for a worker and waits for the results.

    Args:
        worker: computes the results.
        timeout: seconds after which a request is cancelled.
    """

    def __init__(self, worker: ModelWorker, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout

    async def ask(self, request: Request, question: Question) -> Answered:
        """Answer a question."""
        job: QueuedRequest[Question, Answered] = QueuedRequest(question)
        try:
            with _in_words():
                self._worker.ask(job)
                answered: Answered = await self._first(request, asyncio.wrap_future(job.future), self._deadline())
            return answered
        finally:
            job.abandon()

    async def write(self, request: Request, texts: Sequence[Text]) -> list[Written]:
        """Generate texts; returns when all are complete."""
        jobs: list[TextJob] = [QueuedRequest(text) for text in texts]
        try:
            with _in_words():
                self._worker.write(jobs)
                all_done = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
                written: list[Written] = await self._first(request, all_done, self._deadline())
            return written
        finally:
            _abandon(jobs)

    async def stream(self, request: Request, texts: Sequence[Text]) -> AsyncIterator[Event]:
        """Generate texts as a stream. Returns with the first event, so that earlier errors have an HTTP status."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece | Future[Written]]]()

        def told(index: int) -> Callable[[Any], None]:
            def tell(news: Piece | Future[Written]) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, news))

            return tell

        jobs: list[TextJob] = [QueuedRequest(text, told(index)) for index, text in enumerate(texts)]
        for index, job in enumerate(jobs):
            job.future.add_done_callback(told(index))
        deadline = self._deadline()
        try:
            with _in_words():
                self._worker.write(jobs)
                first = _event(*await self._first(request, asyncio.ensure_future(events.get()), deadline))
        except BaseException:
            _abandon(jobs)
            raise
        return self._events(first, events, jobs, deadline)

    async def _events(
        self,
        event: Event,
        events: asyncio.Queue[tuple[int, Piece | Future[Written]]],
        jobs: Sequence[TextJob],
        deadline: float,
    ) -> AsyncIterator[Event]:
        left = len(jobs)
        try:
            while True:
                yield event
                left -= isinstance(event.news, Written)
                if not left:
                    return
                with _in_words():
                    async with asyncio.timeout_at(deadline):
                        event = _event(*await events.get())
        except TimeoutError:
            raise self._late() from None
        finally:
            _abandon(jobs)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    async def _first(self, request: Request, waiting: asyncio.Future[Any], deadline: float) -> Any:
        """Wait for a future; raises if the deadline passes or the client disconnects first."""
        gone = asyncio.ensure_future(_gone(request))
        seconds = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise Failure(GONE, "the client disconnected") if gone.done() else self._late()
        finally:
            gone.cancel()
            waiting.add_done_callback(_look_at)
            waiting.cancel()

    def _late(self) -> Failure:
        return Failure(504, f"no answer within {self._timeout:g} s; send a smaller request, or try again later")


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Look at how a future has ended that nobody waits for any more; asyncio would log it."""
    if not ended.cancelled():
        ended.exception()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(index: int, news: Piece | Future[Written]) -> Event:
    return Event(index, news if isinstance(news, Piece) else news.result())


def _abandon(jobs: Sequence[TextJob]) -> None:
    for job in jobs:
        job.abandon()


@contextmanager
def _in_words() -> Iterator[None]:
    """Convert the worker's exceptions to error responses."""
    try:
        yield
    except Full:
        raise busy() from None
    except Closed:
        raise Failure(503, STOPPING) from None
