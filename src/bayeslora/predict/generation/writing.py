"""Text generation with uncertainty: every token comes from the distribution averaged over the draws.

All draws condition on the same text, each with its own key-value cache, so one draw is one network for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.lean_layers import lean_predictions
from bayeslora.adapter.sampling import Sampling, evaluating
from bayeslora.data_frames import Results
from bayeslora.errors import InputError, did_you_mean, first_line
from bayeslora.models.context import context_length, within_context
from bayeslora.number_checks import check_count, check_number, check_seed
from bayeslora.predict.generation.results import End, Generation, Record, Steps, Watch, has_ended
from bayeslora.predict.mc import Averaging, posterior_predictive
from bayeslora.tasks.encode import beginning_ids, plain_ids
from bayeslora.tasks.rows import has_half_character

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or the messages of a chat: dictionaries with ``role`` and ``content``."""

KEPT = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "cache_implementation", "cache_config")
"""What is kept of a model's own settings of generation."""

LEAST_TEMPERATURE = 1e-6
"""Least sampling temperature; below it only the most probable token is drawn, and log-probabilities would overflow."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Settings of text generation.

    Attributes:
        max_new_tokens: maximum number of new tokens; fewer, if the model's context ends before.
        temperature: sampling temperature of the averaged distribution; 0 takes the most probable token.
        top_p: sample from the most probable tokens that together have this probability.
        top_k: sample from this many most probable tokens; 0 from all.
        min_p: sample from tokens with at least this share of the most probable one's probability.
        logit_bias: tokens, by id, with what is added to their logits.
        stop: texts that end generation.
        seed: of the weights and, with a temperature, of the tokens.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        check_number("temperature", self.temperature, least=0)
        check_number("top_p", self.top_p, above=0, most=1)
        check_count("top_k", self.top_k, least=0)
        check_seed(self.seed)
        check_number("min_p", self.min_p, least=0, most=1)
        biases: Any = self.logit_bias
        if isinstance(biases, Mapping):
            raise InputError(
                "logit_bias is a dictionary; give pairs of a token and its bias: tuple(logit_bias.items())"
            )
        for token, bias in self.logit_bias:
            check_count("a token of logit_bias", token, least=0)
            check_number(f"logit_bias of token {token}", bias)
        stop: Any = self.stop
        if isinstance(stop, str):
            raise InputError(f"stop is {stop!r}; give a list of texts: [{stop!r}]")
        if "" in self.stop:
            raise InputError("stop holds an empty text, which would end everything at once; leave it out")

    def changed(self, settings: Mapping[str, Any]) -> Writing:
        """A copy with some settings changed, by name."""
        known = [f.name for f in fields(self)]
        for name in settings:
            if name not in known:
                raise InputError(f"there is no setting {name!r}{did_you_mean(name, known)}; choose {', '.join(known)}")
        return replace(self, **settings)

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature < LEAST_TEMPERATURE

    def arguments(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """These settings as arguments of ``generate`` in transformers."""
        limits = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        drawn = {"do_sample": True, **limits}
        chosen = {"do_sample": False, **dict.fromkeys(limits)}
        ends = {"stopping_criteria": StoppingCriteriaList([_StopTexts(self.stop, tokenizer)])} if self.stop else {}
        bias = {"sequence_bias": [[[token], bias] for token, bias in self.logit_bias]} if self.logit_bias else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": _pad_token(tokenizer),
            "num_beams": 1,
            **(chosen if self.greedy else drawn),
            **ends,
            **bias,
        }


class _StopTexts(StoppingCriteria):
    """Ends a row once its new text holds a stop text. The ``stop_strings`` of transformers may begin in the prompt."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._stop, self._tokenizer = stop, tokenizer
        self._prompt: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each row has ended, after every new token."""
        if self._prompt is None:
            self._prompt = input_ids.shape[1] - 1
        rows = input_ids[:, self._prompt :].tolist()
        ended = [has_ended(row, set(), self._stop, self._tokenizer) for row in rows]
        return torch.tensor(ended, device=input_ids.device)


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
    top: int = 0,
    watch: Watch | None = None,
) -> Results[Generation]:
    """Continue every prompt, with tokens from the distribution averaged over ``samples`` draws (0: the posterior mean).

    Args:
        model: a causal language model with an adapter.
        tokenizer: of the model.
        prompts: texts, or chats, which are formatted by the tokenizer's template.
        writing: settings of generation.
        samples: draws of the weights.
        layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the mean is used below.
        streamer: streamer of transformers that receives every token; only for one prompt.
        top: how many of the most probable tokens to record at every step.
        watch: callback after every step. It may use the model for other work, and an exception in it ends generation.
    """
    writing = writing or Writing()
    given = _padded(encode_prompts(tokenizer, prompts), tokenizer, model)
    finding = {"end_tokens": _end_tokens(model, tokenizer), "stop": writing.stop, "tokenizer": tokenizer}
    record = Record(top, partial(has_ended, **finding), streamer)
    with (
        evaluating(model),
        posterior_predictive(model, samples, writing.seed, layers=layers, observe=record.observe) as averaging,
    ):
        if watch is not None:
            record.watch = averaging.while_set_aside(watch)
        sequences = _generate(model, tokenizer, given, writing, record)
    written = sequences[:, given["input_ids"].shape[1] :]
    ends = [End.find(ids, **finding) for ids in written.tolist()]
    return record.generations(ends)


@torch.no_grad()
def generate_apart(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    writing: Writing | None = None,
    *,
    samples: int = 4,
) -> list[str]:
    """Generate a separate continuation from every draw, to compare what the networks would write."""
    writing = writing or Writing()
    return generate_by_draw(model, tokenizer, [prompt], writing, Sampling(max(1, samples), writing.seed))[0]


@torch.no_grad()
def generate_by_draw(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    writing: Writing,
    sampling: Sampling,
    between: Callable[[], None] | None = None,
) -> list[list[str]]:
    """Generate a separate continuation of every prompt from every draw, all in one batch; returns them by prompt.

    They are the draws that :func:`generate` averages, if it is given the same numbers. ``between`` is a callback after every
    step, which may use the model for other work; an exception in it ends generation.
    """
    holder = find_any_holder(model)
    padded = _padded(encode_prompts(tokenizer, prompts), tokenizer, model)
    with evaluating(model), lean_predictions(model), holder.restoring():
        n = sampling.put_into_use(holder)
        given = {name: value.repeat(n, 1) for name, value in padded.items()}
        steps = None if between is None else Steps(Averaging(padded["input_ids"].device).while_set_aside(between))
        sequences = _generate(model, tokenizer, given, writing, steps)
    written = sequences[:, given["input_ids"].shape[1] :].tolist()
    ends = _end_tokens(model, tokenizer)
    texts = [End.find(ids, ends, writing.stop, tokenizer).text for ids in written]
    return [texts[row :: len(prompts)] for row in range(len(prompts))]


def _generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    given: Mapping[str, Tensor],
    writing: Writing,
    streamer: BaseStreamer | None,
) -> Tensor:
    _require_known(writing, model)
    width = given["input_ids"].shape[1]
    writing = replace(writing, max_new_tokens=within_context(model, width + writing.max_new_tokens) - width)
    devices = [given["input_ids"].device] if given["input_ids"].device.type == "cuda" else []
    with torch.random.fork_rng(devices), _plain_settings(model, _end_tokens(model, tokenizer)):
        torch.manual_seed(writing.seed)
        writer: Any = model
        sequences: Tensor = writer.generate(**given, **writing.arguments(tokenizer), streamer=streamer, use_cache=True)
    return sequences


@contextmanager
def _plain_settings(model: nn.Module, ends: set[int]) -> Iterator[None]:
    """Inside the block, of a model's own settings only tokens and cache count, and these tokens end a text. Others, such as a
    penalty on repetition, would change what is the most probable token."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    saved = base.generation_config
    kept = {name: getattr(saved, name, None) for name in KEPT}
    base.generation_config = GenerationConfig(**kept, eos_token_id=sorted(ends) or None)
    try:
        yield
    finally:
        base.generation_config = saved


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts, with chats formatted. A text begins as the tokenizer begins it, and is open at its end."""
    if not prompts:
        raise InputError("there are no prompts; give at least one")
    for number, prompt in enumerate([prompts] if isinstance(prompts, Mapping) else prompts, 1):
        if isinstance(prompt, Mapping):
            raise InputError(
                f"prompt {number} is a single message; give a chat as a list of messages: [[message, ...]]"
            )
    texts = [_text(tokenizer, prompt) for prompt in prompts]
    for number, text in enumerate(texts, 1):
        if not text:
            raise InputError(f"prompt {number} is empty; give some text")
        if has_half_character(text):
            raise InputError(f"prompt {number} is no valid Unicode: {ascii(text)[:60]}; correct it")
    beginning = beginning_ids(tokenizer)
    return [
        [*(beginning if isinstance(prompt, str) else ()), *plain_ids(text, tokenizer)]
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def _padded(rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> dict[str, Tensor]:
    """A batch padded on the left."""
    width, context = max(map(len, rows)), context_length(model)
    if context is not None and width >= context:
        raise InputError(f"a prompt has {width} tokens, and the model's context length is {context}; shorten it")
    device = next(model.parameters()).device
    pad = _pad_token(tokenizer)
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + [*row] for row in rows], device=device),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device),
    }


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return next(int(token) for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def _text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise InputError("the model's tokenizer has no chat template; give the prompt as plain text")
    try:
        return str(tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template raises what it likes, as where a content is no text
        raise InputError(f"the model's chat template refuses the messages: {first_line(error)}") from error


def _require_known(writing: Writing, model: nn.Module) -> None:
    """Refuse a bias on tokens that the model does not have."""
    owner: Any = model
    words = owner.get_input_embeddings().weight.shape[0]
    for token, _ in writing.logit_bias:
        if token >= words:
            raise InputError(f"logit_bias has token {token}; the model has {words} tokens, from 0 to {words - 1}")


def _end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens after which a text ends: those of the model, and the tokenizer's, with which it ends in training."""
    writer: Any = model
    given = writer.generation_config.eos_token_id
    own = given if isinstance(given, (list, tuple)) else [given]
    return {int(token) for token in (*own, tokenizer.eos_token_id) if token is not None}
