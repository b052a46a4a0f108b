"""Text with its uncertainty: every token is chosen from the distribution averaged over the draws.

All draws read the same text and each keeps its own key-value cache, so one draw is one network for the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.errors import InputError
from bayeslora.predict.mc import average_draws, posterior_predictive
from bayeslora.predict.scorer import require_numbers

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or the messages of a chat: dictionaries with ``role`` and ``content``."""


@dataclass(frozen=True)
class Generation:
    """A continuation, and how sure the model was of every token. Entropies are in nats.

    Attributes:
        text: what was written, without special tokens.
        token_ids: the same as tokens, the one that ended it included.
        probabilities: of the tokens, averaged over the draws.
        entropy: of the averaged distribution each token was taken from.
        aleatoric: mean entropy of the draws' distributions: what they agree is open.
        epistemic: the rest, how far the draws disagree.
    """

    text: str
    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
    entropy: tuple[float, ...]
    aleatoric: tuple[float, ...]
    epistemic: tuple[float, ...]

    @property
    def log_likelihood(self) -> float:
        """Of the whole text under the average."""
        return math.fsum(map(math.log, self.probabilities))

    @property
    def mutual_information(self) -> float:
        """Between the text and the weights, token by token: the sum of the epistemic parts."""
        return math.fsum(self.epistemic)


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How text is written.

    Attributes:
        max_new_tokens: after which it ends at the latest.
        temperature: 0 takes the most probable token, more draws one from the sharpened or flattened average.
        top_p: draw among the most probable tokens that have this share of the probability.
        top_k: draw among so many of the most probable tokens; 0 among all.
        stop: texts that end it.
        seed: of the weights and, with a temperature, of the tokens.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; give at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; give 0 for the most probable token, or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a share above 0, up to 1")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; give 0 for all tokens, or more")
        if "" in self.stop:
            raise InputError("stop holds an empty text, which would end everything at once; leave it out")

    def arguments(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The same for ``generate`` of transformers."""
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        chosen = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ends = {"stop_strings": list(self.stop), "tokenizer": tokenizer} if self.stop else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": _pad_token(tokenizer),
            "num_beams": 1,
            **(drawn if self.temperature > 0 else chosen),
            **ends,
        }


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    writing: Writing | None = None,
    *,
    samples: int = 4,
    layers: str = "all",
    streamer: BaseStreamer | None = None,
) -> list[Generation]:
    """Continue every prompt, with tokens from the distribution averaged over ``samples`` draws (0: the posterior mean).

    Args:
        model: a causal language model with an adapter.
        tokenizer: of the model.
        prompts: texts, or chats, which the tokenizer's template makes texts of.
        writing: how long and how bold.
        samples: draws of the weights.
        layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the mean is used below.
        streamer: of transformers, told every token as it is written; takes one prompt.
    """
    writing = writing or Writing()
    given = _encode(tokenizer, prompts, model)
    record = _Record()
    with _evaluating(model), posterior_predictive(model, samples, writing.seed, layers=layers, observe=record.observe):
        sequences = _generate(model, tokenizer, given, writing, streamer, record)
    written = sequences[:, given["input_ids"].shape[1] :]
    ends = [_End.find(ids, _end_tokens(model), writing.stop, tokenizer) for ids in written.tolist()]
    return record.generations(written, ends)


@torch.no_grad()
def generate_apart(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    writing: Writing | None = None,
    *,
    samples: int = 4,
) -> list[str]:
    """A continuation of its own from every draw: how far the networks go apart in what they would write."""
    writing = writing or Writing()
    holder = find_any_holder(model)
    n = max(1, holder.draw_count(samples))
    given = {name: value.repeat(n, 1) for name, value in _encode(tokenizer, [prompt], model).items()}
    with _evaluating(model), holder.restoring():
        holder.draw_from_seed(n, writing.seed)
        sequences = _generate(model, tokenizer, given, writing, None, None)
    written = sequences[:, given["input_ids"].shape[1] :].tolist()
    return [_End.find(ids, _end_tokens(model), writing.stop, tokenizer).text for ids in written]


def _generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    given: Mapping[str, Tensor],
    writing: Writing,
    streamer: BaseStreamer | None,
    record: _Record | None,
) -> Tensor:
    from transformers import LogitsProcessorList

    devices = [given["input_ids"].device] if given["input_ids"].device.type == "cuda" else []
    processors = LogitsProcessorList([] if record is None else [record.processor()])
    with torch.random.fork_rng(devices):
        torch.manual_seed(writing.seed)
        writer: Any = model
        sequences: Tensor = writer.generate(
            **given, **writing.arguments(tokenizer), streamer=streamer, logits_processor=processors, use_cache=True
        )
    return sequences


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], model: nn.Module) -> dict[str, Tensor]:
    """Prompts as a batch that is padded on the left."""
    if not prompts:
        raise InputError("there are no prompts; give at least one")
    texts = [_text(tokenizer, prompt) for prompt in prompts]
    for number, text in enumerate(texts):
        if not text:
            raise InputError(f"prompt {number + 1} is empty; give some text")
    rows = [
        tokenizer(text, add_special_tokens=isinstance(prompt, str)).input_ids
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    width = max(map(len, rows))
    device = next(model.parameters()).device
    pad = _pad_token(tokenizer)
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device),
    }


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return next(int(token) for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def _text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise InputError("the model's tokenizer has no chat template; give the prompt as plain text")
    return str(tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _Record:
    """Notes of every step what the draws said. Of distributions only the last is kept: the token that was taken from it is
    known a step later."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._columns: list[Tensor] = []
        self._taken: list[Tensor] = []

    def observe(self, log_probabilities: Tensor) -> None:
        """Told what every draw says of the next token, ``[n, B, T, vocabulary]``."""
        draws = log_probabilities[:, :, -1]
        require_numbers(draws)
        averaged = average_draws(draws)
        aleatoric = _entropy(draws).mean(0)
        self._pending = averaged, torch.stack([_entropy(averaged), aleatoric], dim=-1)

    def processor(self) -> LogitsProcessor:
        """Lets ``generate`` tell which token was taken in the step before."""
        from transformers import LogitsProcessor

        record = self

        class Watch(LogitsProcessor):
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                record._step(input_ids[:, -1])
                return scores

        return Watch()

    def _step(self, token: Tensor) -> None:
        if self._last is not None:
            self._taken.append(self._last.gather(-1, token.unsqueeze(-1)).squeeze(-1))
        self._last, column = self._pending
        self._columns.append(column)

    def generations(self, written: Tensor, ends: Sequence[_End]) -> list[Generation]:
        """What was written, ``[B, steps]``, with the notes on it."""
        steps = written.shape[1]
        assert self._last is not None
        if len(self._taken) < steps:
            self._taken.append(self._last.gather(-1, written[:, -1:]).squeeze(-1))
        taken = torch.stack(self._taken[:steps], dim=1).exp().tolist()
        entropies = torch.stack(self._columns[:steps], dim=1).tolist()
        return [
            Generation(
                text=end.text,
                token_ids=tuple(ids[: end.length]),
                probabilities=tuple(taken[row][: end.length]),
                entropy=tuple(total for total, _ in entropies[row][: end.length]),
                aleatoric=tuple(own for _, own in entropies[row][: end.length]),
                epistemic=tuple(max(0.0, total - own) for total, own in entropies[row][: end.length]),
            )
            for row, (ids, end) in enumerate(zip(written.tolist(), ends, strict=True))
        ]


@dataclass(frozen=True)
class _End:
    """Where a row of a batch ends, which goes on in padding while others are written."""

    length: int
    text: str

    @classmethod
    def find(
        cls, ids: Sequence[int], end_tokens: set[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> _End:
        length = next((k + 1 for k, token in enumerate(ids) if token in end_tokens), len(ids))
        text = str(tokenizer.decode(ids[:length], skip_special_tokens=True))
        if not any(word in text for word in stop):
            return cls(length, text)
        for shorter in range(1, length + 1):
            text = str(tokenizer.decode(ids[:shorter], skip_special_tokens=True))
            found = [text.index(word) for word in stop if word in text]
            if found:
                return cls(shorter, text[: min(found)])
        raise AssertionError("the text holds a stop that none of its beginnings does")


def _end_tokens(model: nn.Module) -> set[int]:
    """Tokens after which ``generate`` ends."""
    writer: Any = model
    given = writer.generation_config.eos_token_id
    return set(given if isinstance(given, (list, tuple)) else [] if given is None else [given])


def _entropy(log_probabilities: Tensor) -> Tensor:
    return torch.special.entr(log_probabilities.exp()).sum(-1)
