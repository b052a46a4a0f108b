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
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bayeslora.errors import InputError
from bayeslora.serve.engine import Answered, Engine, Piece, Question, Text, Written
from bayeslora.serve.limits import BATCH
from bayeslora.serve.metrics import Metrics

Request = TypeVar("Request")
Result = TypeVar("Result")
Prepared = TypeVar("Prepared")
AnyJob = TypeVar("AnyJob", bound="Job[Any, Any]")


class Full(Exception):
    """Too many requests wait."""


class Closed(Exception):
    """The worker takes nothing any more."""


class _Abandoned(Exception):
    """Nobody waits for any of the texts under way."""


@dataclass(eq=False)
class Job(Generic[Request, Result]):
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

    def tell_piece(self, piece: Piece) -> None:
        """Tell of a token, if that is wanted."""
        if self.tell is not None:
            self.told = True
            self.tell(piece)

    def abandon(self) -> None:
        """Drop it, or if it was begun, end it as soon as possible."""
        self.abandoned = True
        self.future.cancel()


QuestionJob = Job[Question, Answered]
TextJob = Job[Text, Written]


class Worker:
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
        self._changed = threading.Condition()
        self._begun: Sequence[TextJob] = ()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="bayeslora-worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Take nothing more and finish what was taken; whether that was done in time. The rest is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return True
        with self._changed:
            waiting: list[Job[Any, Any]] = [*self._questions, *self._texts, *self._begun]
            for job in waiting:
                job.abandon()
        return False

    @property
    def works(self) -> bool:
        """Whether anything that waits will be done."""
        return self._thread.is_alive()

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
            _drop_cancelled(self._questions)
            _drop_cancelled(self._texts)
            if self.depth + len(jobs) > self._capacity:
                raise Full
            queue.extend(jobs)
            self._changed.notify()

    # In the worker's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Texts first: questions are answered between their tokens."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.depth > 0)
                if self._closed and not self.depth:
                    return
                texts = _pick(self._texts, self._kind_of_text)
            if texts:
                self._write(texts)
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        """One batch of the questions that wait, if any do."""
        with self._changed:
            jobs = _pick(self._questions, self._kind_of_question)
        ready = _prepared(jobs, self._engine.encode)
        if ready:
            self._metrics.batches["choices"].observe(len(ready))
            _settle(ready, self._answer)

    def _answer(self, ready: Sequence[tuple[QuestionJob, Any]]) -> list[Answered]:
        results = self._engine.answer([job.request for job, _ in ready], [encoded for _, encoded in ready])
        self._metrics.answers.add(len(results))
        return results

    def _write(self, jobs: Sequence[TextJob]) -> None:
        ready = _prepared(jobs, self._engine.measure)
        if not ready:
            return
        rows = self._engine.rows_at_once(ready[0][0].request, max(length for _, length in ready))
        for start in range(0, len(ready), rows):
            part = ready[start : start + rows]
            self._metrics.batches["texts"].observe(len(part))
            _settle(part, self._write_together)

    def _write_together(self, ready: Sequence[tuple[TextJob, int]]) -> list[Written]:
        jobs = self._begun = [job for job, _ in ready]
        if all(job.abandoned for job in jobs):
            raise _Abandoned

        def tell(pieces: Mapping[int, Piece]) -> None:
            if all(job.abandoned for job in jobs):
                raise _Abandoned
            for row, piece in pieces.items():
                jobs[row].tell_piece(piece)
            self._answer_waiting()

        results = self._engine.write([job.request for job in jobs], [length for _, length in ready], tell)
        self._metrics.prompt_tokens.add(sum(one.prompt_tokens for one in results))
        self._metrics.written_tokens.add(sum(len(one.pieces) for one in results))
        return results

    def _kind_of_question(self, job: QuestionJob) -> Hashable:
        return job.request.samples if self._engine.batches_questions else id(job)

    def _kind_of_text(self, job: TextJob) -> Hashable:
        text = job.request
        together = self._engine.batches_texts and text.writing.greedy
        return (text.writing, text.samples) if together else id(job)


def _drop_cancelled(queue: deque[AnyJob]) -> None:
    kept = [job for job in queue if not job.future.cancelled()]
    queue.clear()
    queue.extend(kept)


def _pick(queue: deque[AnyJob], kind: Callable[[AnyJob], Hashable]) -> list[AnyJob]:
    """The job that has waited longest and others of its kind, as having begun; those that were cancelled are dropped."""
    _drop_cancelled(queue)
    wanted = [job for job in queue if kind(job) == kind(queue[0])][:BATCH]
    for job in wanted:
        queue.remove(job)
    return [job for job in wanted if job.future.set_running_or_notify_cancel()]


def _prepared(
    jobs: Sequence[Job[Request, Result]], prepare: Callable[[Request], Prepared]
) -> list[tuple[Job[Request, Result], Prepared]]:
    """Jobs with what was made of them; one that cannot be used fails alone."""
    ready = []
    for job in jobs:
        try:
            ready.append((job, prepare(job.request)))
        except Exception as error:
            job.future.set_exception(error)
    return ready


def _settle(
    ready: Sequence[tuple[Job[Request, Result], Prepared]],
    work: Callable[[Sequence[tuple[Job[Request, Result], Prepared]]], list[Result]],
) -> None:
    """Do the work and hand out results. Where a batch fails, each is tried alone: one may spoil it for all."""
    try:
        results = work(ready)
    except Exception as error:
        for one in ready:
            if len(ready) == 1 or one[0].told or isinstance(error, _Abandoned):
                one[0].future.set_exception(error)
            else:
                _settle([one], work)
        return
    for (job, _), result in zip(ready, results, strict=True):
        job.future.set_result(result)
