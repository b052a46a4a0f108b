from __future__ import annotations

import functools
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from bayeslora import load_run
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.app import create_app
from bayeslora.server.engine import Engine
from bayeslora.server.limits import Limits
from server.live import NAME, live
from train import tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """They are read once, and not for every client, as nothing here is encrypted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose draws differ, calibrated so that it keeps quiet at times; not to be changed."""
    place = Path(shutil.copytree(tiny.finished(), tmp_path_factory.mktemp("serve") / NAME))
    load_run(place).calibrate(coverage=0.5)
    return place


@pytest.fixture(scope="session")
def trained(run: Path) -> TrainedModel:
    """The same, loaded, and able to chat; not to be changed."""
    trained = load_run(run)
    trained.loaded.tokenizer.chat_template = TEMPLATE
    return trained


@pytest.fixture(scope="session")
def url(trained: TrainedModel) -> Iterator[str]:
    """Of a server of that run."""
    with live(create_app(Engine(trained, Limits(max_tokens=64)), NAME)) as url:
        yield url
