"""Client of OpenAI-style completion endpoints, with retries and validation of responses."""

# Why not httpx: it limits neither the size of a response nor its total time, fails with ALL_PROXY=socks5://… (without socksio)
# and with [::1] or fd00::/8 in no_proxy, and reveals a key that ends in a space. With workarounds the code is longer.

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bayeslora.errors import InputError
from bayeslora.number_checks import check_count, check_number
from bayeslora.remote.opener import OPENER
from bayeslora.remote.requests import Choice, Nonsense, Request, T

Result = TypeVar("Result")

RESPONSE_BYTES = 64 * 2**20
"""Maximum size of a response; vLLM sends about 400 bytes per token."""

BACKOFF_SECONDS = 0.5
"""Wait before the first retry; doubled for each further one."""

BUSY = (408, 425, 429)
"""Statuses, besides 5xx, after which a retry may succeed."""

ADVICE = {
    401: "give the server's key as api_key, or on the command line in OPENAI_API_KEY",
    403: "give the server's key as api_key, or on the command line in OPENAI_API_KEY",
    404: "give the url of the server, and a model that it has: adapters are served under the names in manifest.json",
}
"""Advice by status."""

SHOWN = 300
"""Maximum characters of a server's message in an error."""


class Refused(InputError):
    """The endpoint refused a request, and a retry would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Passing(Exception):
    """A temporary failure; a retry may succeed."""


@dataclass(frozen=True)
class Endpoint:
    """The endpoint at ``url``, with or without the ``/v1`` at its end.

    Attributes:
        url: of the server.
        api_key: sent as a bearer token.
        timeout: seconds to wait for the server in an attempt, and for the whole of its answer with its headers.
        retries: maximum retries after temporary failures.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    retries: int = 3

    def __post_init__(self) -> None:
        _check_url(self.url)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("the api_key has characters that no header can hold; give it as it was issued")
        check_number("timeout", self.timeout, above=0, most=TIMEOUT_MAX)
        check_count("retries", self.retries, least=0)

    @property
    def completions(self) -> str:
        """URL of the completions endpoint."""
        return self._at("completions")

    def _at(self, path: str) -> str:
        base = self.url.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{path}"

    def ask(self, adapter: str, request: Request[T]) -> T:
        """Send a request for an adapter, with retries; returns what the request reads from the response."""
        wanted = "completions endpoint that gives log-probabilities, such as vLLM"
        return self._send(
            self.completions,
            f"{self.completions}, adapter {adapter!r}",
            _body(adapter, request),
            lambda answer: request.read(_choices(answer, len(request.prompts))),
            wanted,
        )

    def chat(self, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> str:
        """The most probable reply of a model to a chat, with retries."""
        url = self._at("chat/completions")
        body = {"model": model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        return self._send(url, f"{url}, model {model!r}", body, _reply, "chat endpoint")

    def _send(
        self, url: str, whom: str, asked: Mapping[str, Any], read: Callable[[bytes], Result], wanted: str
    ) -> Result:
        """Post a body until there is a response, and read it. ``whom`` and ``wanted`` are for messages."""
        body = json.dumps(asked).encode()
        for attempt in range(self.retries + 1):
            if attempt > 0:
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                return read(self._post(url, body))
            except _Passing as error:
                reason = str(error)
            except Refused as error:
                raise Refused(error.status, f"{whom}: {error}") from None
            except Nonsense as error:
                raise InputError(
                    f"{whom}: its answer cannot be used: {error}; give the url of a server with an OpenAI-style {wanted}"
                ) from None
        raise OSError(f"{whom}: {reason} (attempts: {self.retries + 1}); is the server up, and has it room for more?")

    def _post(self, url: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(url, body, headers)
        try:
            with OPENER.open(request, timeout=self.timeout) as response:
                return _read(response, RESPONSE_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                raise _http_failure(error) from None
        except TimeoutError:
            raise _Passing(f"no answer within {self.timeout:g} s") from None
        except urllib.error.URLError as error:
            late = isinstance(error.reason, TimeoutError)
            raise _Passing(
                f"no answer within {self.timeout:g} s" if late else f"cannot be reached: {error.reason}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"the connection broke: {error or type(error).__name__}") from None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https") and parts.hostname and parts.hostname.encode("idna") and parts.port != 0
        )
    except ValueError:  # also UnicodeError, for labels that no name can have
        good = False
    if not good or not url.isprintable() or " " in url:
        raise InputError(f"url is {url!r}; give one such as http://127.0.0.1:8000")
    if not parts.path.isascii():
        raise InputError(f"url is {url!r}; write its path in ASCII, with other characters as %XX")
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError("the url holds more than server and path; give a key as api_key, and leave the rest out")


def _body(adapter: str, request: Request[T]) -> dict[str, Any]:
    """Body of the request: vLLM selects an adapter by ``model``, SGLang by ``lora_path``."""
    prompts = [list(prompt) for prompt in request.prompts]
    return {
        "model": adapter,
        "lora_path": adapter,
        "prompt": prompts,
        "max_tokens": 1,
        "temperature": 1.0,
        **request.fields,
    }


def _read(response: Any, most: int) -> bytes:
    """Read the body; raises if it is too long."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > most:
            raise Nonsense(f"it is longer than {most} bytes")
    if response.length:
        raise _Passing(f"the connection broke: {response.length} bytes of the answer are missing")
    return b"".join(parts)


def _http_failure(error: urllib.error.HTTPError) -> Exception:
    """The exception for an error status: temporary for server errors, permanent for client errors."""
    try:
        said = _message(_read(error, 2**16))
    except (OSError, http.client.HTTPException, Nonsense, _Passing):
        said = ""
    if 300 <= error.code < 400:
        said = f"it has moved to {error.headers.get('Location')}; give that url"
    text = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
    if error.code >= 500 or error.code in BUSY:
        return _Passing(text)
    return Refused(error.code, f"{text}; {ADVICE[error.code]}" if error.code in ADVICE else text)


def _message(body: bytes) -> str:
    """The message of an error response on one line, from whichever field has it."""
    text = body.decode(errors="replace")
    try:
        said = json.loads(text)
        while isinstance(said, dict):
            said = next((said[name] for name in ("error", "message", "detail") if name in said), str(said))
        text = str(said)
    except (ValueError, RecursionError):
        pass
    line = " ".join(text.split())[:SHOWN]
    return "".join(character for character in line if character.isprintable())


def _reply(body: bytes) -> str:
    """Text of the reply to a chat."""
    [choice] = _choices(body, 1)
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        raise Nonsense(f"it has no message with a text: {str(choice)[:SHOWN]}")
    return content


def _choices(body: bytes, count: int) -> list[Choice]:
    """One choice per prompt, in order."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise Nonsense(f"it is not JSON: {body[:SHOWN].decode(errors='replace')!r}") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Nonsense(f"it has no choices: {repr(answer)[:SHOWN]}")
    places = {choice["index"]: choice for choice in choices if isinstance(choice.get("index"), int)}
    if len(choices) != count or places.keys() != set(range(count)):
        raise Nonsense(f"it has {len(choices)} choices, and one for each of {count} prompts was asked for")
    return [places[row] for row in range(count)]
