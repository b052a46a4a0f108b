"""Requests for other hosts are refused, so that no page of elsewhere can have a browser ask for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.engine import Engine
from bayeslora.server.hosts import Hosts, KnowHost
from bayeslora.server.limits import Limits
from server.live import ASKED, NAME, connect, live
from train.tiny import bayeslora


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/models", "/v1/choices", "/openapi.json"])
def test_a_page_of_elsewhere_gets_nothing(url: str, path: str) -> None:
    """Its own name has come to lead here, and the browser takes what it gets for the page's own."""
    method, body = ("POST", ASKED) if path == "/v1/choices" else ("GET", None)
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.168.0.9",
    ):
        got = httpx.request(method, f"{url}{path}", json=body, headers={"Host": host})
        assert got.status_code == 403 and got.json()["error"]["code"] == "unknown_host"
        assert f"host '{host}' is not allowed" in got.json()["error"]["message"] and "--allowed-hosts" in got.text


def test_this_machine_may_ask_under_all_its_names(url: str) -> None:
    for host in ("localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200


def test_a_client_that_names_no_host_is_no_browser(url: str) -> None:
    with connect(url, b"GET /healthz HTTP/1.0\r\n\r\n") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "hosts, status",
    [
        ((b"localhost", b"127.0.0.1"), 200),
        ((b"localhost", b"evil.example"), 403),
        ((b"evil.example", b"localhost"), 403),
    ],
)
def test_of_several_hosts_all_must_be_known(hosts: tuple[bytes, ...], status: int) -> None:
    """uvicorn refuses such requests, but it need not be what runs the application."""
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(200)

    async def send(message: Message) -> None:
        seen.extend([message["status"]] if "status" in message else [])

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host) for host in hosts]}
    asyncio.run(KnowHost(app, Hosts())(scope, receive, send))
    assert seen == [status]


def test_names_that_were_given_are_known(trained: TrainedModel) -> None:
    hosts = Hosts.of("127.0.0.1", ["models.example.org"])
    with live(create_app(Engine(trained, Limits()), NAME, hosts=hosts)) as url:
        for host, status in (("Models.example.org", 200), ("localhost", 200), ("other.example.org", 403)):
            assert httpx.get(f"{url}/healthz", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "bound, named, known, unknown",
    [
        ("127.0.0.1", [], ["localhost:80", "[::1]"], ["10.0.0.1", "gpu-box", "", "a:b", "[::1", "localhost:80:80"]),
        ("0.0.0.0", [], ["10.0.0.1:8000", "[fe80::1]:8000", "localhost"], ["gpu-box", "10.0.0.1.evil.example"]),
        ("0.0.0.0", ["gpu-box"], ["gpu-box:8000", "10.0.0.1"], ["gpu-box.evil.example"]),
        ("gpu-box", [], ["gpu-box", "10.0.0.1"], ["evil.example"]),
        ("::", ["2001:db8::1", "*"], ["evil.example", "[2001:db8::1]"], ["a b:c"]),
    ],
)
def test_what_is_known_depends_on_where_it_listens(
    bound: str, named: list[str], known: list[str], unknown: list[str]
) -> None:
    hosts = Hosts.of(bound, named)
    assert all(map(hosts.know, known)) and not any(map(hosts.know, unknown))


@pytest.mark.parametrize("name", ["http://gpu-box", "gpu-box:8000", "gpu box", "*.example.org", ""])
def test_what_can_be_no_name(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("serve", run, "--port", 0, "--quiet", "--allowed-hosts", name) == 2
    assert f"allowed-hosts contains {name!r}; give names such as gpu-box" in capsys.readouterr().err
