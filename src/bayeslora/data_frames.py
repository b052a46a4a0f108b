"""Results as tables of pandas, which is imported on use."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bayeslora.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame


class HasRow(Protocol):
    """A result that is a row of a table."""

    def to_row(self) -> Mapping[str, Any]:
        """Its cells by column."""
        ...


R = TypeVar("R", bound=HasRow)


class Results(list[R]):
    """A list of results that is also a table."""

    def to_pandas(self) -> DataFrame:
        """A table with one row per result, in their order."""
        return make_frame(result.to_row() for result in self)


def make_frame(rows: Iterable[Mapping[str, Any]], index: Sequence[str] | None = None) -> DataFrame:
    """Rows as a table of pandas, with names for the rows if there are any."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise InputError("to_pandas needs pandas, which is not installed; run: pip install pandas") from error
    return DataFrame(list(rows), index=None if index is None else list(index))


def quoted(text: str, most: int = 60) -> str:
    """A text in quotes on one line, shortened if it is long, as objects show it."""
    return repr(textwrap.shorten(text, most, placeholder=" …"))


def said_metrics(metrics: Mapping[str, float]) -> str:
    """The main metrics in a few words, as objects show them."""
    return ", ".join(f"{name} {metrics[name]:.3f}" for name in ("acc", "nll", "ece") if name in metrics)
