"""A chat model behind an OpenAI-style endpoint that answers questions with options, by letter."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bayeslora.errors import InputError
from bayeslora.remote.endpoint import Endpoint
from bayeslora.tasks import Item
from bayeslora.tasks.choices import listed

ANSWER_TOKENS = 8
"""Longest reply, in tokens: a letter, perhaps with a bracket or a few words around it."""

_LETTER = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z])")


@dataclass(frozen=True)
class Expert:
    """Asks a chat model for the letter of the right option.

    Attributes:
        endpoint: the server.
        model: name of the model there.
        workers: maximum concurrent requests.
    """

    endpoint: Endpoint
    model: str
    workers: int = 8

    def __call__(self, items: Sequence[Item]) -> list[int | None]:
        """Numbers of the chosen options; ``None`` where the reply names none."""
        asked = [letter_question(item) for item in items]  # refuses a question before the first request
        options = [len(item.options) for item in items]
        with ThreadPoolExecutor(self.workers, "bayeslora-expert") as executor:
            return list(executor.map(self._ask, asked, options))

    def _ask(self, question: str, options: int) -> int | None:
        said = self.endpoint.chat(self.model, [{"role": "user", "content": question}], ANSWER_TOKENS)
        return read_letter(said, options)


def letter_question(item: Item) -> str:
    """A question with its options by letter, and what to reply; one with more options than letters is refused."""
    letters, count = string.ascii_uppercase, len(item.options)
    if count > len(letters):
        raise InputError(
            f"question {item.id!r} has {count} options, and an expert that replies with a letter can be asked about at most "
            f"{len(letters)}; leave it out, or take a run as the second model"
        )
    choices = [option.strip() for option in item.options]
    asked = item.prompt.text.removesuffix(listed(choices, item.labels)).rstrip()  # which may have other labels
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=False))
    return f"{asked}\n\n{options}\n\nReply with the letter of the right option and nothing else."


def read_letter(said: str, options: int) -> int | None:
    """Number of the option whose letter a reply names first, if it names one; other capital letters are words."""
    named = (ord(letter) - ord("A") for letter in _LETTER.findall(said))
    return next((number for number in named if number < options), None)
