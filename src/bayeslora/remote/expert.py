"""A chat model behind an OpenAI-style endpoint that answers questions with options, by letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bayeslora.remote.endpoint import Endpoint
from bayeslora.tasks import Item

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
        with ThreadPoolExecutor(self.workers, "bayeslora-expert") as executor:
            return list(executor.map(self._ask, items))

    def _ask(self, item: Item) -> int | None:
        said = self.endpoint.chat(self.model, [{"role": "user", "content": letter_question(item)}], ANSWER_TOKENS)
        return read_letter(said, len(item.options))


def letter_question(item: Item) -> str:
    """A question with its options by letter, and what to reply."""
    options = "\n".join(f"{_letter(number)}. {option.strip()}" for number, option in enumerate(item.options))
    return f"{item.prompt.text}\n\n{options}\n\nReply with the letter of the right option and nothing else."


def read_letter(said: str, options: int) -> int | None:
    """Number of the option whose letter a reply names first, if it names one."""
    found = next((ord(match) - ord("A") for match in _LETTER.findall(said)), options)
    return found if found < options else None


def _letter(number: int) -> str:
    return chr(ord("A") + number)
