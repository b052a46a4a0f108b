"""The one thread that owns the model: a bounded queue, answered in batches.

Questions that wait with equal settings are answered together. So are texts that are to be written in the same way, if the
most probable token is taken each time and the model computes in float32: elsewhere a batch could change them.

While a text is written, the questions that wait are answered between its tokens, one batch at a time: they wait for a token
and not for a text, and the text is not kept waiting by more than one batch a token.
"""

from __future__ import annotations

import threading
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

STOPPING = "the server is about to stop"

END_SECONDS = 2.0
"""That the thread has to end once it is stopped, which it does before the next module of the model computes."""


class Full(Exception):
    """Too many requests wait."""


class Closed(Exception):
    """The worker takes nothing any more, or has given up what it had taken."""


class _Unwanted(Exception):
    """Nobody waits for any of the requests under way."""


@dataclass(eq=False)
class QueuedRequest(Generic[Request, Result]):
    """A request and the place of its result. One that is cancelled before it was begun is never begun.

    Attributes:
        request: what to do.
        tell: told, by the worker's thread, of every token of a text.
        future: the result to be.
        abandoned: nobody waits any more, though it was begun.
        told: whether tokens were told, which cannot be taken back.
    """

    request: Request
    tell: Callable[[Piece], None] | None = None
    future: Future[Result] = field(default_factory=Future)
    abandoned: bool = False
    told: bool = False

    @property
    def unwanted(self) -> bool:
        """Whether there is nobody to give a result to."""
        return self.abandoned or self.future.done()

    def tell_piece(self, piece: Piece) -> None:
        """Tell of a token, if that is wanted."""
        if self.tell is not None and not self.future.done():
            self.told = True
            self.tell(piece)

    def abandon(self) -> None:
        """Drop it, or if it was begun, end it as soon as possible."""
        self.abandoned = True
        self.future.cancel()

    def succeed(self, result: Result) -> None:
        """Give the result, unless it was given up meanwhile."""
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Give an error in its place, unless it was given up meanwhile."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


QuestionJob = QueuedRequest[Question, Answered]
TextJob = QueuedRequest[Text, Written]


class ModelWorker:
    """See above.

    Args:
        engine: what it works with.
        capacity: how many jobs may wait.
        metrics: told what is done.
    """

    def __init__(self, engine: Engine, capacity: int, metrics: Metrics) -> None:
        self._engine = engine
        self._capacity = capacity
        self._metrics = metrics
        self._questions: deque[QuestionJob] = deque()
        self._texts: deque[TextJob] = deque()
        self._taken: set[QueuedRequest[Any, Any]] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._stopped = threading.Event()
        self._sound = True
        self._doubted = False
        self._thread = threading.Thread(target=self._work, name="bayeslora-worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """Take nothing more; the thread ends when all that was taken is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def stop(self) -> None:
        """Give up all that was taken: whoever waits for it is told at once, and the thread ends before its next step."""
        with self._changed:
            self._closed = True
            self._stopped.set()
            for job in list(self._taken):
                job.fail(Closed())
            self._changed.notify()

    def join(self, seconds: float = END_SECONDS) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def trouble(self) -> str | None:
        """Why nothing can be answered; nothing if all is well."""
        if self._closed:
            return STOPPING
        if not self._thread.is_alive():
            return "the worker has stopped"
        return None if self._sound else "the model's predictions are not numbers"

    @property
    def depth(self) -> int:
        """How many jobs wait."""
        return len(self._questions) + len(self._texts)

    def ask(self, job: QuestionJob) -> None:
        """Let a question wait for its answer."""
        self._take_in(self._questions, [job])

    def write(self, jobs: Sequence[TextJob]) -> None:
        """Let texts wait, all or none."""
        if len(jobs) > self._capacity:
            raise InputError(
                f"{len(jobs)} prompts are more than the {self._capacity} that may wait; send fewer at a time"
            )
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
            self._changed.notify()

    def _forget(self, job: QueuedRequest[Any, Any], future: Future[Any]) -> None:
        with self._changed:
            self._taken.discard(job)

    # In the worker's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Texts first: questions are answered between their tokens."""
        with suppress(Interrupted), interruptible(self._engine.trained.model, self._stopped.is_set):
            while self._wait():
                with self._changed:
                    texts = _pick(self._texts, self._kind_of_text)
                if texts:
                    self._write(texts)
                self._answer_waiting()
                if self._doubted:
                    self._try_out()

    def _wait(self) -> bool:
        """Until there is something to do; whether there ever will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.depth > 0)
            return self.depth > 0 and not self._stopped.is_set()

    def _try_out(self) -> None:
        """Something gave no numbers: find out whether that was the request's fault, or nothing does any more."""
        try:
            try_out(self._engine.trained)
        except ArithmeticError:
            self._sound = False
        else:
            self._sound, self._doubted = True, False

    def _answer_waiting(self) -> None:
        """One batch of the questions that wait, if any do."""
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
        """Do the work and hand out results. Where a batch fails, each is tried alone: one may spoil it for all."""
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
        return job.request.samples if self._engine.batches_questions else id(job)

    def _kind_of_text(self, job: TextJob) -> Hashable:
        text = job.request
        together = self._engine.batches_texts and text.writing.greedy
        return (text.writing, text.samples) if together else id(job)


def _require_wanted(jobs: Sequence[QueuedRequest[Any, Any]]) -> None:
    if all(job.unwanted for job in jobs):
        raise _Unwanted


def _drop_done(queue: deque[AnyJob]) -> None:
    """Leave out what was cancelled or given up."""
    kept = [job for job in queue if not job.future.done()]
    queue.clear()
    queue.extend(kept)


def _pick(queue: deque[AnyJob], kind: Callable[[AnyJob], Hashable]) -> list[AnyJob]:
    """The job that has waited longest and others of its kind, as having begun; those that are done with are dropped."""
    _drop_done(queue)
    wanted = [job for job in queue if kind(job) == kind(queue[0])][:BATCH]
    for job in wanted:
        queue.remove(job)
    return [job for job in wanted if job.future.set_running_or_notify_cancel()]


def _prepared(
    jobs: Sequence[QueuedRequest[Request, Result]], prepare: Callable[[Request], Prepared]
) -> list[tuple[QueuedRequest[Request, Result], Prepared]]:
    """Jobs with what was made of them; one that cannot be used fails alone."""
    ready = []
    for job in jobs:
        try:
            _require_wanted([job])
            ready.append((job, prepare(job.request)))
        except Exception as error:
            job.fail(error)
    return ready
