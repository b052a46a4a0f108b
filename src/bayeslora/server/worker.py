"""The thread that owns the model: a bounded queue, processed in batches.

Queued questions with equal settings are answered together. So are texts with equal settings, if decoding is greedy. A batch
can change them by rounding only: where two tokens are equally likely to the last bits, the other one may be chosen.

Clients that have just been answered often ask again at once. A batch that began before they do would leave them to the next one,
and two halves of the clients would take turns. So the next batch waits for as many requests as there were at a time during the
last one, but no longer than a tenth of what that took.

While a text is generated, queued questions are answered between its tokens, one batch at a time: they wait for a token and not
for a text, and the text waits for at most one batch per token.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from bayeslora.errors import InputError
from bayeslora.server.engine import Answered, Engine, Piece, Question, Text, Written
from bayeslora.server.interrupt import Interrupted, interruptible
from bayeslora.server.limits import BATCH
from bayeslora.server.metrics import Metrics
from bayeslora.server.trial import try_out

Request = TypeVar("Request")
Result = TypeVar("Result")
Prepared = TypeVar("Prepared")
AnyJob = TypeVar("AnyJob", bound="QueuedRequest[Any, Any]")

STOPPING = "the server is shutting down"

END_SECONDS = 2.0
"""Timeout for the thread to end once stopped, which it does before the next module of the model."""


GATHER_SHARE, GATHER_SECONDS = 0.1, 0.1
"""Maximum wait for requests that are about to come: this share of the last batch's time, and this long."""


class Full(Exception):
    """The queue is full."""


class Closed(Exception):
    """The worker accepts no more requests, or has cancelled those it had accepted."""


class _Unwanted(Exception):
    """No client waits for any request of the batch."""


@dataclass(eq=False)
class QueuedRequest(Generic[Request, Result]):
    """A request and the future of its result. If cancelled in the queue, it is never started.

    Attributes:
        request: the question or text.
        tell: called in the worker's thread with every token of a text.
        future: of the result.
        abandoned: whether the client no longer waits.
        told: whether tokens were streamed, after which the request cannot be retried.
    """

    request: Request
    tell: Callable[[Piece], None] | None = None
    future: Future[Result] = field(default_factory=Future)
    abandoned: bool = False
    told: bool = False

    @property
    def unwanted(self) -> bool:
        """Whether no client waits for the result."""
        return self.abandoned or self.future.done()

    def tell_piece(self, piece: Piece) -> None:
        """Stream a token, if the request has a callback."""
        if self.tell is not None and not self.future.done():
            self.told = True
            self.tell(piece)

    def abandon(self) -> None:
        """Cancel the request; if it was started, it ends as soon as possible."""
        self.abandoned = True
        self.future.cancel()

    def succeed(self, result: Result) -> None:
        """Set the result, unless the request has ended already."""
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set an error, unless the request has ended already."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


QuestionJob = QueuedRequest[Question, Answered]
TextJob = QueuedRequest[Text, Written]


