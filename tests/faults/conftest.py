"""What all tests of faults read."""

from __future__ import annotations

import pytest

from faults.commands import Sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources.make(tmp_path_factory.mktemp("sources"))
