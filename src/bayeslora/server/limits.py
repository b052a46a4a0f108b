"""Limits of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from bayeslora.errors import InputError
from bayeslora.number_checks import check_number

CHOICES = 26
"""Maximum choices of a question: each has a letter."""

TEXT_CHARACTERS = 200_000
"""Maximum characters of one text, checked before tokenisation."""

STOPS = 4
COMPLETIONS = 8
BIASES = 300
PROMPTS = 16
MESSAGES = 256
TOP_LOGPROBS = 20
"""Maximum number per request."""

SEEDS = 2**63
"""Seeds are below this."""

BATCH = 32
"""Maximum requests per batch."""

TOKEN_BYTES = 16
"""Maximum UTF-8 bytes per token, on average over a text. Real text has 3 to 12."""

LOOKS = 8
"""Connections reserved for health checks and metrics, while all others wait for the model."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Configurable limits."""

    max_samples: int = 16
    """Maximum weight draws per request."""
    max_prompt_tokens: int = 4096
    """Maximum tokens of a question with its choices, or of a text to continue."""
    max_tokens: int = 512
    """Maximum tokens to generate per request."""
    max_body: int = 1_000_000
    """Maximum bytes of a request."""
    queue: int = 64
    """Maximum waiting requests; further ones are refused with status 429."""
    timeout: float = 60.0
    """Seconds after which a request is cancelled."""
    connections: int = 512
    """Maximum connections; fewer if the limit on open files requires it."""
    client_timeout: float = 10.0
    """Seconds for a client to send the headers of a request, and to continue reading a response."""
    grace: float = 30.0
    """Seconds to finish accepted requests after a signal to stop."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name.replace("_", "-"), getattr(self, field.name), above=0)
        if self.connections <= LOOKS:
            raise InputError(
                f"connections is {self.connections}; give at least {LOOKS + 1}; {LOOKS} are reserved for health checks"
            )

    @property
    def max_prompt_bytes(self) -> int:
        """Maximum bytes of a question with its choices, or of a text to continue; checked before tokenisation."""
        return self.max_prompt_tokens * TOKEN_BYTES

    def require_readable(self, texts: Iterable[str]) -> None:
        """Refuse texts that are too long before they are tokenised, which would take longer."""
        size = sum(len(text.encode()) for text in texts)
        if size > self.max_prompt_bytes:
            raise InputError(
                f"the text has {size} bytes; at most {self.max_prompt_bytes} are allowed, {TOKEN_BYTES} for each of "
                f"{self.max_prompt_tokens} tokens; shorten it"
            )
