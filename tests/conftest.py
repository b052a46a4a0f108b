"""Fixtures shared by all tests. Nothing here reaches a network."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import tempfile
import time

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

_HOME = "BAYESLORA_TEST_HOME"
"""Where the processes of a test run find what was made for all of them: a tiny model, and runs of it (see train/tiny.py)."""


def pytest_configure(config: pytest.Config) -> None:
    """Make that directory, once. A warning of ours is an error, which is not told to a process that only divides the work."""
    if _HOME not in os.environ:
        config.stash[_OWN] = os.environ[_HOME] = tempfile.mkdtemp(prefix="bayeslora-tests-")
    os.environ["XDG_RUNTIME_DIR"] = os.environ[_HOME]  # servers are announced there, apart from those of the developer
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.addinivalue_line("filterwarnings", "error::bayeslora.posterior.JitterWarning")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove it, if it is this process's."""
    if own := config.stash.get(_OWN, None):
        del os.environ[_HOME]
        shutil.rmtree(own, ignore_errors=True)


_OWN = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that train go first: no process is to begin a long one when the others have nothing left to do."""
    items.sort(key=lambda item: item.path.parent.name not in _LONG)


_LONG = ("train", "runs", "studies", "report", "server", "remote")


def pytest_collection_finish() -> None:
    """What has been imported stays: without this the garbage collector would look through all of it again and again."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Leave out what would begin after a deadline, in seconds of Unix time: what continuous integration has no time for."""
    if time.time() > float(os.environ.get("BAYESLORA_TEST_DEADLINE", "inf")):
        pytest.skip("no time is left (BAYESLORA_TEST_DEADLINE)")


@pytest.fixture
def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
