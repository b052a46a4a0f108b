"""Results as tables, and what they show of themselves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from bayeslora.data_frames import Results, make_frame, quoted
from bayeslora.errors import InputError


class Row:
    def __init__(self, **cells: Any) -> None:
        self.cells = cells

    def to_row(self) -> Mapping[str, Any]:
        return self.cells


def test_a_list_of_results_is_a_list_and_a_table() -> None:
    rows = [Row(a=1, b=(0.5, 0.5)), Row(a=2, b=(1.0,))]
    results = Results(rows)
    assert results == rows and isinstance(results, list)
    frame = results.to_pandas()
    assert list(frame.columns) == ["a", "b"] and frame["a"].tolist() == [1, 2] and frame["b"][1] == (1.0,)
    assert Results[Row]().to_pandas().empty


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="to_pandas needs pandas, which is not installed; run: pip install pandas"):
        make_frame([{"a": 1}])


def test_long_texts_are_cut_to_one_line() -> None:
    assert quoted("a\nb") == "'a b'"
    assert len(quoted("word " * 100)) <= 62 and quoted("word " * 100).endswith("word …'")
