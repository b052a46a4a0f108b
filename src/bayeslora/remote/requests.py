"""Two ways to get the log-probabilities of options from a completions endpoint.

- By next tokens: prompts are the beginnings of options, and the request lists the tokens whose log-probabilities of coming
  next are returned (``logprob_token_ids`` of vLLM).
- By echo: prompts with their options are returned with the log-probabilities of all tokens. Many servers support this.
  vLLM's values ignore an adapter of the output head (its issue 51594), and on CPUs it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from bayeslora.number_checks import is_number
from bayeslora.tasks import EncodedItem

REQUEST_TOKENS = 8192
"""Maximum prompt tokens per request, to limit its size and that of the response."""

TOKENS_ASKED = 128
"""Maximum different tokens that vLLM returns log-probabilities of per request."""

ROUNDING = 1e-3
"""How far rounding may lift a log-probability above 0; logits are not log-probabilities."""

T = TypeVar("T")
Choice = Mapping[str, Any]
Place = tuple[int, int]
"""Numbers of a question and of its option."""
Found = list[tuple[Place, float]]
"""Log-probabilities of tokens of options; their sum is that of the option."""


class Nonsense(Exception):
    """A response that cannot be used."""


@dataclass(frozen=True)
class Request(Generic[T]):
    """Prompts as token ids, further fields of the request, and the function that reads the choices."""

    prompts: Sequence[Sequence[int]]
    fields: Mapping[str, Any]
    read: Callable[[Sequence[Choice]], T]


# By next tokens -------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A token of an option, and all tokens before it."""

    place: Place
    before: tuple[int, ...]
    token: int


def knows_next_tokens(prompt: Sequence[int]) -> Request[bool]:
    """Check support of ``logprob_token_ids``, with three tokens: one or two may be returned by chance."""
    few = range(3)
    return Request([prompt], _next_fields(few), lambda choices: _next_scores(choices[0]).keys() >= set(map(_key, few)))


def next_token_requests(items: Sequence[EncodedItem]) -> Iterator[Request[Found]]:
    """Requests for all options of the questions, by next tokens."""
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
    """Log-probabilities of the first generated token; empty if the response has another format."""
    logprobs = choice.get("logprobs")
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    top = tops[0] if isinstance(tops, list) and tops else None
    return top if isinstance(top, dict) else {}


def _key(token: int) -> str:
    return f"token_id:{token}"


# By echo --------------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A prompt with an option, which starts at ``start``."""

    place: Place
    ids: list[int]
    start: int


def echo_requests(items: Sequence[EncodedItem]) -> Iterator[Request[Found]]:
    """Requests for all options of the questions, by echo; one token is generated, since some servers require it."""
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
    """Log-probabilities of the option's tokens; that of the generated token may follow."""
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list):
        raise Nonsense("it has no log-probabilities of tokens")
    length = len(line.ids)
    if len(values) not in (length, length + 1):
        raise Nonsense(f"it has {len(values)} log-probabilities for a prompt of {length} tokens")
    return [_number(value) for value in values[line.start : length]]


def _number(value: Any) -> float:
    if not is_number(value) or value > ROUNDING:
        raise Nonsense(f"a log-probability is {value!r}, which is no finite number of at most 0")
    return float(value)
