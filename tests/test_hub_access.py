"""Without a connection to the hub nothing waits for it: the cache is used, or the command ends."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from huggingface_hub import constants, is_offline_mode

from bayeslora import load_model, load_run
from bayeslora.errors import InputError
from bayeslora.hub_access import hub_or_cache, reachable


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all", "http", "https"):
        for form in (name, name.upper()):
            monkeypatch.delenv(f"{form}_proxy", raising=False)
            monkeypatch.delenv(f"{form}_PROXY", raising=False)


def closed_port() -> str:
    """The address of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_accepts_connections_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reachable(f"http://127.0.0.1:{server.getsockname()[1]}/path")


@pytest.mark.parametrize("address", ["", "http://", "http://127.0.0.1:99999", "https://no-such-host.invalid"])
def test_what_is_no_server_is_not(address: str) -> None:
    assert not reachable(address)


def test_nor_is_a_port_that_nobody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    address = closed_port()
    assert not reachable(address)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    assert reachable(address)  # who knows what the proxy can reach


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_connection_the_block_is_offline_and_what_follows_is_not(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    seen = []
    try:
        with hub_or_cache():
            seen.append(is_offline_mode())
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert seen == [True] and not is_offline_mode()


def test_with_a_connection_it_is_online(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with hub_or_cache():
            assert not is_offline_mode()


def test_who_is_offline_by_choice_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub_or_cache():
        assert is_offline_mode()
    assert is_offline_mode()


def test_who_never_chose_to_be_offline_is_not_told_to_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    with pytest.raises(InputError, match="the hub cannot be reached, and it is not in the local cache") as error:
        load_run("org/run-that-nobody-has", device="cpu")
    assert "HF_HUB_OFFLINE" not in str(error.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        load_run("org/run-that-nobody-has", device="cpu")


@pytest.mark.parametrize(
    ("load", "said"),
    [(load_model, "not in the local cache"), (load_run, "no adapter could be loaded from the hub")],
)
def test_loading_does_not_wait(monkeypatch: pytest.MonkeyPatch, load: Any, said: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s"))
    with pytest.raises(InputError, match=said):
        load("org/model-that-nobody-has", device="cpu")
