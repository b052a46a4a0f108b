"""Which cases of a test are run by default, and which with the system tests only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], kept: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """All cases, of which those that are not kept are system tests: they take the same way through the code as a kept one.

    ``kept`` holds cases, or says of a case whether it is kept.
    """
    if not callable(kept):
        cases, kept = list(cases), list(kept)
        assert all(it in cases for it in kept), "a case that is kept is not there"
    keep = kept if callable(kept) else kept.__contains__
    return [case if keep(case) else _system(case) for case in cases]


def _system(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.system])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.system)
