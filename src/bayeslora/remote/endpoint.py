"""An OpenAI-style completions endpoint: asked again where that may help, and believed only where it makes sense."""

# Why not httpx: it bounds neither the size of an answer nor the seconds for all of it, fails over ALL_PROXY=socks5://… (without
# socksio) and over [::1] or fd00::/8 in no_proxy, and shows a key that ends in a blank. With all that mended it is longer.

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bayeslora.errors import InputError
from bayeslora.remote.requests import Choice, Nonsense, Request, T

RESPONSE_BYTES = 64 * 2**20
"""An answer is not read further; vLLM takes about 400 bytes for a token."""

BACKOFF_SECONDS = 0.5
"""Before the first repetition; doubled for each further one."""

BUSY = (408, 425, 429)
"""What a server says that would answer a little later."""

ADVICE = {
    401: "give the server's key as api_key",
    403: "give the server's key as api_key",
    404: "give the url of the server, and serve the adapters under the names in manifest.json",
}
"""What to do about a status."""

SHOWN = 300
"""Characters of what an endpoint said that are passed on."""


class Refused(InputError):
    """A request that the endpoint does not want, now or later."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Passing(Exception):
    """A failure that may be gone at the next attempt."""


@dataclass(frozen=True)
class Endpoint:
    """The endpoint at ``url``, with or without the ``/v1`` at its end.

    Attributes:
        url: of the server.
        api_key: sent as a bearer token.
        timeout: seconds that one attempt may take.
        retries: attempts after the first one that failed for a reason that may pass.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    retries: int = 3

    def __post_init__(self) -> None:
        _check_url(self.url)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("the api_key has characters that no header can hold; give it as it was issued")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InputError(f"timeout is {self.timeout}; give a number of seconds above 0")
        if self.retries < 0:
            raise InputError(f"retries is {self.retries}; give 0 or more")

    @property
    def completions(self) -> str:
        """Where completions are asked for."""
        base = self.url.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/completions"

    def ask(self, adapter: str, request: Request[T]) -> T:
        """What the request is about, under an adapter."""
        body = json.dumps(_body(adapter, request)).encode()
        whom = f"{self.completions}, adapter {adapter!r}"
        for attempt in range(self.retries + 1):
            if attempt > 0:
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                return request.read(_choices(self._post(body), len(request.prompts)))
            except _Passing as error:
                reason = str(error)
            except Refused as error:
                raise Refused(error.status, f"{whom}: {error}") from None
            except Nonsense as error:
                raise InputError(
                    f"{whom}: its answer cannot be used: {error}; give the url of a server with an OpenAI-style completions "
                    "endpoint that gives log-probabilities, such as vLLM"
                ) from None
        raise OSError(f"{whom}: {reason} (attempts: {self.retries + 1}); is the server up, and has it room for more?")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.completions, body, headers)
        deadline = time.monotonic() + self.timeout
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                return _read(response, deadline)
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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Where an endpoint has moved to is told and not followed: the key is not meant for others."""

    def redirect_request(self, *args: Any) -> None:
        """Never."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isprintable() or " " in url:
        raise InputError(f"url is {url!r}; give one such as http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError("the url holds more than server and path; give a key as api_key, and leave the rest out")


def _body(adapter: str, request: Request[T]) -> dict[str, Any]:
    """The request in full: vLLM knows an adapter by ``model``, SGLang by ``lora_path``."""
    prompts = [list(prompt) for prompt in request.prompts]
    return {
        "model": adapter,
        "lora_path": adapter,
        "prompt": prompts,
        "max_tokens": 1,
        "temperature": 1.0,
        **request.fields,
    }


def _read(response: Any, deadline: float) -> bytes:
    """The body, unless it is too long or comes too slowly."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > RESPONSE_BYTES:
            raise Nonsense(f"it is longer than {RESPONSE_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise _Passing(f"the connection broke: {response.length} bytes of the answer are missing")
    return b"".join(parts)


def _http_failure(error: urllib.error.HTTPError) -> Exception:
    """What a status other than 200 means; the fault of the server may pass, ours will not."""
    try:
        said = _message(error.read(2**16))
    except (OSError, http.client.HTTPException):
        said = ""
    if 300 <= error.code < 400:
        said = f"it has moved to {error.headers.get('Location')}; give that url"
    text = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
    if error.code >= 500 or error.code in BUSY:
        return _Passing(text)
    return Refused(error.code, f"{text}; {ADVICE[error.code]}" if error.code in ADVICE else text)


def _message(body: bytes) -> str:
    """The words of an error, wherever a server puts them, on one line."""
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


def _choices(body: bytes, count: int) -> list[Choice]:
    """One choice for every prompt, in their order."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise Nonsense(f"it is no JSON: {body[:SHOWN].decode(errors='replace')!r}") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Nonsense(f"it has no choices: {str(answer)[:SHOWN]}")
    places = {choice["index"]: choice for choice in choices if isinstance(choice.get("index"), int)}
    if len(choices) != count or places.keys() != set(range(count)):
        raise Nonsense(f"it has {len(choices)} choices, and one for each of {count} prompts was asked for")
    return [places[row] for row in range(count)]
