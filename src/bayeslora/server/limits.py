"""How much the server takes on."""

from __future__ import annotations

from collections.abc import Iterable
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

TOKEN_BYTES = 16
"""Of UTF-8 that a token stands for at most, on the average of a text. Real text has 3 to 12."""

LOOKS = 8
"""Connections that are kept for questions about the server, such as its health, while all others wait for the model."""


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
    connections: int = 512
    """Connections at a time; fewer where the limit of open files leaves less room."""
    client_timeout: float = 10.0
    """Seconds that a client has to send the headers of a request, and to go on reading an answer."""
    grace: float = 30.0
    """Seconds that requests already taken have to finish once the server is told to stop."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < (value := getattr(self, field.name)) < float("inf"):
                raise InputError(f"{field.name.replace('_', '-')} is {value}; give a number above 0")
        if self.connections <= LOOKS:
            raise InputError(
                f"connections is {self.connections}; give at least {LOOKS + 1}, of which {LOOKS} never wait"
            )

    @property
    def max_prompt_bytes(self) -> int:
        """Of a question with its choices, or of a text to be continued: more are refused before anybody makes tokens of them."""
        return self.max_prompt_tokens * TOKEN_BYTES

    def require_readable(self, texts: Iterable[str]) -> None:
        """Refuse what is too long to be worth tokenising, which takes longer than to refuse it."""
        size = sum(len(text.encode()) for text in texts)
        if size > self.max_prompt_bytes:
            raise InputError(
                f"the text is {size} bytes; at most {self.max_prompt_bytes} are read, {TOKEN_BYTES} for each of the "
                f"{self.max_prompt_tokens} tokens that are allowed; send less"
            )
