"""Encode items as token ids: the prompt once, and each option as its continuation.

A beginning-of-sequence token is added if the tokenizer adds one; no other special tokens are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from string import ascii_uppercase
from typing import TYPE_CHECKING, Literal, get_args

from bayeslora.errors import InputError, did_you_mean
from bayeslora.tasks.base import Item, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scoring = Literal["text", "letter"]
"""What is scored: the text of an option, or only its label."""

MAX_TOKENS = 1024

ANCHOR = ":"
"""A text that others are put behind, to encode or decode them as they are behind a text."""


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """Token ids of a prompt, and of each option as its continuation."""

    prompt_ids: list[int]
    option_ids: list[list[int]]


@dataclass(frozen=True)
class Questions:
    """Questions as text and as tokens."""

    items: tuple[Item, ...]
    encoded: list[EncodedItem]

    def __len__(self) -> int:
        return len(self.items)


def encode_item(
    item: Item, tokenizer: PreTrainedTokenizerBase, scoring: Scoring, max_tokens: int = MAX_TOKENS, whole: int = 0
) -> EncodedItem:
    """Token ids of at most ``max_tokens`` for the prompt and its longest option.

    If there are more, whole tokens at the beginning of the passage are removed, and nothing else. A question that is
    longer even without its passage is refused, unless it then has at most ``whole`` tokens.

    Labels must be one token each. Many tokenizers encode ``" 1"`` as a space and a digit: a common prefix of all labels of
    an item is moved to the end of the prompt, which does not change their relative probabilities.
    """
    texts = continuations(item, scoring)
    option_ids = [continuation_ids(text, tokenizer) for text in texts]
    shared = _shared_beginning(option_ids) if scoring == "letter" else []
    for text, ids in zip(texts, option_ids, strict=True):
        _check_option(item, scoring, text, len(ids) - len(shared))
    prompt = prompt_of(item, scoring)
    if scoring == "letter":
        _check_labels_shown(item, prompt)
    prompt_ids = plain_ids(prompt.text, tokenizer)
    if not prompt_ids:
        raise InputError(f"{item.named('item')}: its prompt is empty; give it a text that the options can follow")
    longest = max(map(len, option_ids))
    excess = len(prompt_ids) + longest - max_tokens
    if excess > 0:
        prompt_ids = _cut_passage(item.named("item"), prompt, tokenizer, excess, longest, max(max_tokens, whole))
    return EncodedItem(prompt_ids + shared, [ids[len(shared) :] for ids in option_ids])


def encode_items(
    items: Iterable[Item],
    tokenizer: PreTrainedTokenizerBase,
    scoring: Scoring,
    max_tokens: int = MAX_TOKENS,
    whole: int = 0,
) -> list[EncodedItem]:
    """Token ids of all items, with the tokenizer's beginning tokens."""
    beginning = beginning_ids(tokenizer)
    limits = max_tokens - len(beginning), whole - len(beginning)
    encoded = (encode_item(item, tokenizer, scoring, *limits) for item in items)
    return [EncodedItem(beginning + item.prompt_ids, item.option_ids) for item in encoded]


def beginning_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens a tokenizer puts in front of every text, if any."""
    plain, whole = plain_ids(ANCHOR, tokenizer), list(tokenizer(ANCHOR).input_ids)
    starts = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def continuations(item: Item, scoring: Scoring) -> tuple[str, ...]:
    """Continuation of the prompt for each option, as text."""
    if scoring not in get_args(Scoring):
        names = get_args(Scoring)
        raise InputError(f"unknown scoring {scoring!r}; choose {' or '.join(names)}{did_you_mean(scoring, names)}")
    if scoring == "text":
        return item.options
    return tuple(f" {label}" for label in item.labels)


def prompt_of(item: Item, scoring: Scoring) -> Prompt:
    """The prompt of the continuations."""
    return item.letter_prompt if scoring == "letter" and item.letter_prompt is not None else item.prompt


def _shared_beginning(option_ids: list[list[int]]) -> list[int]:
    """Common prefix of all options, shorter than any of them."""
    columns = zip(*(ids[:-1] for ids in option_ids), strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def _check_option(item: Item, scoring: Scoring, text: str, tokens: int) -> None:
    if scoring == "letter" and tokens != 1:
        raise InputError(
            f"{item.named('item')}: label {text!r} is {tokens} tokens, and scoring by letter needs one; use scoring 'text'"
        )
    if tokens == 0:
        raise InputError(f"{item.named('item')}: option {text!r} has no tokens; give it a text")


def _check_labels_shown(item: Item, prompt: Prompt) -> None:
    """Refuse many labels that the prompt does not list, as of texts to classify: their probabilities would mean nothing."""
    count = len(item.labels)
    if count > len(ascii_uppercase) and any(f"\n{label}. " not in prompt.text for label in item.labels):
        raise InputError(
            f"{item.named('item')}: it has {count} options, which its prompt does not list by label, and scoring by letter needs "
            f"that (texts to classify have letters for at most {len(ascii_uppercase)} labels); use scoring 'text'"
        )


def plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of a text without special tokens around it. Whether it is too long is told by those who know what it is for."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def continuation_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of a text that follows another.

    Some tokenizers add a space in front of every text, even if it has one. They do not after an anchor.
    """
    anchor, both = plain_ids(ANCHOR, tokenizer), plain_ids(ANCHOR + text, tokenizer)
    return both[len(anchor) :] if both[: len(anchor)] == anchor else plain_ids(text, tokenizer)


def _cut_passage(
    name: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, excess: int, longest: int, most: int
) -> list[int]:
    """The prompt without at least the first ``excess`` tokens of its passage, and without partial characters."""
    ids, offsets = _with_offsets(name, prompt, tokenizer)
    start = len(prompt.head)
    stop = start + len(prompt.passage)
    passage = [index for index, (_, end) in enumerate(offsets) if start < end <= stop]
    needed = len(ids) - len(passage) + longest
    if excess > len(passage) and needed > most:
        raise InputError(
            f"{name}: question and options need {needed} tokens without its passage, and at most {most} are "
            "allowed; allow more or leave it out"
        )
    excess = min(excess, len(passage))
    while 0 < excess < len(passage) and offsets[passage[excess]][0] < offsets[passage[excess - 1]][1]:
        excess += 1
    left_out = set(passage[:excess])
    return [token for index, token in enumerate(ids) if index not in left_out]


def _with_offsets(
    name: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of the whole prompt, and the character range of each."""
    if not prompt.passage:
        ids = plain_ids(prompt.text, tokenizer)
        return ids, [(0, 0)] * len(ids)
    if not tokenizer.is_fast:
        raise InputError(f"{name}: its passage is too long, and only a fast tokenizer can cut it; use one")
    encoded = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded.input_ids), list(encoded.offset_mapping)
