"""The web page: a few static files, and the description of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Response

from bayeslora.server.api_page import Schema, api_page

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types, independent of this machine's table of file types."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The page loads nothing from other hosts, sends no referrer, and cannot be framed by other pages."""

FILES = {"/" if file.name == INDEX else f"/page/{file.name}": file for file in FOLDER.iterdir() if file.suffix in TYPES}
"""Files by path of the URL."""


DOCS = "/docs"
"""Path of the description of the API."""


def page_routes(openapi: Callable[[], Schema]) -> APIRouter:
    """Routes of all files of the page, which are small and read once, and of the description of the API."""
    router = APIRouter(include_in_schema=False)
    for path, file in FILES.items():
        router.add_api_route(path, _sender(file.read_bytes(), TYPES[file.suffix]), methods=["GET", "HEAD"])

    async def docs() -> Response:
        return Response(api_page(openapi()), media_type=TYPES[".html"], headers=HEADERS)

    router.add_api_route(DOCS, docs, methods=["GET", "HEAD"])
    return router


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
