"""Results of generation: every token with its uncertainty, and how they are recorded during generation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeslora.data_frames import Results, make_frame, quoted
from bayeslora.predict.mc import LEAST_PROBABILITY, average_draws
from bayeslora.predict.questions.scorer import require_numbers

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

Ranked = tuple[tuple[int, float], ...]
"""The most probable tokens, with their log-probabilities under the average, the best first."""


@dataclass(frozen=True)
class Token:
    """One generated token with statistics of its distribution, as in :class:`Generation`."""

    id: int
    probability: float
    entropy: float
    aleatoric: float
    epistemic: float
    top: Ranked = ()
    draws: tuple[float, ...] = ()


HALF = "\ufffd"
"""Result of decoding an incomplete character."""

Watch = Callable[[Mapping[int, Token]], None]
"""Callback after every step with the new token of each row, by row number; finished rows are left out."""


@dataclass(frozen=True)
class Generation:
    """A continuation, and how sure the model was of every token. Entropies are in nats.

    Attributes:
        text: generated text, without special tokens.
        token_ids: generated tokens, including the one that ended it.
        probabilities: of the tokens, averaged over the draws.
        entropy: of the averaged distribution of each token.
        aleatoric: mean entropy of the draws' distributions.
        epistemic: the rest, the disagreement between draws.
        ended: whether it ended by an end token or stop text, not by the limit on tokens.
        top: the most probable tokens at every step, if requested.
        draws: log-probability of every token under each of the draws.
    """

    text: str
    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
    entropy: tuple[float, ...]
    aleatoric: tuple[float, ...]
    epistemic: tuple[float, ...]
    ended: bool = False
    top: tuple[Ranked, ...] = ()
    draws: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, text: str, tokens: Sequence[Token], *, ended: bool) -> Generation:
        """Make a generation from its tokens."""
        return cls(
            text=text,
            token_ids=tuple(token.id for token in tokens),
            probabilities=tuple(token.probability for token in tokens),
            entropy=tuple(token.entropy for token in tokens),
            aleatoric=tuple(token.aleatoric for token in tokens),
            epistemic=tuple(token.epistemic for token in tokens),
            ended=ended,
            top=tuple(token.top for token in tokens if token.top),
            draws=tuple(token.draws for token in tokens if token.draws),
        )

    def __repr__(self) -> str:
        count, end = len(self.token_ids), "ended" if self.ended else "cut off"
        figures = f"log-probability {self.log_probability:.3f}, epistemic {self.mutual_information:.3f} nats"
        return f"Generation({quoted(self.text)}, {count} tokens, {end}, {figures})"

    def to_row(self) -> dict[str, Any]:
        """Its cells in a table of generations; entropies are sums over its tokens."""
        return {
            "text": self.text,
            "tokens": len(self.token_ids),
            "ended": self.ended,
            "log_probability": self.log_probability,
            **{name: math.fsum(getattr(self, name)) for name in ("entropy", "aleatoric", "epistemic")},
        }

    def to_pandas(self) -> DataFrame:
        """A table with one row per token."""
        names = ("id", "probability", "entropy", "aleatoric", "epistemic")
        return make_frame({name: getattr(token, name) for name in names} for token in self.tokens)

    @property
    def tokens(self) -> list[Token]:
        """All tokens with their statistics."""
        columns = (self.token_ids, self.probabilities, self.entropy, self.aleatoric, self.epistemic)
        top, draws = (given or [()] * len(self.token_ids) for given in (self.top, self.draws))
        return [Token(*row) for row in zip(*columns, top, draws, strict=True)]

    @property
    def log_likelihood(self) -> float:
        """Sum of the log-probabilities of the tokens, each under the average given those before it."""
        return math.fsum(map(math.log, self.probabilities))

    @property
    def log_probability(self) -> float:
        """Log-probability of the whole text under the average: each draw writes all of it, ``log 1/N Σ_n Π_t p_n(y_t)``."""
        if not self.draws:
            return self.log_likelihood
        by_draw = [math.fsum(column) for column in zip(*self.draws, strict=True)]
        highest = max(by_draw)
        if highest == -math.inf:
            return highest
        return highest + math.log(math.fsum(math.exp(it - highest) for it in by_draw) / len(by_draw))

    @property
    def mutual_information(self) -> float:
        """Mutual information between text and weights: the sum of the epistemic parts of all tokens."""
        return math.fsum(self.epistemic)


class Record:
    """Records the draws' distributions at every step; a streamer of transformers, which receives the tokens from ``generate``.

    On some devices a token arrives one step late, so distributions are queued until their token arrives.

    Args:
        top: how many of the most probable tokens to record.
        ends: whether a row with these tokens, which had not ended before the last of them, has ended.
        streamer: another streamer to forward tokens to.
    """

    def __init__(self, top: int, ends: Callable[[Sequence[int]], bool], streamer: BaseStreamer | None = None) -> None:
        self.watch: Watch | None = None
        self._top = top
        self._ends = ends
        self._streamer = streamer
        self._observed: deque[tuple[Tensor, Tensor, Tensor]] = deque()
        self._rows: list[list[Token]] | None = None
        self._ended: set[int] = set()

    def observe(self, log_probabilities: Tensor) -> None:
        """Queue the log-probabilities ``[n, B, T, vocabulary]`` of all draws for the next token."""
        draws = log_probabilities[:, :, -1]
        require_numbers(draws)
        averaged = average_draws(draws)
        self._observed.append((averaged, torch.stack([_entropy(averaged), _entropy(draws).mean(0)], dim=-1), draws))

    def put(self, value: Tensor) -> None:
        """Receive the prompts ``[B, T]`` first, then the tokens ``[B]`` of every step."""
        if self._streamer is not None:
            self._streamer.put(value)
        if self._rows is None:
            self._rows = [[] for _ in value]
            return
        tokens = self._tokens(value)
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        if self.watch is not None:
            news = {row: token for row, token in enumerate(tokens) if row not in self._ended}
            self.watch(news)
            self._ended.update(row for row in news if self._ends([token.id for token in self._rows[row]]))

    def end(self) -> None:
        """Signal the end of generation to the streamer."""
        if self._streamer is not None:
            self._streamer.end()

    def _tokens(self, ids: Tensor) -> list[Token]:
        averaged, entropies, draws = self._observed.popleft()
        index = ids.to(averaged.device).unsqueeze(-1)
        taken = averaged.gather(-1, index).squeeze(-1).double().exp().clamp(min=LEAST_PROBABILITY).tolist()
        by_draw = draws.gather(-1, index.expand(len(draws), -1, -1)).squeeze(-1).T.tolist()
        best = averaged.topk(min(self._top, averaged.shape[-1]))
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            Token(token, probability, total, own, max(0.0, total - own), tuple(zip(*top, strict=True)), tuple(each))
            for token, probability, (total, own), top, each in zip(
                ids.tolist(), taken, entropies.tolist(), tops, by_draw, strict=True
            )
        ]

    def generations(self, ends: Sequence[End]) -> Results[Generation]:
        """The generations with their recorded statistics."""
        assert self._rows is not None
        return Results(
            Generation.of(end.text, row[: end.length], ended=end.ended)
            for row, end in zip(self._rows, ends, strict=True)
        )


class Steps:
    """A streamer of transformers that calls back after every step, and keeps nothing."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._begun = False

    def put(self, value: Tensor) -> None:
        """Receive the prompts first, then the tokens of every step."""
        if self._begun:
            self._work()
        self._begun = True

    def end(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class End:
    """Where a row of a batch ends; it is padded while others are generated."""

    length: int
    text: str
    ended: bool

    @classmethod
    def find(
        cls, ids: Sequence[int], end_tokens: set[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> End:
        """Find the first end token or stop text; else the row ends with its last token, and its text with a whole character."""
        first = next((k + 1 for k, token in enumerate(ids) if token in end_tokens), None)
        length = len(ids) if first is None else first
        text = str(tokenizer.decode(ids[:length], skip_special_tokens=True))
        if not any(word in text for word in stop):
            return cls(length, text.rstrip(HALF) if first is None else text, first is not None)
        for shorter in range(1, length + 1):
            text = str(tokenizer.decode(ids[:shorter], skip_special_tokens=True))
            found = [text.index(word) for word in stop if word in text]
            if found:
                return cls(shorter, text[: min(found)], True)
        raise AssertionError("the text holds a stop that none of its beginnings does")


def has_ended(
    ids: Sequence[int], end_tokens: set[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Whether the last token is an end token, or the text holds a stop text."""
    if ids[-1] in end_tokens or not stop:
        return ids[-1] in end_tokens
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    return any(word in text for word in stop)


def _entropy(log_probabilities: Tensor) -> Tensor:
    return torch.special.entr(log_probabilities.exp()).sum(-1)
