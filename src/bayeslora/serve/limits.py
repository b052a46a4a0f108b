"""How much the server takes on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bayeslora.errors import InputError

CHOICES = 26
"""Of a question: each has a letter."""

TEXT_CHARACTERS = 200_000
"""Of a single text, before anybody makes tokens of it."""

STOPS = 4
PROMPTS = 16
MESSAGES = 256
TOP_LOGPROBS = 20
"""Per request, as far as there can be several."""

BATCH = 32
"""Requests computed together."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds that whoever runs the server may set."""

    max_samples: int = 16
    """Weight draws that a request may ask for."""
    max_prompt_tokens: int = 4096
    """Of a question with its choices, or of a text to be continued."""
    max_tokens: int = 512
    """That a request may have written."""
    max_body: int = 1_000_000
    """Bytes of a request."""
    queue: int = 64
    """Requests that wait; further ones are told to come again."""
    timeout: float = 60.0
    """Seconds after which a request is given up."""
    grace: float = 30.0
    """Seconds that requests already taken have to finish once the server is told to stop."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < (value := getattr(self, field.name)) < float("inf"):
                raise InputError(f"{field.name.replace('_', '-')} is {value}; give a number above 0")
