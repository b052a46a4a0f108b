"""Two ways to learn the log-probabilities of options from a completions endpoint.

- By next tokens: prompts are the beginnings of options, and the server is told of which tokens it is to give the
  log-probability of coming next (``logprob_token_ids``, which vLLM has).
- By echo: prompts with their options come back with the log-probabilities of all their tokens. Many servers can do that.
  vLLM leaves out of them what an adapter does to the output head (its issue 51594), and breaks down over them on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from bayeslora.tasks import EncodedItem

REQUEST_TOKENS = 8192
"""Tokens of the prompts of one request, so that neither it nor its answer grows without bounds."""

TOKENS_ASKED = 128
"""Different tokens that vLLM gives log-probabilities of in one request."""

T = TypeVar("T")
Choice = Mapping[str, Any]
Place = tuple[int, int]
"""Of an option: the number of the question, and its own."""
Found = list[tuple[Place, float]]
"""Log-probabilities of tokens of options; those of an option add up to its own."""


class Nonsense(Exception):
    """An answer that is none."""


@dataclass(frozen=True)
class Request(Generic[T]):
    """Prompts as token ids, what else is said with them, and how the choices for them are read."""

    prompts: Sequence[Sequence[int]]
    fields: Mapping[str, Any]
    read: Callable[[Sequence[Choice]], T]


# By next tokens -------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A token of an option, and all that is before it."""

    place: Place
    before: tuple[int, ...]
    token: int


def knows_next_tokens(prompt: Sequence[int]) -> Request[bool]:
    """Whether the server can be told of which tokens; of three, for one or two may be there by chance."""
    few = range(3)
    return Request([prompt], _next_fields(few), lambda choices: _next_scores(choices[0]).keys() >= set(map(_key, few)))


def next_token_requests(items: Sequence[EncodedItem]) -> Iterator[Request[Found]]:
    """All options of the questions, by next tokens."""
    for steps in _batched(_steps(items)):
        prompts = list(dict.fromkeys(step.before for step in steps))
        tokens = sorted({step.token for step in steps})
        yield Request(prompts, _next_fields(tokens), partial(_read_steps, steps, prompts))


def _steps(items: Sequence[EncodedItem]) -> Iterator[_Step]:
    for row, item in enumerate(items):
        for option, ids in enumerate(item.option_ids):
            for k, token in enumerate(ids):
                yield _Step((row, option), (*item.prompt_ids, *ids[:k]), token)


def _batched(steps: Iterator[_Step]) -> Iterator[list[_Step]]:
    batch: list[_Step] = []
    before: set[tuple[int, ...]] = set()
    tokens: set[int] = set()
    for step in steps:
        size = sum(map(len, before | {step.before}))
        if batch and (size > REQUEST_TOKENS or len(tokens | {step.token}) > TOKENS_ASKED):
            yield batch
            batch, before, tokens = [], set(), set()
        batch.append(step)
        before.add(step.before)
        tokens.add(step.token)
    if batch:
        yield batch


def _next_fields(tokens: Sequence[int]) -> dict[str, Any]:
    return {"logprobs": 1, "logprob_token_ids": list(tokens), "return_tokens_as_token_ids": True}


def _read_steps(steps: Sequence[_Step], prompts: Sequence[tuple[int, ...]], choices: Sequence[Choice]) -> Found:
    scores = {before: _next_scores(choice) for before, choice in zip(prompts, choices, strict=True)}
    return [(step.place, _number(scores[step.before].get(_key(step.token)))) for step in steps]


def _next_scores(choice: Choice) -> Mapping[str, Any]:
    """Log-probabilities of the first generated token; none where the answer has another form."""
    logprobs = choice.get("logprobs")
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    top = tops[0] if isinstance(tops, list) and tops else None
    return top if isinstance(top, dict) else {}


def _key(token: int) -> str:
    return f"token_id:{token}"


# By echo --------------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A prompt with an option, which begins at ``start``."""

    place: Place
    ids: list[int]
    start: int


def echo_requests(items: Sequence[EncodedItem]) -> Iterator[Request[Found]]:
    """All options of the questions, by echo; one token is generated, since not all servers can do with none."""
    lines = [
        _Line((row, option), [*item.prompt_ids, *ids], len(item.prompt_ids))
        for row, item in enumerate(items)
        for option, ids in enumerate(item.option_ids)
    ]
    start = 0
    while start < len(lines):
        end, size = start + 1, len(lines[start].ids)
        while end < len(lines) and size + len(lines[end].ids) <= REQUEST_TOKENS:
            size += len(lines[end].ids)
            end += 1
        batch = lines[start:end]
        yield Request([line.ids for line in batch], {"logprobs": 1, "echo": True}, partial(_read_lines, batch))
        start = end


def _read_lines(lines: Sequence[_Line], choices: Sequence[Choice]) -> Found:
    return [(line.place, value) for line, choice in zip(lines, choices, strict=True) for value in _echoed(line, choice)]


def _echoed(line: _Line, choice: Choice) -> list[float]:
    """Log-probabilities of the option's tokens; behind them may be that of the generated one."""
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list):
        raise Nonsense("it has no log-probabilities of tokens")
    length = len(line.ids)
    if len(values) not in (length, length + 1):
        raise Nonsense(f"it has {len(values)} log-probabilities for a prompt of {length} tokens")
    return [_number(value) for value in values[line.start : length]]


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Nonsense(f"a log-probability is {value!r}, which is no finite number")
    return float(value)
