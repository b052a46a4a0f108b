"""Opens URLs without following redirects, with a limit on the time of a whole response."""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any


class _TimedReader(io.RawIOBase):
    """Reads from a socket until its timeout is over, counted from the start and not from the last byte."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._deadline = time.monotonic() + (sock.gettimeout() or 0)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there; raises if the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Close the file of the socket."""
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response whose headers and body must arrive within the socket's timeout together."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(sock))


class _Timed(urllib.request.AbstractHTTPHandler):
    """Makes connections with such responses."""

    def do_open(self, http_class: Callable[..., Any], req: urllib.request.Request, **http_conn_args: Any) -> Any:
        """Open a connection and send the request."""

        def timed(*args: Any, **settings: Any) -> Any:
            connection = http_class(*args, **settings)
            connection.response_class = _TimedResponse
            return connection

        return super().do_open(timed, req, **http_conn_args)


class _HTTPHandler(_Timed, urllib.request.HTTPHandler):
    """For http."""


class _HTTPSHandler(_Timed, urllib.request.HTTPSHandler):
    """For https."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Reports redirects instead of following them, so that the key is not sent to another host."""

    def redirect_request(self, *args: Any) -> None:
        """Do not follow."""


OPENER = urllib.request.build_opener(_NoRedirects, _HTTPHandler, _HTTPSHandler)