class ModelWorker:
    """Processes queued requests in a thread.

    Args:
        engine: computes the results.
        capacity: maximum number of queued requests.
        metrics: records batches and tokens.
    """

    def __init__(self, engine: Engine, capacity: int, metrics: Metrics) -> None:
        self._engine = engine
        self._capacity = capacity
        self._metrics = metrics
        self._questions: deque[QuestionJob] = deque()
        self._texts: deque[TextJob] = deque()
        self._taken: set[QueuedRequest[Any, Any]] = set()
        self._peak = 0
        self._gather_until = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._stopped = threading.Event()
        self._sound = True
        self._doubted = False
        self._thread = threading.Thread(target=self._work, name="bayeslora-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests; the thread ends when all accepted ones are done."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def stop(self) -> None:
        """Cancel all accepted requests: they fail immediately, and the thread ends before its next step."""
        with self._changed:
            self._closed = True
            self._stopped.set()
            for job in list(self._taken):
                job.fail(Closed())
            self._changed.notify()

    def join(self, seconds: float = END_SECONDS) -> bool:
        """Wait for the thread to end; returns whether it has."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be answered; ``None`` if they can."""
        if self._closed:
            return STOPPING
        if not self._thread.is_alive():
            return "the worker has stopped"
        return None if self._sound else "the model's predictions are not finite"

    @property
    def depth(self) -> int:
        """Number of queued requests."""
        return len(self._questions) + len(self._texts)

    def ask(self, job: QuestionJob) -> None:
        """Queue a question."""
        self._take_in(self._questions, [job])

    def write(self, jobs: Sequence[TextJob]) -> None:
        """Queue texts, all or none."""
        if len(jobs) > self._capacity:
            raise InputError(f"{len(jobs)} prompts exceed the queue limit of {self._capacity}; send fewer per request")
        self._take_in(self._texts, jobs)

    def _take_in(self, queue: deque[AnyJob], jobs: Sequence[AnyJob]) -> None:
        with self._changed:
            if self._closed:
                raise Closed
            _drop_done(self._questions)
            _drop_done(self._texts)
            if self.depth + len(jobs) > self._capacity:
                raise Full
            queue.extend(jobs)
            for job in jobs:
                self._taken.add(job)
                job.future.add_done_callback(partial(self._forget, job))
            self._peak = max(self._peak, len(self._taken))
            self._changed.notify()

    def _forget(self, job: QueuedRequest[Any, Any], future: Future[Any]) -> None:
        with self._changed:
            self._taken.discard(job)

    # In the worker's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Process the queue. Texts are first, since questions are answered between their tokens."""
        with suppress(Interrupted), interruptible(self._engine.trained.model, self._stopped.is_set):
            while self._wait():
                start = time.monotonic()
                with self._changed:
                    self._peak = len(self._taken)
                    texts = _pick(self._texts, self._kind_of_text)
                if texts:
                    self._write(texts)
                self._answer_waiting()
                if self._doubted:
                    self._try_out()
                now = time.monotonic()
                self._gather_until = now + min(GATHER_SHARE * (now - start), GATHER_SECONDS)

    def _wait(self) -> bool:
        """Wait for a request, and shortly for others that are expected; returns false if the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.depth > 0)
            enough, patience = min(self._peak, BATCH), self._gather_until - time.monotonic()
            self._changed.wait_for(lambda: self._closed or self.depth >= enough, max(0.0, patience))
            return self.depth > 0 and not self._stopped.is_set()

    def _try_out(self) -> None:
        """After a result that is not finite, check whether the model still predicts or only the request failed."""
        try:
            try_out(self._engine.trained)
        except ArithmeticError:
            self._sound = False
        else:
            self._sound, self._doubted = True, False

    def _answer_waiting(self) -> None:
        """Answer one batch of queued questions, if there are any."""
        with self._changed:
            jobs = _pick(self._questions, self._kind_of_question)
        ready = _prepared(jobs, self._engine.encode)
        if ready:
            self._metrics.batches["choices"].observe(len(ready))
            self._settle(ready, self._answer)

    def _answer(self, ready: Sequence[tuple[QuestionJob, Any]]) -> list[Answered]:
        results = self._engine.answer([job.request for job, _ in ready], [encoded for _, encoded in ready])
        self._metrics.answers.inc(len(results))
        return results

    def _write(self, jobs: Sequence[TextJob]) -> None:
        ready = _prepared(jobs, self._engine.measure)
        if not ready:
            return
        rows = self._engine.rows_at_once(ready[0][0].request, max(length for _, length in ready))
        for start in range(0, len(ready), rows):
            part = ready[start : start + rows]
            self._metrics.batches["texts"].observe(len(part))
            self._settle(part, self._write_together)

    def _write_together(self, ready: Sequence[tuple[TextJob, int]]) -> list[Written]:
        jobs = [job for job, _ in ready]

        def tell(pieces: Mapping[int, Piece]) -> None:
            _require_wanted(jobs)
            for row, piece in pieces.items():
                jobs[row].tell_piece(piece)
            self._answer_waiting()

        _require_wanted(jobs)
        results = self._engine.write([job.request for job in jobs], [length for _, length in ready], tell)
        self._metrics.prompt_tokens.inc(sum(one.prompt_tokens for one in results))
        self._metrics.written_tokens.inc(sum(len(one.pieces) for one in results))
        return results

    def _settle(
        self,
        ready: Sequence[tuple[QueuedRequest[Request, Result], Prepared]],
        work: Callable[[Sequence[tuple[QueuedRequest[Request, Result], Prepared]]], list[Result]],
    ) -> None:
        """Compute and set the results. If a batch fails, its requests are retried one by one, as one may be the cause."""
        try:
            results = work(ready)
        except Exception as error:
            self._doubted = self._doubted or isinstance(error, ArithmeticError)
            for one in ready:
                if len(ready) == 1 or one[0].told or isinstance(error, (_Unwanted, Interrupted)):
                    one[0].fail(error)
                else:
                    self._settle([one], work)
            return
        for (job, _), result in zip(ready, results, strict=True):
            job.succeed(result)

    def _kind_of_question(self, job: QuestionJob) -> Hashable:
        together = self._engine.batches and not job.request.alone
        return job.request.samples if together else id(job)

    def _kind_of_text(self, job: TextJob) -> Hashable:
        text = job.request
        together = self._engine.batches and text.writing.greedy
        return (text.writing, text.samples, text.agreement) if together else id(job)


def _require_wanted(jobs: Sequence[QueuedRequest[Any, Any]]) -> None:
    if all(job.unwanted for job in jobs):
        raise _Unwanted


def _drop_done(queue: deque[AnyJob]) -> None:
    """Remove requests that have ended."""
    kept = [job for job in queue if not job.future.done()]
    queue.clear()
    queue.extend(kept)


def _pick(queue: deque[AnyJob], kind: Callable[[AnyJob], Hashable]) -> list[AnyJob]:
    """Take the oldest request and others of its kind from the queue, and start them; removes those that have ended."""
    _drop_done(queue)
    wanted = [job for job in queue if kind(job) == kind(queue[0])][:BATCH]
    for job in wanted:
        queue.remove(job)
    return [job for job in wanted if job.future.set_running_or_notify_cancel()]


def _prepared(
    jobs: Sequence[QueuedRequest[Request, Result]], prepare: Callable[[Request], Prepared]
) -> list[tuple[QueuedRequest[Request, Result], Prepared]]:
    """Requests with their prepared inputs; an invalid one fails alone."""
    ready = []
    for job in jobs:
        try:
            _require_wanted([job])
            ready.append((job, prepare(job.request)))
        except Exception as error:
            job.fail(error)
    return ready
