"""Checks the ``Host`` header, against DNS rebinding.

A foreign web page can resolve its own domain name to this machine's address. The browser then treats responses of this server
as the page's own, and lets the page read them. Such requests have the page's domain name in their ``Host`` header.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from bayeslora.errors import InputError
from bayeslora.server.errors import Failure, error_reply

LOCAL = ("localhost", "127.0.0.1", "::1")
EVERY = "*"

_WITH_PORT = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(:\d*)?")


@dataclass(frozen=True)
class Hosts:
    """The ``Host`` headers that the server accepts.

    Attributes:
        names: accepted names, or ``*`` for all.
        addresses: whether to accept all IP addresses, which are safe: DNS rebinding needs a name.
    """

    names: frozenset[str] = frozenset(LOCAL)
    addresses: bool = False

    @classmethod
    def of(cls, bound: str, named: Iterable[str] = ()) -> Hosts:
        """Hosts of a server that listens on ``bound``, with additional names."""
        names = {_plain(name) for name in named}
        return cls(frozenset({*LOCAL, _plain(bound), *names}), addresses=not is_local(bound))

    def know(self, header: str) -> bool:
        """Whether to accept a request with this ``Host``."""
        found = _WITH_PORT.fullmatch(header)
        if found is None:
            return False
        host = _plain(found["host"])
        return EVERY in self.names or host in self.names or (self.addresses and _is_address(host))


class KnowHost:
    """Refuses requests for other hosts. Those without a ``Host`` pass, since all browsers send one."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        given = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if all(map(self._hosts.know, given)):
            return await self._app(scope, receive, send)
        message = (
            f"host {given[0]!r} is not allowed; use the server's address or localhost, or start the server with "
            "--allowed-hosts NAME"
        )
        await error_reply(Failure(403, message, code="unknown_host"))(scope, receive, send)


def check_hosts(names: Iterable[str]) -> None:
    """Refuse invalid host names."""
    for name in names:
        if name != EVERY and not _is_address(_plain(name)) and not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?", name):
            raise InputError(
                f"allowed-hosts contains {name!r}; give names such as gpu-box or models.example.org, without scheme or "
                "port, or * for all"
            )


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _plain(host: str) -> str:
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
