"""Requests made from the server's own OpenAPI description, good and bad: answered as described, never by a failure of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeslora import load_run
from bayeslora.server.app import create_app
from bayeslora.server.engine import Engine
from bayeslora.server.limits import Limits
from fuzz.outcomes import fuzzed
from fuzz.test_adapters import json_values
from server.conftest import TEMPLATE
from server.live import live
from train.tiny import bayeslora, options

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    out: Path = tmp_path_factory.mktemp("trained") / "run"
    assert bayeslora(*options(out)) == 0
    trained = load_run(out)
    trained.loaded.tokenizer.chat_template = TEMPLATE
    with live(create_app(Engine(trained, Limits(max_tokens=8)), "run")) as url:
        yield url


@pytest.fixture(scope="module")
def requests(server: str) -> st.SearchStrategy[Any]:
    """Of all operations, as they are described and otherwise."""
    import schemathesis  # which takes seconds, and is of no use to other tests

    schema = schemathesis.openapi.from_url(f"{server}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    return st.one_of([it.as_strategy(generation_mode=how) for it in operations for how in schemathesis.GenerationMode])


@fuzzed
@given(data=st.data())
def test_requests_as_described_and_otherwise(requests: st.SearchStrategy[Any], data: st.DataObject) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    data.draw(requests).call_and_validate(checks=checks, timeout=30)


@fuzzed
@given(
    path=st.sampled_from(["/v1/choices", "/v1/completions", "/v1/chat/completions", "/nothing", "/v1/models"]),
    method=st.sampled_from(["POST", "GET", "PUT", "DELETE", "PATCH"]),
    body=st.binary(max_size=60) | json_values,
)
def test_bodies_of_any_kind(server: str, path: str, method: str, body: object) -> None:
    """What is no JSON, or JSON of another form: an error in OpenAI's shape, and nothing of how the server is made."""
    given_body = {"content": body} if isinstance(body, bytes) else {"json": _plain(body)}
    answer = httpx.request(method, server + path, **given_body, timeout=30)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"] and "Traceback" not in answer.text and ".py" not in answer.text


def _plain(value: object) -> object:
    """JSON has no NaN."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
