"""Texts that are far too long are refused before tokens are made of them, and cost the others no time."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.engine import Engine
from bayeslora.server.limits import TOKEN_BYTES, Limits
from server.live import ASKED, NAME, live

LONG = "7" * 195_000  # four of them are a request of 780 KB
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/choices", {"question": LONG, "choices": [LONG + "0", LONG + "1"], "passage": LONG}),
    ("/v1/completions", {"prompt": [LONG] * 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}] * 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}] * 4}]}),
]


class Counting(Engine):
    """Counts what comes as far as the tokenizer."""

    def __init__(self, trained: TrainedModel, limits: Limits) -> None:
        super().__init__(trained, limits)
        self.read = 0

    def encode(self, question: Any) -> Any:
        self.read += 1
        return super().encode(question)

    def measure(self, text: Any) -> int:
        self.read += 1
        return super().measure(text)


def test_a_text_that_cannot_fit_never_comes_to_the_tokenizer(trained: TrainedModel) -> None:
    engine = Counting(trained, Limits())
    with live(create_app(engine, NAME)) as url, httpx.Client(base_url=url, timeout=60) as client:
        for path, body in REQUESTS * 3:
            got = client.post(path, json=body)
            assert got.status_code == 400 and got.json()["error"]["type"] == "invalid_request_error"
            assert "bytes; at most 65536 are allowed, 16 for each of 4096 tokens" in got.json()["error"]["message"]
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        assert engine.read == 1


def test_bytes_count_and_not_characters() -> None:
    limits = Limits(max_prompt_tokens=2)
    limits.require_readable(["a" * 2 * TOKEN_BYTES])
    limits.require_readable(["ä" * TOKEN_BYTES, ""])
    for texts in (["a" * (2 * TOKEN_BYTES + 1)], ["ä" * (TOKEN_BYTES + 1)], ["a" * TOKEN_BYTES] * 3):
        with pytest.raises(InputError, match=r"at most 32 are allowed, 16 for each of 2 tokens"):
            limits.require_readable(texts)
