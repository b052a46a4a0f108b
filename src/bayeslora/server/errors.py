"""Errors as HTTP responses in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bayeslora.errors import InputError, first_line
from bayeslora.server.schemas import ErrorReply

SHOWN = 500
"""Maximum characters of a message."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Error types by status; all others are invalid requests."""

MEANINGS = {
    400: "The body is not valid JSON, or the request cannot be processed; the message gives the reason.",
    401: "The bearer token is missing or invalid.",
    403: "The Host header is not allowed.",
    404: "The model does not exist.",
    408: "The request body did not arrive before the timeout.",
    413: "The request body is too large.",
    422: "A field is missing, unknown, unsupported or invalid.",
    429: "Too many requests are pending; retry after the number of seconds in Retry-After.",
    500: "Internal server error.",
    503: "The server is shutting down or has too many connections, or the model cannot predict.",
    504: "The request timed out.",
}

RETRY_SECONDS = 1
"""Value of ``Retry-After`` for rejected requests."""

GONE = 499
"""Status in the metrics if the client disconnected before a response."""


class Failure(Exception):
    """An error to send as the response to a request."""

    def __init__(self, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


def busy() -> Failure:
    """The error when too many requests are pending."""
    return Failure(
        429, f"too many pending requests; retry in {RETRY_SECONDS} s", headers={"Retry-After": str(RETRY_SECONDS)}
    )


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Body of an error response in OpenAI's format."""
    clean = message.encode("utf-8", "replace").decode()[:SHOWN]
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def error_reply(failure: Failure) -> JSONResponse:
    """The response to a failed request."""
    return JSONResponse(
        error_body(failure.status, failure.message, code=failure.code), failure.status, headers=failure.headers
    )


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses of an endpoint, for its OpenAPI description."""
    return {status: {"model": ErrorReply, "description": MEANINGS[status]} for status in statuses}


def as_failure(error: BaseException) -> Failure | None:
    """The failure to report to the client; ``None`` for internal errors."""
    if isinstance(error, Failure):
        return error
    return Failure(400, str(error)) if isinstance(error, InputError) else None


def install_handlers(app: FastAPI) -> None:
    """Send all errors in the same format. :class:`bayeslora.server.middleware.Guard` handles unexpected ones."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        failure = as_failure(error)
        assert failure is not None
        return error_reply(failure)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_reply(_no_json(first["ctx"]["error"]))
        content_type = request.headers.get("content-type", "")
        return JSONResponse(_validation_body(error.errors(), error.body, content_type), 422)

    async def routed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, (UnicodeDecodeError, RecursionError)):
            return error_reply(_no_json(first_line(error.__cause__)))
        failure = Failure(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        return error_reply(failure)

    app.add_exception_handler(Failure, known)
    app.add_exception_handler(InputError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routed)


def _no_json(why: str) -> Failure:
    return Failure(400, f"the body is not valid JSON: {why}", code="json_invalid")


MISMATCHES = ("string_type", "list_type")
"""Errors of a value that has another type than one of those it may have."""


def _validation_body(errors: Sequence[Any], body: Any, content_type: str) -> dict[str, Any]:
    """Report the first validation error; others often follow from it."""
    if tuple(errors[0]["loc"]) == ("body",) and "json" not in content_type:
        given = f"it is {content_type[:SHOWN]!r}" if content_type else "it is missing"
        return error_body(422, f"send the header Content-Type: application/json; {given}", code=errors[0]["type"])
    first = _most_telling(errors, body)
    place = ".".join(map(str, _place(first, body)))
    unsupported = first["type"] == "none_required"
    text = "not supported; leave it out" if unsupported else first["msg"].removeprefix("Value error, ")
    return error_body(422, f"{place}: {text}" if place else text, code=first["type"], param=place[:SHOWN] or None)


def _most_telling(errors: Sequence[Any], body: Any) -> Any:
    """The first error. If its value may have one of several types, the first that is about the type it has."""
    place = _place(errors[0], body)
    same = [error for error in errors if _place(error, body)[: len(place)] == place]
    return min(same, key=lambda error: error["type"] in MISMATCHES and _place(error, body) == place)


def _place(error: Any, body: Any) -> tuple[str | int, ...]:
    """Where an error is in the body, without the types that pydantic names where a value may have one of several."""
    place: list[str | int] = []
    value = body
    for part in error["loc"][1:]:
        if isinstance(value, Mapping) and (part in value or error["type"] == "missing"):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        place.append(part)
    return tuple(place)
